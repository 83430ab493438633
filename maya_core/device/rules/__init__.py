"""Rules for ops whose result Meta kernels cannot tell: sizes that depend on values, cuDNN's own formats, sparse layouts.

Each file here is one family of ops. `book` holds what they share and what the device takes from them.
"""

from maya_core.device.rules import (
    convolution,
    losses,
    normalization,
    optimizers,
    recurrent,
    same_shape,
    selection,
    solvers,
    sparse,
)
from maya_core.device.rules.book import Rules, autocast_rule, describe, no_rule_message, rule, sparse_rule

FAMILIES = (convolution, losses, normalization, optimizers, recurrent, same_shape, selection, solvers, sparse)

__all__ = ["FAMILIES", "Rules", "autocast_rule", "describe", "no_rule_message", "rule", "sparse_rule"]
