"""The CUDA shim: what Python code sees of the emulated device through torch.cuda, NVML and nvidia-smi."""
