"""Programs of TorchScript (torch.jit.trace, torch.jit.script). torch's own interpreter runs them, op by op, on the emulated device.

On a GPU, TorchScript compiles neighbouring elementwise ops into one kernel after its second call. That compiler writes CUDA code, so it is
switched off, and the user is told that its kernels are counted op by op.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from maya_core.patches import Patches
from maya_core.torch_seam.torchscript import MAY_FUSE, SET_MAY_FUSE

NOTE = "TorchScript: elementwise ops, which its compiler fuses on a GPU, are counted one by one. They may take less time and memory there."
# Two of them in a graph may be neighbours. Of the ops that the compiler knows, those that models use.
_ELEMENTWISE = re.compile(
    r"aten::(abs|add|clamp|cos|div|dropout|elu|erf|exp|gelu|hardswish|hardtanh|leaky_relu|log|lerp|masked_fill|mul|neg|pow|relu6?|"
    r"rsqrt|sigmoid|silu|sin|softplus|sqrt|sub|tanh|where)_?\("
)


def install(patches: Patches, note: Callable[[str], None]) -> Callable[[], None]:
    """Switches the compiler off. Returns a function that notes at the end of a program whether it would have had something to do."""
    before = MAY_FUSE.get()()
    SET_MAY_FUSE.get()(False)
    patches.on_undo(lambda: SET_MAY_FUSE.get()(before))
    earlier = _last_graph()

    def finish() -> None:
        last = _last_graph()
        if last != earlier and "device=cuda" in last and len(_ELEMENTWISE.findall(last)) > 1:
            note(NOTE)

    return finish


def _last_graph() -> str:
    """The graph that TorchScript ran last in this thread, as text."""
    return str(torch.jit.last_executed_optimized_graph())
