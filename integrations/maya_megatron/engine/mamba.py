"""Stand-ins for the Mamba-2 layers of mamba_ssm and causal_conv1d, which Megatron's hybrid models use: what they allocate, in which order,
and what they save for backward. Follows mamba_ssm 2.2.6, ops/triton/{ssd_combined,ssd_chunk_scan,ssd_chunk_state,layernorm_gated}.py.
Kernels are priced by the bytes they move, which is a lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maya_core.errors import MayaError
from maya_megatron.engine.device import record

NAMESPACE = "mamba_ssm"
LEAST_ROWS = 32  # per block, in kernels that sum over blocks: BLOCK_SIZE_min


def kernel(name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    record(f"{NAMESPACE}::{name}", [one for one in inputs if one is not None], outputs)


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a scan: `heads` of `head` numbers each, in `groups` that share B and C of `state` numbers, over chunks of the sequence."""

    batch: int
    length: int
    heads: int
    head: int
    groups: int
    state: int
    chunk: int

    @property
    def chunks(self) -> int:
        return math.ceil(self.length / self.chunk)

    @property
    def splits(self) -> int:
        """The number of programs that share the heads of a group, each with its own sum."""
        together = self.heads // self.groups
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        each = max(min(math.ceil(self.batch * self.chunks * self.heads / processors), together), 1)
        return math.ceil(together / each)

    def steps(self) -> torch.Tensor:
        return new(self.batch, self.heads, self.chunks, self.chunk)

    def states(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return new(self.batch, self.chunks, self.heads, self.head, self.state, dtype=dtype)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        return new(self.batch, self.length, self.heads, self.head, dtype=dtype)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def _up_to_states(xbc: torch.Tensor, dt: torch.Tensor, sizes: MambaSizes, out_dtype: torch.dtype) -> tuple[Any, ...]:
    dt_out, decay = sizes.steps(), sizes.steps()
    kernel("chunk_cumsum", [dt], [dt_out, decay])
    own = sizes.states()
    kernel("chunk_state", [xbc, dt_out, decay], [own])
    states, final = sizes.states(out_dtype), new(sizes.batch, sizes.heads, sizes.head * sizes.state)
    kernel("state_passing", [own, decay], [states, final])
    return dt_out, decay, states, final


def _products(xbc: torch.Tensor, sizes: MambaSizes) -> torch.Tensor:
    products = new(sizes.batch, sizes.chunks, sizes.groups, sizes.chunk, sizes.chunk)
    kernel("bmm_chunk", [xbc], [products])
    return products


def _convolved(xbc: torch.Tensor, *parameters: Any) -> torch.Tensor:
    out = torch.empty_like(xbc, memory_format=torch.contiguous_format)
    kernel("causal_conv1d", [xbc, *parameters], [out])
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, dt_bias: Any, a: Any, d: Any, sizes: MambaSizes) -> Any:
        inner = sizes.heads * sizes.head
        z, xbc, dt = inputs.split([inner, weight.shape[0], sizes.heads], dim=-1)
        xbc = _convolved(xbc, weight, bias)
        dt_out, decay, states, _ = _up_to_states(xbc, dt, sizes, inputs.dtype)
        products = _products(xbc, sizes)
        out, before_gate = sizes.values(inputs.dtype), sizes.values(inputs.dtype)
        kernel("chunk_scan", [products, xbc, dt_out, decay, states, d, z], [out, before_gate])
        ctx.save_for_backward(inputs, weight, bias, before_gate, a, d, dt_bias)
        ctx.sizes = sizes
        return out.view(sizes.batch, sizes.length, inner)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        inputs, weight, bias, before_gate, a, d, dt_bias = ctx.saved_tensors
        sizes: MambaSizes = ctx.sizes
        inner, dtype = sizes.heads * sizes.head, inputs.dtype
        z, given, dt = inputs.split([inner, weight.shape[0], sizes.heads], dim=-1)
        xbc = _convolved(given, weight, bias)
        dinputs = torch.empty_like(inputs)
        dz, dgiven, ddt_given = dinputs.split([inner, weight.shape[0], sizes.heads], dim=-1)
        dxbc = torch.empty_like(xbc)
        grad = grad.contiguous()
        dt_in = dt.clone()
        dt_out, decay, states, _ = _up_to_states(xbc, dt_in, sizes, torch.float32)
        products = _products(xbc, sizes)
        sums = (math.ceil(sizes.chunk / LEAST_ROWS), sizes.batch, sizes.chunks, sizes.heads)
        dd_parts, dout = new(*sums, sizes.head if d.dim() == 2 else 1), torch.empty_like(grad)
        kernel("chunk_scan_bwd_dz", [xbc, z, before_gate, grad], [dz, dd_parts, dout])
        dd = dd_parts.sum((0, 1, 2))
        dstates = sizes.states()
        kernel("chunk_scan_bwd_dstates", [xbc, decay, dout], [dstates])
        narrow, narrow_states = sizes.states(dtype), sizes.states(dtype)
        kernel("state_passing_bwd", [states, decay, dstates], [narrow, narrow_states])
        dstates, states = narrow, narrow_states
        ddt, unused = sizes.steps(), new(*sums, sizes.head if d.dim() == 2 else 1)
        kernel(
            "chunk_scan_chunk_state_bwd_dx",
            [xbc, products, dout, dt_out, decay, dstates],
            [dxbc[..., :inner], ddt, unused],
        )
        unused = unused.sum((0, 1, 2))
        next_steps, db = _summed("chunk_state_bwd_db", [xbc, dt_out, decay, dstates], sizes)
        earlier, dc = _summed("chunk_scan_bwd_dc", [dout, states, decay], sizes)
        split = new(sizes.batch, sizes.chunks, sizes.splits, sizes.groups, sizes.chunk, sizes.chunk)
        kernel("chunk_scan_bwd_dcb", [xbc, dt_out, decay, dout], [split])
        dproducts = split.sum(2)
        del split
        kernel("bmm_chunk_bwd", [xbc, dproducts, db], [dxbc[..., inner:]])
        kernel("bmm_chunk_bwd", [xbc, dproducts, dc], [dxbc[..., inner:]])
        earlier = earlier.flip([-1]).cumsum(dim=-1).flip([-1])
        dsteps = new(sizes.batch, sizes.heads, sizes.chunks, math.ceil(sizes.chunk / LEAST_ROWS), sizes.chunk)
        kernel("chunk_scan_bwd_ddAcs", [xbc, dt_out, decay, dout, products], [dsteps])
        dsteps = dsteps.sum(3)
        dsteps += next_steps + earlier
        da, ddt_bias = torch.empty_like(a, dtype=torch.float32), torch.empty_like(dt_bias, dtype=torch.float32)
        kernel("chunk_cumsum_bwd", [dsteps, ddt, dt_in], [ddt_given, da, ddt_bias])
        dweight, dbias = torch.zeros_like(weight, dtype=torch.float32), torch.zeros_like(bias, dtype=torch.float32)
        kernel("causal_conv1d_bwd", [given, weight, dxbc], [dgiven, dweight, dbias])
        return (
            dinputs,
            dweight.to(weight.dtype),
            dbias.to(bias.dtype),
            ddt_bias,
            da,
            dd.reshape(d.shape).to(d.dtype),
            None,
        )


