"""The names in the modules of the stand-ins for Transformer Engine, apex and mamba_ssm. Other names fail to import, and Megatron then
works without them (offloading of activations)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from maya_megatron.engine import (
    cross_entropy,
    dot_product_attention,
    graphs,
    layers,
    linear,
    mamba,
    norms,
    optimizers,
    padding,
    permutation,
    precision,
    router,
    softmax,
    weights8,
)
from maya_megatron.engine.device import device

VERSION = "2.9.0"  # the version that the stand-ins follow and report


class CudaRNGStatesTracker:
    """Like Megatron's own tracker, which is used unless --te-rng-tracker is given."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.seeds_.add(seed)
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Any:
        yield


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs with the present recipe, also when it runs again for backward."""
    for name in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(name, None)
    now = precision.autocast()
    how = dict(enabled=now.enabled, fp8_recipe=now.recipe, fp8_group=now.group)
    again = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal again
        recomputing, again = again, True
        with precision.activation_recompute_forward(now.enabled, recomputing):
            if not recomputing:
                return function(*args, **kwargs)
            with precision.fp8_autocast(**how):
                return function(*args, **kwargs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=True, **kwargs)


def get_workspace() -> Any:
    device().workspace()
    return None


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    return device().dummy_gradient(torch.Size(shape), dtype)


LAYERS = {
    "Linear": layers.Linear,
    "LayerNormLinear": layers.LayerNormLinear,
    "GroupedLinear": layers.GroupedLinear,
    "LayerNorm": norms.LayerNorm,
    "RMSNorm": norms.RMSNorm,
    "DotProductAttention": dot_product_attention.DotProductAttention,
}
OPS = ("Sequential", "FusibleOperation", "BasicLinear", "Bias", "LayerNorm", "RMSNorm", "AllReduce", "ReduceScatter",
       "GELU", "GEGLU", "ReLU", "ReGLU", "SiLU", "SwiGLU")  # fmt: skip
REFUSED_RECIPES = ("NVFP4BlockScaling", "CustomRecipe")
EIGHT_BITS = {
    "FP8GlobalStateManager": precision.FP8GlobalStateManager,
    "fp8_autocast": precision.fp8_autocast,
    "fp8_model_init": precision.fp8_model_init,
}
ROUTER = (
    router.fused_compute_score_for_moe_aux_loss,
    router.fused_moe_aux_loss,
    router.fused_topk_with_score_function,
)

TRANSFORMER_ENGINE: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        "Recipe": precision.Recipe,
        "Format": precision.Format,
        "DelayedScaling": precision.DelayedScaling,
        "Float8CurrentScaling": precision.Float8CurrentScaling,
        "Float8BlockScaling": precision.Float8BlockScaling,
        "MXFP8BlockScaling": precision.MXFP8BlockScaling,
        **{name: precision.refused_recipe(name) for name in REFUSED_RECIPES},
    },
    "transformer_engine.pytorch": {
        **LAYERS,
        "Fp8Padding": padding.Fp8Padding,
        "Fp8Unpadding": padding.Fp8Unpadding,
        "fp8_autocast": precision.fp8_autocast,
        "fp8_model_init": precision.fp8_model_init,
    },
    "transformer_engine.pytorch.module": LAYERS,
    "transformer_engine.pytorch.module.base": {
        "TransformerEngineBaseModule": layers.Linear,
        "get_dummy_wgrad": get_dummy_wgrad,
        "get_workspace": get_workspace,
    },
    "transformer_engine.pytorch.fp8": EIGHT_BITS,
    "transformer_engine.pytorch.cpu_offload": {"CPUOffloadEnabled": False},  # set by Megatron if it offloads itself
    "transformer_engine.pytorch.graph": {
        "make_graphed_callables": graphs.make_graphed_callables,
        **dict.fromkeys(
            ("save_fp8_tensors", "restore_fp8_tensors", "set_capture_start", "set_capture_end"), graphs.nothing
        ),
    },
    "transformer_engine.pytorch.utils": {"make_weak_ref": graphs.make_weak_ref},
    "transformer_engine.pytorch.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": checkpoint,
        "activation_recompute_forward": precision.activation_recompute_forward,
        "is_fp8_activation_recompute_enabled": lambda: precision.autocast().recomputes,
        "get_all_rng_states": dict,
    },
    "transformer_engine.pytorch.attention": {"DotProductAttention": dot_product_attention.DotProductAttention},
    "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": dot_product_attention.apply_rotary_pos_emb},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": cross_entropy.parallel_cross_entropy},
    "transformer_engine.pytorch.permutation": {
        "moe_permute": permutation.moe_permute,
        "moe_permute_with_probs": permutation.moe_permute_with_probs,
        "moe_unpermute": permutation.moe_unpermute,
        "moe_sort_chunks_by_index": permutation.moe_sort_chunks_by_index,
        "moe_sort_chunks_by_index_with_probs": permutation.moe_sort_chunks_by_index_with_probs,
    },
    "transformer_engine.pytorch.optimizers": {
        "FusedAdam": optimizers.FusedAdam,
        "FusedSGD": optimizers.FusedSGD,
        "multi_tensor_applier": optimizers.multi_tensor_applier,
        "multi_tensor_scale": optimizers.multi_tensor_scale,
        "multi_tensor_l2norm": optimizers.multi_tensor_l2norm,
        "multi_tensor_unscale_l2norm": optimizers.multi_tensor_unscale_l2norm,
    },
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": weights8.QuantizedTensor},
    "transformer_engine.pytorch.tensor.utils": {
        "replace_raw_data": weights8.replace_raw_data,
        "cast_master_weights_to_fp8": weights8.cast_master_weights_to_fp8,
    },
    "transformer_engine.pytorch.ops": {name: precision.not_emulated(name) for name in OPS},
    "transformer_engine.pytorch.router": {function.__name__: function for function in ROUTER},
}

_SOFTMAX = {"forward": softmax.forward, "backward": softmax.backward, "get_batch_per_block": lambda sq, sk, b, np: 4}


class _LayerNorm:
    """FastLayerNormFN and FusedLayerNormAffineFunction: called with `apply`."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any) -> torch.Tensor:
        eps = next((one for one in rest if isinstance(one, float)), 1e-5)
        out: torch.Tensor = norms._Norm.apply("LayerNorm", eps, x, weight, bias)
        return out

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, eps: float, memory_efficient: bool = False
    ) -> Any:
        """Megatron inspects its arguments."""


APEX: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.contrib": {},
    "apex.contrib.layer_norm": {},
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": _LayerNorm},
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _LayerNorm},
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": linear.accumulate_wgrad,
        "wgrad_gemm_accum_fp16": linear.accumulate_wgrad,
    },
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
}

MAMBA: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": "2.2.6"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.selective_state_update": {
        "selective_state_update": mamba.only_for_inference("selective_state_update")
    },
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": mamba.RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba.only_for_inference("mamba_chunk_scan_combined"),
        "mamba_split_conv1d_scan_combined": mamba.mamba_split_conv1d_scan_combined,
    },
    "causal_conv1d": {
        "__version__": "1.5.3",
        "causal_conv1d_fn": mamba.only_for_inference("causal_conv1d_fn"),
        "causal_conv1d_update": mamba.only_for_inference("causal_conv1d_update"),
    },
    "causal_conv1d.causal_conv1d_varlen": {
        "causal_conv1d_varlen_states": mamba.only_for_inference("causal_conv1d_varlen_states")
    },
}
