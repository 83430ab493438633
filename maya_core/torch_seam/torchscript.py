"""TorchScript: torch.jit.trace and torch.jit.script. In torch 2.10 to 2.15."""

from __future__ import annotations

from maya_core.torch_seam.names import Name

MAY_FUSE = Name("torch._C", "_jit_can_fuse_on_gpu")  # whether elementwise ops on GPUs are compiled into one kernel
SET_MAY_FUSE = Name("torch._C", "_jit_override_can_fuse_on_gpu")
