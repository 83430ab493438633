"""Linear and LayerNormLinear with tensor and sequence parallelism, as transformer_engine/pytorch/module/{linear,layernorm_linear}.py
order their products, collectives and frees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from maya_megatron.engine import norms
from maya_megatron.engine.device import device, product, record


@dataclass(frozen=True)
class Settings:
    """Of a layer: how it is split, and what it normalizes by."""

    mode: str | None  # "column", "row"
    group: Any
    tp_size: int
    sequence_parallel: bool
    fuse_wgrad: bool
    norm: str | None = None
    eps: float = 0.0

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.sequence_parallel and self.tp_size > 1


def gathered(x: torch.Tensor, group: Any, wait: bool = True) -> Any:
    out = torch.empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:], dtype=x.dtype, device=x.device)
    work = dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=not wait)
    return out if wait else (out, work)


def scattered(x: torch.Tensor, group: Any, wait: bool = True) -> Any:
    out = torch.empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:], dtype=x.dtype, device=x.device)
    work = dist.reduce_scatter_tensor(out, x, group=group, async_op=not wait)
    return out if wait else (out, work)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Settings, x: Any, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any) -> Any:
        inputs, statistics = x, ()
        if how.norm:
            inputs, statistics = norms.forward(how.norm, x, norm_weight, norm_bias, how.eps)
        if inputs.dtype != weight.dtype:
            inputs = inputs.to(weight.dtype)
        whole = gathered(inputs, how.group) if how.gathers_input else inputs
        out = torch.empty(*whole.shape[:-1], weight.shape[0], dtype=whole.dtype, device=whole.device)
        product(flat(whole), weight.t(), flat(out))
        del whole
        if how.mode == "row" and how.tp_size > 1:
            if how.sequence_parallel:
                out = scattered(out, how.group)
            else:
                dist.all_reduce(out, group=how.group)
        kept = inputs if weight.requires_grad else None
        ctx.save_for_backward(kept, weight, bias, *((x, norm_weight, norm_bias, *statistics) if how.norm else ()))
        ctx.how, ctx.shape, ctx.dtype = how, x.shape, x.dtype
        ctx.weight = weight if how.fuse_wgrad else None  # the very one: saving makes another of the same memory
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        how: Settings = ctx.how
        inputs, weight, bias, *normed = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[1:4]
        wants_input = wants_input or how.norm is not None
        grad = grad.contiguous()
        if how.mode == "row" and how.sequence_parallel and how.tp_size > 1:
            grad = gathered(grad, how.group)
        arriving = None
        if how.gathers_input and wants_weight:
            inputs, arriving = gathered(inputs, how.group, wait=False)

        dx: Any = None
        leaving = None
        if wants_input:
            dx = torch.empty(*grad.shape[:-1], weight.shape[1], dtype=grad.dtype, device=grad.device)
            product(flat(grad), weight, flat(dx))
            if how.mode == "column" and how.tp_size > 1:
                if how.sequence_parallel:
                    dx, leaving = scattered(dx, how.group, wait=False)
                else:
                    leaving = dist.all_reduce(dx, group=how.group, async_op=True)
        dweight = dbias = None
        if wants_weight:
            if arriving is not None:
                arriving.wait()
            dweight = weight_gradient(grad, inputs, weight, ctx.weight)
        if wants_bias and bias is not None:
            dbias = torch.empty_like(bias)
        del inputs, grad
        if leaving is not None:
            leaving.wait()
        dnorm = dnorm_bias = None
        if how.norm:
            x, norm_weight, norm_bias, *statistics = normed
            dx, dnorm, dnorm_bias = norms.backward(
                how.norm, dx.reshape(ctx.shape), x, norm_weight, norm_bias, statistics
            )
        if dx is not None:
            dx = dx.reshape(ctx.shape).to(ctx.dtype)
        return None, dx, dweight, dbias, dnorm, dnorm_bias


def weight_gradient(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, fused: Any) -> Any:
    """By itself, or added to the `main_grad` of a parameter whose layer fuses that."""
    if fused is None:
        return product(flat(grad).t(), flat(inputs), torch.empty_like(weight))
    product(flat(grad).t(), flat(inputs), fused.main_grad)
    if not hasattr(fused, "grad_added_to_main_grad"):
        return None
    fused.grad_added_to_main_grad = True
    return device().dummy_gradient(weight.shape, weight.dtype)


class Linear(torch.nn.Module):
    norm: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.save_original_input = False
        if parallel_mode == "column":
            self.out_features = out_features // tp_size
        elif parallel_mode == "row":
            self.in_features = in_features // tp_size
        draw = _drawing(get_rng_state_tracker, rng_tracker_name)
        self.weight = parameter((self.out_features, self.in_features), params_dtype, device, init_method, draw)
        self.bias: Any = None
        if parallel_mode is not None:
            parallel(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = parameter((self.out_features,), params_dtype, device, torch.nn.init.zeros_, draw)
            if parallel_mode == "row":
                self.bias.sequence_parallel = sequence_parallel
            elif parallel_mode == "column":
                parallel(self.bias, 0)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def settings(self) -> Settings:
        return Settings(
            self.parallel_mode, self.tp_group, self.tp_size, self.sequence_parallel, self.fuse_wgrad_accumulation,
            self.norm, getattr(self, "eps", 0.0),
        )  # fmt: skip

    def norm_parameters(self) -> tuple[Any, Any]:
        return None, None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        bias = self.bias if self.apply_bias else None
        out = _Linear.apply(self.settings(), inp, self.weight, bias, *self.norm_parameters())
        return (out, self.bias) if self.return_bias else out

    def backward_dw(self) -> None:
        """Nothing is left to do: weights' gradients are not put off here."""


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        **others: Any,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            device=device,
            **others,
        )
        self.eps, self.normalization, self.norm = eps, normalization, normalization
        self.zero_centered_gamma = zero_centered_gamma
        value = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = norms.norm_parameter(value, in_features, params_dtype, device, sequence_parallel)
        self.layer_norm_bias: Any = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = norms.norm_parameter(0.0, in_features, params_dtype, device, sequence_parallel)

    def norm_parameters(self) -> tuple[Any, Any]:
        return self.layer_norm_weight, self.layer_norm_bias


