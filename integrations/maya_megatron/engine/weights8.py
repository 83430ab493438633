"""Parameters that are stored in FP8 (--fp8-param-gather). Megatron puts their bytes into its buffers, gathers them, and writes them again
from its float32 copies after each step. Follows transformer_engine/pytorch/tensor/{float8_tensor,utils}.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from maya_core.torch_seam.tensors import pytree, wrapper_subclass
from maya_megatron.engine.device import device, launch
from maya_megatron.engine.quantized import Quantized, Quantizer

aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """Behaves like a 16-bit tensor. Other ops receive a 16-bit copy."""

    eight: Quantized
    quantizer: Quantizer
    columns_hold: bool  # whether the transposed copy has the present values

    @staticmethod
    def __new__(cls, values: Quantized, quantizer: Quantizer, dtype: torch.dtype, requires_grad: bool = False) -> Any:
        made = wrapper_subclass(
            cls, values.rows.shape, dtype=dtype, device=values.rows.device, requires_grad=requires_grad
        )
        made.eight, made.quantizer, made.columns_hold = values, quantizer, True
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantizedTensor({tuple(self.shape)}, {self.quantizer.dtype})"

    @property
    def _data(self) -> torch.Tensor:
        return self.eight.rows

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        launch("dequantize", [self.eight.rows], [out])
        return out

    def refresh_columns(self) -> None:
        if self.columns_hold and self.eight.columns is not None:
            return
        if self.eight.columns is None:
            self.eight.need_columns()
        else:
            launch("fp8_transpose", [self.eight.rows], [self.eight.columns])
        self.columns_hold = True

    def get_high_precision_init_val(self) -> torch.Tensor:
        """The initial values, on the host. One number represents all of them."""
        return torch.zeros(1, dtype=self.dtype).expand(self.shape)

    def clear_high_precision_init_val(self) -> None:
        pass

    def like(self) -> QuantizedTensor:
        made = QuantizedTensor(self.eight, self.quantizer, self.dtype)
        made.columns_hold = self.columns_hold
        return made

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        if isinstance(other, QuantizedTensor):
            self.eight = other.eight
        else:
            self.quantizer.fill(self.eight, other)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if op in (aten.detach.default, aten.expand.default, aten.alias.default):
            return args[0].like()
        if op is aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = args[1].dequantize() if isinstance(args[1], QuantizedTensor) else args[1]
            args[0].quantizer.fill(args[0].eight, source)
            return args[0]
        if op in (aten.view.default, aten.slice.Tensor) and args[0].quantizer.delayed:
            rows = op(args[0].eight.rows, *args[1:], **(kwargs or {}))
            return QuantizedTensor(Quantized(rows, None, args[0].eight.scale), args[0].quantizer, args[0].dtype)
        if op in LIKE:
            wanted = {
                "dtype": args[0].dtype,
                "device": args[0].device,
                **{k: v for k, v in (kwargs or {}).items() if v is not None},
            }
            return LIKE[op](args[0].shape, **wanted)
        plain = pytree.tree_map_only(QuantizedTensor, lambda one: one.dequantize(), (args, kwargs or {}))
        return op(*plain[0], **plain[1])


LIKE = {
    aten.empty_like.default: lambda shape, memory_format=None, **how: torch.empty(shape, **how),
    aten.zeros_like.default: lambda shape, memory_format=None, **how: torch.zeros(shape, **how),
}


def as_parameter(parameter: torch.nn.Parameter, quantizer: Quantizer) -> torch.nn.Parameter:
    """The same parameter in FP8, with its attributes."""
    with torch.no_grad():
        eight = quantizer(parameter.detach(), columns=True)
        device().are_parameters(eight.rows, eight.columns)
        made = torch.nn.Parameter(QuantizedTensor(eight, quantizer, parameter.dtype))
    vars(made).update({name: value for name, value in vars(parameter).items() if name not in vars(made)})
    return made


def replace_raw_data(tensor: QuantizedTensor, new: torch.Tensor) -> None:
    """Moves the bytes to the buffer of Megatron."""
    new.copy_(tensor.eight.rows.view(new.dtype))
    tensor.eight.rows = new.view(tensor.quantizer.dtype)
    device().are_parameters(new)


def cast_master_weights_to_fp8(
    model_weights: list[QuantizedTensor],
    master_weights: list[Any],
    start_offsets: list[Any],
    group: Any,
    fsdp_shard_model_weights: list[Any] | None = None,
    **_: Any,
) -> None:
    """Writes this rank's part of the weights. Megatron gathers them, so transposes are created when they are needed next."""
    if not model_weights:
        return
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    sixteen = [
        None if master is None else master.to(weight.dtype)
        for weight, master in zip(model_weights, master_weights, strict=True)
    ]
    delayed = model_weights[0].quantizer.delayed
    scales = [one.quantizer.scale for one in model_weights]
    amaxes = torch.zeros(len(model_weights), dtype=torch.float32, device="cuda")
    if not delayed:
        for index, master in enumerate(sixteen):
            if master is not None:
                launch("amax", [master], [amaxes[index]])
        _share(amaxes, scales, group)
    for weight, master, start, shard in zip(model_weights, sixteen, start_offsets, shards, strict=True):
        weight.columns_hold = False
        if master is not None:
            into = weight.eight.rows.view(-1)[start : start + master.numel()] if shard is None else shard
            launch("quantize", [master, weight.quantizer.scale], [into])
    if delayed:
        launch("multi_tensor_scale", [[one.quantizer.amax for one in model_weights]], [amaxes])
        _share(amaxes, scales, group)


def _share(amaxes: torch.Tensor, scales: list[torch.Tensor], group: Any) -> None:
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    launch("multi_tensor_compute_scale_and_scale_inv", [amaxes], scales)
