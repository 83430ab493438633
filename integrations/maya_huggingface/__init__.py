"""Maya in Hugging Face Trainer and accelerate. Nothing here yet: run scripts with `maya run -- python train.py`."""
