"""The CUDA shim: it makes Python code see the emulated device through torch.cuda, NVML and nvidia-smi."""
