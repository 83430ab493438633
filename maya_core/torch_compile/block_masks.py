"""Block masks of flex_attention: how many blocks they leave decides what the attention takes, and they are made on the device, where values
are not computed. What a mask says depends on indices alone, most often: then the host can tell, too. Checked with torch 2.13."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch

from maya_core.ops.rules import Rules
from maya_core.patches import Patches

MOST = 1 << 28  # entries of a mask that the host goes through: a quarter of a GB, a second or two
COUNTS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def install(rules: Rules, patches: Patches) -> None:
    patches.when_imported("torch.nn.attention.flex_attention", functools.partial(_watch, rules, patches))


def _watch(rules: Rules, patches: Patches, module: ModuleType) -> None:
    original = module.create_block_mask
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and made.kv_num_blocks.is_cuda:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            _tell_counts(rules, original, made, given.arguments)
        return made

    patches.set(module, "create_block_mask", create_block_mask)


def _tell_counts(rules: Rules, create: Any, made: Any, given: dict[str, Any]) -> None:
    if (given["B"] or 1) * (given["H"] or 1) * given["Q_LEN"] * given["KV_LEN"] > MOST:
        return
    asked = given | {"device": "cpu", "_compile": False, "compute_dq_write_order": False}
    try:
        there = create(**asked)
    except Exception:  # a mask of tensors that are on the device (documents, say), whose values nobody knows
        return
    for name in COUNTS:
        if (counts := getattr(made, name)) is not None:
            rules.remember(counts, getattr(there, name))
