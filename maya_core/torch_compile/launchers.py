"""Launches of kernels that inductor generated: a launch is recorded, and the kernel is never compiled.

configurations.py chooses among a kernel's tile configurations, where inductor would try all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from maya_core.device.planner import Planner
from maya_core.patches import Patches
from maya_core.torch_compile.benchmarks import Prices
from maya_core.torch_compile.configurations import best
from maya_core.torch_compile.description import kernel_of
from maya_core.torch_compile.source import use_of
from maya_core.torch_compile.templates import with_mask
from maya_core.torch_seam import compile as seam
from maya_core.trace.triton_kernel import NAMESPACE

WRITTEN = ("out_ptr", "in_out_ptr", "ws_ptr")  # how inductor names the arguments that a kernel writes


def install(prices: Prices, patches: Patches) -> None:
    native, planner, gpu = prices.native, prices.planner, prices.planner.gpu

    def bench(self: Any, launcher: Any, *args: Any, with_profiler: bool = False, **kwargs: Any) -> float:
        return prices.of(lambda: launcher(*args, **kwargs, stream=0))

    def heuristics(module: ModuleType) -> None:
        class Recorded(module.CompileResult):  # type: ignore[name-defined, misc]  # torch is imported by the program, later
            """Replaces a compiled kernel."""

            def make_launcher(self) -> Any:
                function = self.kernel.fn
                constant = module.get_constexprs(function)
                _, given, absent = self._get_arg_lists(function.arg_names, constant)
                passed = [
                    name
                    for place, name in enumerate(function.arg_names)
                    if place not in constant and name not in absent
                ]
                runner = launcher_of(native, planner, self.kernel, self.config, passed)
                launcher = self._gen_launcher_code(
                    {"runner": runner}, given, ["grid_0", "grid_1", "grid_2", "stream", *passed]
                )
                launcher.config = self.config
                launcher.n_regs = launcher.n_spills = launcher.shared = 0
                launcher.cache_hash = "emulated"
                launcher.store_cubin = False
                return launcher

        def precompile(self: Any, warm_cache_only: bool = False, *_: Any, **__: Any) -> None:
            """Makes the launcher of the best configuration, where inductor would compile all of them."""
            with self.lock:
                if not warm_cache_only and not self.launchers:
                    config = best(gpu, self)
                    result = Recorded(self, config, self._create_compile_meta(config), self.inductor_meta)
                    self.compile_results = [result]
                    self.launchers = [result.make_launcher()]

        seam.PRECOMPILE.replace(patches, precompile)

    patches.when_imported(seam.TUNERS, heuristics)
    seam.TUNER_PLUGINS.replace(patches, lambda autotuner: [])  # they would compile and measure in their own ways
    # Further tuning would start from the chosen configuration; without a GPU there is nothing to measure.
    for tuning in seam.FURTHER_TUNING:
        tuning.replace(patches, lambda self, launcher, *args, **kwargs: launcher)
    seam.BENCH.replace(patches, bench)


def launcher_of(native: ModuleType, planner: Planner, tuner: Any, config: Any, names: list[str]) -> Callable[..., None]:
    """A function that records a launch of the kernel. `names` are the names of the arguments after the grid and stream."""
    writes, reads = _uses(tuner, names)
    sizes = [place for place, name in enumerate(names) if name.endswith("numel")]
    record, forget = native.record_call, native.forget
    op, number = "", -1

    def launch(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        nonlocal op, number
        if not op:  # in generated code, the description comes after the kernel
            kernel = kernel_of(tuner, config, getattr(tuner, "_maya_configs", 1))
            kernel = replace(kernel, template=with_mask(kernel.template, native, dict(zip(names, args, strict=False))))
            op, number = NAMESPACE + kernel.name, planner.number_of(kernel)
        written = [args[place] for place in writes if isinstance(args[place], torch.Tensor)]
        read = [args[place] for place in reads if isinstance(args[place], torch.Tensor)]
        record(op, [*read, [x, y, z], [args[place] for place in sizes], number], written)
        for one in written:
            forget(one)

    return launch


def _uses(tuner: Any, names: list[str]) -> tuple[list[int], list[int]]:
    """The places of the arguments that the kernel writes, and of those that it only reads."""
    if tuner.custom_kernel:
        use = use_of(tuner.fn.fn)
        writes = [place for place, name in enumerate(names) if name in use.writes]
    else:
        mutated = set(tuner.mutated_arg_names)
        writes = [place for place, name in enumerate(names) if name.startswith(WRITTEN) or name in mutated]
    return writes, [place for place in range(len(names)) if place not in writes]
