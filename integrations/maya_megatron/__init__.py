"""Maya in Megatron: run `pretrain_gpt.py` and its like with `maya run -- torchrun pretrain_gpt.py ...`, or Megatron Core as a library."""
