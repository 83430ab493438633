"""Makes calibrations: from profiler traces of real runs (`kineto`), from nccl-tests (`nccl_tests`), from micro-benchmarks on
a GPU that is there (`measure`). `factors` compares measurements with predictions, `commands` is `maya calibrate`."""
