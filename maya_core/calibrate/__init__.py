"""Makes calibrations: from profiler traces of real runs (`profiler_trace`), from nccl-tests (`nccl_tests`), from micro-benchmarks on
a GPU that is there (`measure`). `factors` compares measurements with predictions, `commands` is `maya calibrate`."""
