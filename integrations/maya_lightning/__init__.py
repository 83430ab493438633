"""Maya in Lightning. Nothing here yet: run Lightning scripts with `maya run -- python train.py`."""
