"""The emulated NCCL and gloo as torch.distributed sees them. The process groups themselves are native
(device/native/collectives.cpp); here are their tables, the values ranks give one another, and the patches."""
