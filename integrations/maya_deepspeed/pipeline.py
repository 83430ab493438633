"""Completes the messages in which pipeline stages announce shapes. DeepSpeed only writes the first numbers of a buffer on the GPU. The
rest would have no known value, and then the receiver could not read the message. This patch writes the whole buffer in the same
copy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from maya_core.integration import Integration


def install(integration: Integration) -> None:
    patches = integration.patches

    def engine(module: ModuleType) -> None:
        def _send_tensor_meta(self: Any, buffer: Any, recv_stage: int) -> None:
            described = [] if isinstance(buffer, torch.Tensor) else [len(buffer)]
            for tensor in [buffer] if isinstance(buffer, torch.Tensor) else buffer:
                described += [self.DTYPE_TO_ID[tensor.dtype], tensor.dim(), *tensor.shape]
            words = [0 if isinstance(buffer, torch.Tensor) else 2, *described]
            meta = torch.empty(module.TENSOR_META_SIZE, dtype=torch.int32, device=self.device)
            meta.copy_(torch.tensor(words + [0] * (len(meta) - len(words)), dtype=torch.int32))
            module.p2p.send(meta, recv_stage)

        patches.set(module.PipelineEngine, "_send_tensor_meta", _send_tensor_meta)

    patches.when_imported("deepspeed.runtime.pipe.engine", engine)
