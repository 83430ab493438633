"""Maya in DeepSpeed: run DeepSpeed programs with `maya run -- deepspeed train.py`, torchrun, or a framework that uses it."""
