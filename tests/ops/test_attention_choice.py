"""C++ decides which attention kernel runs in a program, and Python decides it for a recorded call on another GPU. Both decide the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from maya_core.device.emulated import EmulatedDevice
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.attention_choice import BACKENDS, CHOICE, AttentionInputs, changes, choose
from maya_core.trace.call import Call, Tensor, TorchSettings

GPUS = ("v100", "t4", "a100", "l40s", "h100", "b200", "rtx-pro-6000")
HEADS = ((64, 64), (72, 72), (128, 128), (192, 128), (256, 256), (6, 6), (320, 320))
DTYPES = {"Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32}


def cases() -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor | None, float, bool, bool]]:
    """Queries, keys and values with a mask, dropout, causality, and shared key heads."""
    for dtype, (head, value_head), (heads, kv_heads), (queries, keys) in itertools.product(
        DTYPES.values(), HEADS, ((8, 8), (8, 2)), ((128, 128), (1, 128), (64, 128), (128, 1))
    ):
        sizes = ((2, heads, queries, head), (2, kv_heads, keys, head), (2, kv_heads, keys, value_head))
        given = tuple(torch.empty(size, dtype=dtype, device="cuda", requires_grad=True) for size in sizes)
        masks = (
            None,
            torch.empty(queries, keys, dtype=dtype, device="cuda"),
            torch.empty(2, 1, 1, keys, dtype=dtype, device="cuda"),
        )
        for mask, dropout, causal in itertools.product(masks, (0.0, 0.1, 0.125), (False, True)):
            if mask is None or not causal:
                yield given, mask, dropout, causal, heads != kv_heads


def described(tensor: torch.Tensor) -> Tensor:
    name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    return Tensor(name, tuple(tensor.shape), tuple(tensor.stride()), "cuda")


@pytest.mark.parametrize("gpu", GPUS)
def test_both_choose_the_same(gpu: str) -> None:
    platform = Platform(find_gpu(gpu))
    device = EmulatedDevice(platform.gpu, 1)
    seen = set()
    try:
        for (query, key, value), mask, dropout, causal, gqa in cases():
            native = BACKENDS[torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=gqa)]
            asked = AttentionInputs(
                *map(described, (query, key, value)), None if mask is None else described(mask), dropout, causal, gqa
            )
            assert choose(asked, TorchSettings(), platform) == native, asked
            seen.add(native)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            plain = torch.empty(2, 8, 128, 64, dtype=torch.float16, device="cuda")
            native = BACKENDS[torch._fused_sdp_choice(plain, plain, plain)]
    finally:
        device.remove()
    only = TorchSettings(sdpa_flash=False, sdpa_cudnn=False, sdpa_math=False)
    asked = AttentionInputs(
        *[Tensor("Half", (2, 8, 128, 64), (65536, 8192, 64, 1), "cuda")] * 3, None, 0.0, False, False
    )
    assert choose(asked, only, platform) == native == "efficient"
    assert len(seen) > 1


def test_fused_here_and_separate_ops_there_is_told() -> None:
    tensor = Tensor("BFloat16", (4, 16, 1024, 64), (1048576, 65536, 64, 1), "cuda")
    call = Call(CHOICE, [], [tensor, tensor, tensor, None, 0.0, True, False, BACKENDS.index("flash")], [])
    assert changes([call], Platform(find_gpu("h100"))) == []
    [change] = changes([call], Platform(find_gpu("v100")))
    assert str(change) == (
        "attention of 4x16x1024x64 BFloat16 ran by its flash kernel where it was recorded, and there it runs as separate ops"
    )
