"""Makes dynamo trace the program as it would on a GPU.

Maya notes modules with its own `nn.Module.__call__` and optimizer steps with torch's hooks. Dynamo would put both into graphs and
guards, so it sees torch's own `__call__` while it traces, and hooks are excluded. After a graph break, dynamo continues with each
function that is called next; functions of Maya are skipped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from maya_core.patches import Patches
from maya_core.torch_seam import compile as seam
from maya_core.version import PACKAGE

FOLDER = f"{PACKAGE}{os.sep}"
OURS = "an optimizer's step is noted"  # the reason of graph breaks that would not happen on a GPU


def install(module_call: Any, patches: Patches) -> None:
    """`module_call` is torch's own nn.Module.__call__."""

    def with_torchs_call(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            recorded = nn.Module.__call__
            nn.Module.__call__ = module_call  # type: ignore[method-assign]
            try:
                return function(*args, **kwargs)
            finally:
                nn.Module.__call__ = recorded  # type: ignore[method-assign]

        return run

    def skipping_ours(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: Any, frame: Any, *args: Any) -> Any:
            if frame.f_code.co_filename.startswith(FOLDER):
                return seam.skip_frame()
            return original(self, frame, *args)

        return __call__

    def matching(original: Callable[..., None]) -> Callable[..., None]:
        # Where a module's class has its own __call__, dynamo guards that of nn.Module, and would find Maya's instead.
        @functools.wraps(original)
        def closure_match(self: Any, guard: Any) -> None:
            if self.get(guard) is not module_call:
                original(self, guard)

        return closure_match

    seam.COMPILE.wrap(patches, with_torchs_call)
    seam.CATCH_ERRORS.wrap(patches, skipping_ours)
    # A compiled module keeps the `__call__` of the original one, and dynamo traces it.
    seam.INITIALIZE_OPTIMIZED_MODULE.wrap(patches, with_torchs_call)
    seam.UNPATCHED_MODULE_CALL.replace(patches, module_call)  # what dynamo finds when it is imported
    seam.CLOSURE_MATCH.wrap(patches, matching)
    # torch itself breaks the graph inside every optimizer's step, so hooks that break it, too, change no graph.
    seam.disable_hooks(patches, lambda hook: getattr(hook, "__module__", "").startswith("maya_core."), OURS)