def _summed(name: str, inputs: Sequence[Any], sizes: MambaSizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of B or C, and its part for the steps: first per program of a group, then summed."""
    steps = sizes.steps()
    split = new(sizes.batch, sizes.length, sizes.splits, sizes.groups, sizes.state)
    kernel(name, inputs, [split, steps])
    return steps, split.sum(2)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: Any = None,
    headdim: int | None = None,
    ngroups: int = 1,
    rmsnorm_weight: Any = None,
    **_: Any,
) -> torch.Tensor:
    if seq_idx is not None or rmsnorm_weight is not None:
        raise MayaError(
            "packed sequences and norms inside mamba_ssm's scan are not emulated.", "Train a Mamba model without them."
        )
    heads = D.shape[0]
    head = D.shape[1] if D.dim() == 2 else int(headdim or 0)
    state = (conv1d_weight.shape[0] - heads * head) // ngroups // 2
    sizes = MambaSizes(zxbcdt.shape[0], zxbcdt.shape[1], heads, head, ngroups, state, chunk_size)
    out: torch.Tensor = _Scan.apply(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, sizes)
    return out


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, z: Any, groups: int) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, scale = torch.empty_like(rows), new(groups * len(rows))
        kernel("layer_norm_gated", [rows, weight, z], [out, scale])
        ctx.save_for_backward(rows, weight, scale, z)
        ctx.groups, ctx.shape = groups, x.shape
        return out.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight, scale, z = ctx.saved_tensors
        grad = grad.reshape(rows.shape).contiguous()
        dx, dz = torch.empty_like(rows), None if z is None else torch.empty_like(z)
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        parts = new(math.ceil(processors / ctx.groups), rows.shape[1])
        kernel("layer_norm_gated_bwd", [grad, rows, weight, scale, z], [dx, parts, *([] if dz is None else [dz])])
        return dx.reshape(ctx.shape), parts.sum(0).to(weight.dtype), dz, None


class RMSNorm(torch.nn.Module):
    """The norm of groups of features, gated if there is a gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.groups = hidden_size // (group_size or hidden_size)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = _GatedNorm.apply(x, self.weight, z, self.groups)
        return out


def only_for_inference(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise MayaError(
            f"{name} is not emulated.", "Train with Megatron's memory-efficient Mamba path, which is its default."
        )

    return refuse
