"""LayerNorm and RMSNorm, by ATen's kernels, which have the same memory traffic, float32 statistics and gradients."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
STATISTICS = {"LayerNorm": 2, "RMSNorm": 1}  # numbers that are saved per row


def forward(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> tuple[Any, ...]:
    """Returns the output and the statistics."""
    if kind == "RMSNorm":
        out, scale = aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        return out, (scale,)
    out, mean, scale = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return out, (mean, scale)


def backward(
    kind: str, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, statistics: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    shape = [x.shape[-1]]
    if kind == "RMSNorm":
        dx, dweight = aten._fused_rms_norm_backward(grad, x, shape, *statistics, weight, [True, True])
        return dx, dweight, None
    return aten.native_layer_norm_backward(grad, x, shape, *statistics, weight, bias, [True, True, True])


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, eps: float, x: Any, weight: Any, bias: Any) -> torch.Tensor:
        out, statistics = forward(kind, x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, *statistics = ctx.saved_tensors
        return None, None, *backward(ctx.kind, grad, x, weight, bias, statistics)


class _NormLayer(torch.nn.Module):
    kind = ""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
        **_: Any,
    ) -> None:
        super().__init__()
        size = hidden_size if hidden_size is not None else normalized_shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = norm_parameter(0.0 if zero_centered_gamma else 1.0, size, params_dtype, device, sequence_parallel)
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = norm_parameter(0.0, size, params_dtype, device, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Norm.apply(self.kind, self.eps, x, self.weight, self.bias)
        return out


class LayerNorm(_NormLayer):
    kind = "LayerNorm"


class RMSNorm(_NormLayer):
    kind = "RMSNorm"


def norm_parameter(value: float, size: Any, dtype: Any, device: Any, sequence_parallel: bool) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(
        torch.full((size,) if isinstance(size, int) else size, value, dtype=dtype, device=device)
    )
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter
