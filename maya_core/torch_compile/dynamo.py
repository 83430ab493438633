"""Makes dynamo trace the program as it would on a GPU.

Maya notes modules with its own `nn.Module.__call__` and optimizer steps with torch's hooks. Dynamo would put both into graphs and
guards, so it sees torch's own `__call__` while it traces, and hooks are excluded. After a graph break, dynamo continues with each
function that is called next; functions of Maya are skipped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import optimizer as torch_optimizer

from maya_core.patches import Patches
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

    def tracing(module: ModuleType) -> None:
        patches.set(module, "_compile", with_torchs_call(module._compile))
        original, skip = module.CatchErrorsWrapper.__call__, module.FrameAction.SKIP

        @functools.wraps(original)
        def __call__(self: Any, frame: Any, *args: Any) -> Any:
            if frame.f_code.co_filename.startswith(FOLDER):  # nor the functions that they call
                return module.ConvertFrameReturn(frame_exec_strategy=module.FrameExecStrategy(skip, skip))
            return original(self, frame, *args)

        patches.set(module.CatchErrorsWrapper, "__call__", __call__)

    def wrapping(module: ModuleType) -> None:
        # A compiled module keeps the `__call__` of the original one, and dynamo traces it.
        optimized = module.OptimizedModule
        patches.set(optimized, "_initialize", with_torchs_call(optimized._initialize))

    def modules(module: ModuleType) -> None:
        patches.set(module, "unpatched_nn_module_call", module_call)  # what dynamo finds when it is imported

    def guards(module: ModuleType) -> None:
        # Where a module's class has its own __call__, dynamo guards that of nn.Module, and would find Maya's instead.
        builder = module.GuardBuilder
        match = builder.CLOSURE_MATCH

        @functools.wraps(match)
        def closure_match(self: Any, guard: Any) -> None:
            if self.get(guard) is not module_call:
                match(self, guard)

        patches.set(builder, "CLOSURE_MATCH", closure_match)

    def hooks(module: ModuleType) -> None:
        # torch itself breaks the graph inside every optimizer's step, so hooks that break it, too, change no graph.
        for table in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks):
            for number, hook in list(table.items()):
                if getattr(hook, "__module__", "").startswith("maya_core."):
                    table[number] = module.disable(hook, reason=OURS)

    patches.when_imported("torch._dynamo.convert_frame", tracing)
    patches.when_imported("torch._dynamo.eval_frame", wrapping)
    patches.when_imported("torch._dynamo.variables.nn_module", modules)
    patches.when_imported("torch._dynamo.guards", guards)
    patches.when_imported("torch._dynamo", hooks)
