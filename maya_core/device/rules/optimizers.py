"""Fused optimizers: they change their arguments and return nothing, which is all a Meta kernel has to say."""

from __future__ import annotations

from typing import Any

from maya_core.device.rules.book import describe


@describe(
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",
    "aten::_fused_sgd_.tensor_lr",
    "aten::_fused_adagrad_",
    "aten::_fused_adagrad_.tensor_lr",
)
def fused_step(*_: Any, **__: Any) -> None: ...