class _GroupedLinear(torch.autograd.Function):
    """One product for each expert, over its part of the tokens."""

    @staticmethod
    def forward(ctx: Any, layer: Any, splits: list[int], x: Any, *parameters: Any) -> Any:
        count = layer.num_gemms
        weights, biases = parameters[:count], parameters[count:]
        device().workspaces_of_streams()
        out = torch.empty(*x.shape[:-1], weights[0].shape[0], dtype=x.dtype, device=x.device)
        for part, weight, into in zip(flat(x).split(splits), weights, flat(out).split(splits), strict=True):
            if len(part):
                product(part, weight.t(), into)
        ctx.save_for_backward(x if weights[0].requires_grad else None, *weights, *biases)
        ctx.splits, ctx.count = splits, count
        ctx.weights = weights if layer.fuse_wgrad_accumulation else [None] * count
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        grad = grad.contiguous()
        parts = flat(grad).split(ctx.splits)
        dx = None
        if ctx.needs_input_grad[2]:
            dx = torch.empty(*grad.shape[:-1], weights[0].shape[1], dtype=grad.dtype, device=grad.device)
            for part, weight, into in zip(parts, weights, flat(dx).split(ctx.splits), strict=True):
                if len(part):
                    product(part, weight, into)
        dweights = [None] * ctx.count
        if ctx.needs_input_grad[3]:
            pieces = flat(x).split(ctx.splits)
            dweights = [weight_gradient(*four) for four in zip(parts, pieces, weights, ctx.weights, strict=True)]
        return None, None, dx, *dweights, *(torch.empty_like(bias) for bias in biases)


class GroupedLinear(torch.nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, fuse_wgrad_accumulation
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.save_original_input = False
        draw = _drawing(get_rng_state_tracker, rng_tracker_name)
        for index in range(num_gemms):
            weight = parameter((self.out_features, self.in_features), params_dtype, device, init_method, draw)
            if parallel_mode is not None:
                parallel(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{index}", weight)
        for index in range(num_gemms if bias else 0):
            self.register_parameter(
                f"bias{index}", parameter((self.out_features,), params_dtype, device, torch.nn.init.zeros_, draw)
            )

    def _biases(self) -> list[Any]:
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = self._biases() if self.apply_bias else []
        out = _GroupedLinear.apply(self, list(m_splits), inp, *weights, *biases)
        return (out, self._biases()) if self.return_bias else out

    def backward_dw(self) -> None:
        """As of Linear."""


def parameter(shape: tuple[int, ...], dtype: Any, device: Any, init: Any, draw: Callable[[], Any]) -> Any:
    made = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    if init is not None and made.device.type != "meta":
        with draw(), torch.no_grad():
            init(made)
    return made


def parallel(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def _drawing(tracker: Callable[[], Any] | None, name: str | None) -> Callable[[], Any]:
    if tracker is None:
        return nullcontext
    return lambda: tracker().fork(name) if name else tracker().fork()


def accumulate_wgrad(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    """apex' fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 and _fp16."""
    record("aten::mm", [flat(grad).t(), flat(inputs)], [main_grad])
