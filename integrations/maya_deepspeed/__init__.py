"""Maya for DeepSpeed: runs DeepSpeed programs under `maya run`, started by `deepspeed`, by torchrun, or by a framework that uses it."""
