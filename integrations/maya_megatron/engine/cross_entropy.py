"""Cross entropy over a vocabulary that is split among ranks. It overwrites the logits with their gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine.device import launch


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Any, target: Any, smoothing: float = 0.0, reduce: bool = False, group: Any = None, *_: Any
    ) -> Any:
        tokens = logits.shape[:-1]
        found = torch.empty(*tokens, 3, dtype=torch.float32, device=logits.device)  # maximum, sum, logit of the target
        launch("online_softmax", [logits, target], [found])
        if group is not None and (size := dist.get_world_size(group)) > 1:
            everywhere = torch.empty(size, *found.shape, dtype=torch.float32, device=logits.device)
            dist.all_gather_into_tensor(everywhere, found, group=group)
            found = everywhere
        loss = torch.empty(tokens, dtype=torch.float32, device=logits.device)
        launch("cross_entropy", [logits, target, found], [logits, loss])
        ctx.save_for_backward(logits.detach())
        return loss.mean() if reduce else loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        launch("cross_entropy_backward", [logits, grad], [logits])
        return logits, None, None, None, None, None, None


def parallel_cross_entropy(*args: Any) -> Any:
    return _CrossEntropy.apply(*args)
