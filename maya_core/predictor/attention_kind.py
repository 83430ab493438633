"""The generation of flash kernels behind torch's flash attention. A trace does not contain it, and it changes durations by up to a factor of two."""

from __future__ import annotations

from maya_core.errors import MayaError
from maya_core.hardware.models import Gpu

DEFAULT_ATTENTION = "flash2"

# Durations relative to FlashAttention-2 (forward, backward). FlashAttention-1 and the Triton kernel of that time reach 0.4 to 0.6 of
# its rate on an A100 at lengths of 1k to 16k (figures 4-6 of the FlashAttention-2 paper, arXiv 2307.08691): 2.1 and 1.9 at head
# width 128. FlashAttention-3 is 1.5 to 2 times faster on Hopper (arXiv 2407.08608); elsewhere it does not run.
SLOWER_THAN_FLASH2 = {"flash1": (2.1, 1.9), "flash2": (1.0, 1.0), "flash3": (0.6, 0.65)}


def check_attention(kind: str, gpu: Gpu) -> None:
    if kind not in SLOWER_THAN_FLASH2:
        raise MayaError(f"attention '{kind}' is not known.", f"Give one of {', '.join(SLOWER_THAN_FLASH2)}.")
    if kind == "flash3" and gpu.compute_capability[0] != 9:
        raise MayaError(
            f"flash3 is FlashAttention-3, which runs on Hopper; {gpu.name} is {gpu.architecture}.",
            "Omit --attention, or give flash2.",
        )
