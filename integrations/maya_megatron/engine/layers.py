"""Modules with weights: their arguments and their parameters. What they compute is in linear.py, and for FP8 in linear8.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from maya_megatron.engine import linear8, norms
from maya_megatron.engine.linear import LinearSettings, grouped_linear, linear
from maya_megatron.engine.precision import autocast
from maya_megatron.engine.weights8 import as_parameter


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
        quantize_parameters(self, ["weight"])
        if bias:
            self.bias = parameter((self.out_features,), params_dtype, device, torch.nn.init.zeros_, draw)
            if parallel_mode == "row":
                self.bias.sequence_parallel = sequence_parallel
            elif parallel_mode == "column":
                parallel(self.bias, 0)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def settings(self) -> LinearSettings:
        return LinearSettings(
            self.parallel_mode, self.tp_group, self.tp_size, self.sequence_parallel, self.fuse_wgrad_accumulation,
            self.norm, getattr(self, "eps", 0.0),
        )  # fmt: skip

    def norm_parameters(self) -> tuple[Any, Any]:
        return None, None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        bias = self.bias if self.apply_bias else None
        eight = autocast().enabled
        out = linear8.linear(self, inp, bias, is_first_microbatch) if eight else linear(self, inp, bias)
        return (out, self.bias) if self.return_bias else out

    def backward_dw(self) -> None:
        """Does nothing, because weight gradients are not delayed here."""


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
        quantize_parameters(self, [f"weight{index}" for index in range(num_gemms)])
        for index in range(num_gemms if bias else 0):
            self.register_parameter(
                f"bias{index}", parameter((self.out_features,), params_dtype, device, torch.nn.init.zeros_, draw)
            )

    def _biases(self) -> list[Any]:
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = self._biases() if self.apply_bias else []
        if autocast().enabled:
            out = linear8.grouped_linear(self, inp, list(m_splits), is_first_microbatch, *weights, *biases)
        else:
            out = grouped_linear(self, inp, list(m_splits), *weights, *biases)
        return (out, self._biases()) if self.return_bias else out

    def backward_dw(self) -> None:
        """As in Linear."""


def parameter(shape: tuple[int, ...], dtype: Any, device: Any, init: Any, draw: Callable[[], Any]) -> Any:
    made = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    if init is not None and made.device.type != "meta":
        with draw(), torch.no_grad():
            init(made)
    return made


def quantize_parameters(layer: Any, names: list[str]) -> None:
    """Inside `fp8_model_init`, parameters are stored only in FP8."""
    recipe = autocast().recipe_of_parameters
    if recipe is None:
        return
    of_weights = linear8.quantizers_of(layer, recipe).weights
    for name, quantizer in zip(names, of_weights, strict=True):
        setattr(layer, name, as_parameter(getattr(layer, name), quantizer))


def parallel(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def _drawing(tracker: Callable[[], Any] | None, name: str | None) -> Callable[[], Any]:
    if tracker is None:
        return nullcontext
    return lambda: tracker().fork(name) if name else tracker().fork()
