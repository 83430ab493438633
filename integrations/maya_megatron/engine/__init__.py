"""Stand-ins for layers, optimizers and kernels of Transformer Engine, apex and mamba_ssm. They launch the same kernels, allocate the same
tensors and temporaries, and save the same for backward, but compute no values. They follow Transformer Engine 2.9 and mamba_ssm 2.2."""
