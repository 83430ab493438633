"""The emulated NCCL and gloo, as torch.distributed sees them.

The process groups themselves are native (device/native/collectives.cpp). This package has their tables, the values that ranks
exchange, and the patches of torch.distributed.
"""
