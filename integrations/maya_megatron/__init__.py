"""Maya for Megatron: supports scripts such as `pretrain_gpt.py` under `maya run -- torchrun`, and Megatron Core as a library."""
