"""Which of torch's CUDA ops have a description. The test lists those without, so that a change of the list is deliberate."""

from __future__ import annotations

import torch

from maya_core.device.op_table import cuda_ops
from maya_core.ops.plan import find
from maya_core.torch_seam.version import installed
from maya_core.trace.call import Call

# By name without overload: sparse and quantized formats, nested tensors, inference, and views, which launch nothing.
NOT_DESCRIBED = {
    "_convert_weight_to_int4pack", "_cslt_compress", "_cslt_sparse_mm", "_cslt_sparse_mm_search", "_cudnn_rnn_flatten_weight",
    "_efficientzerotensor", "_fill_mem_eff_dropout_mask_", "_fused_sdp_choice",
    "_make_per_channel_quantized_tensor", "_make_per_tensor_quantized_tensor",
    "_mixed_dtypes_linear", "_native_multi_head_attention", "_nested_compute_contiguous_strides_offsets",
    "_nested_tensor_from_mask", "_nested_view_from_buffer", "_reshape_alias", "_segment_reduce_backward", "_sparse_semi_structured_addmm", "_sparse_semi_structured_apply",
    "_sparse_semi_structured_apply_dense", "_sparse_semi_structured_linear", "_sparse_semi_structured_mm",
    "_sparse_semi_structured_tile", "_to_sparse", "_to_sparse_bsc", "_to_sparse_bsr", "_to_sparse_csc", "_to_sparse_csr",
    "_to_sparse_semi_structured", "_transformer_encoder_layer_fwd", "_triton_multi_head_attention", "_triton_scaled_dot_attention",
    "_validate_compressed_sparse_indices", "_weight_int4pack_mm", "_weight_int8pack_mm", "as_strided", "dequantize", "empty_strided",
    "quantize_per_channel", "quantize_per_tensor", "quantize_per_tensor_dynamic", "record_stream", "sspaddmm", "unfold", "view",
    "view_as_complex", "view_as_real",
}  # fmt: skip
# Ops that came with a version of torch.
NOT_DESCRIBED_SINCE = {
    (2, 12): {"_flash_attention_forward_no_dropout_inplace", "_philox_key_fold_in", "_philox_key_split"},
    (2, 14): {"linalg_matrix_sqrth", "linalg_polar"},
    (2, 15): {"_cudnn_attention_forward_no_dropout_inplace", "_philox_randint_", "_scaled_addmm", "_scaled_addmm_"},
}


def is_described(name: str) -> bool:
    return find(Call(f"aten::{name}", [], [], [])) is not None


def torchs(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def test_every_pointwise_op_is_described() -> None:
    pointwise = [name for name in cuda_ops() if torch.Tag.pointwise in torchs(name).tags]
    assert len(pointwise) > 300
    assert [name for name in pointwise if not is_described(name)] == []


def test_ops_that_nobody_described() -> None:
    found = {name.partition(".")[0] for name in cuda_ops() if "miopen" not in name and not is_described(name)}
    new = [names for since, names in NOT_DESCRIBED_SINCE.items() if installed().version >= since]
    assert found == NOT_DESCRIBED.union(*new)
