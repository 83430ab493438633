"""Maya in Megatron. Nothing here yet."""
