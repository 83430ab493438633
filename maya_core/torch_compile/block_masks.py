"""Block masks of flex_attention. The number of blocks in a mask decides how long the attention takes, but masks are created on the
device, where values are not computed. Most masks depend on indices alone, so the host can compute them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from maya_core.ops.rules import Rules
from maya_core.patches import Patches
from maya_core.torch_seam import compile as seam

MOST = 1 << 28  # entries of a mask that the host computes: a quarter of a GB, a second or two
# How the host computes it. Options that the installed torch does not have are left out.
ON_HOST = {"device": "cpu", "_compile": False, "compute_dq_write_order": False}
COUNTS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def install(rules: Rules, patches: Patches) -> None:
    seam.CREATE_BLOCK_MASK.wrap(patches, functools.partial(_watch, rules))


def _watch(rules: Rules, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and made.kv_num_blocks.is_cuda:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            _remember_counts(rules, original, made, given.arguments)
        return made

    return create_block_mask


def _remember_counts(rules: Rules, create: Any, made: Any, given: dict[str, Any]) -> None:
    if (given["B"] or 1) * (given["H"] or 1) * given["Q_LEN"] * given["KV_LEN"] > MOST:
        return
    on_host = given | {name: value for name, value in ON_HOST.items() if name in given}
    try:
        computed = create(**on_host)
    except Exception:  # the mask reads device tensors (document numbers, for example), whose values are unknown
        return
    for name in COUNTS:
        if (counts := getattr(made, name)) is not None:
            rules.remember(counts, getattr(computed, name))
