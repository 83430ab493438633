"""The face of the emulated device: what Python code that asks torch.cuda, NVML or nvidia-smi gets to see."""
