"""Layers, optimizers and kernels of Transformer Engine and apex as the emulated device does them: the same kernels, tensors and
temporaries, and the same kept for backward; no values. Follows Transformer Engine 2.9 and mamba_ssm 2.2."""
