"""Maya in DeepSpeed. Nothing here yet."""
