"""Fills predicted times into Megatron's log. While the program runs, times are removed from its lines, because they would be those of
the emulation; after the run, the line of an iteration is printed with predicted times. Memory is that of the emulated allocator and
stays. In a real job the last rank writes that line; here it is the last stage of rank 0's pipeline, which is always emulated."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import Integration

ELAPSED = re.compile(r" (elapsed time per iteration \(ms\)): [\d.einf+-]+ \|")
THROUGHPUT = re.compile(r" (throughput per GPU \(TFLOP/s/GPU\)): [\d.einf+-]+ \|")
POWER = re.compile(r" (energy per GPU \(J/iter/GPU\)|power per GPU \(W/GPU\)): [\d.einf+-]+ \|")
STARTING = re.compile(r"\(seconds\): *[\d.]+")  # in lines that are printed during start-up


def install(integration: Integration) -> None:
    patches = integration.patches

    def training(module: ModuleType) -> None:
        work: dict[str, float] = {}
        patches.set(module, "num_floating_point_operations", _noted(module.num_floating_point_operations, work))
        patches.set(module, "print_rank_0", _masked(module.print_rank_0))
        patches.set(module, "print_rank_last", functools.partial(_print_for_last_rank, integration, work))

    def timers(module: ModuleType) -> None:
        for name in ("log", "write"):
            patches.set(module.Timers, name, _nothing)

    patches.when_imported("megatron.training.training", training)
    patches.when_imported("megatron.core.timers", timers)


def masked(line: str) -> str:
    """The line without the times in it."""
    without, found = ELAPSED.subn("", line)
    without = STARTING.sub("(seconds): not measured", POWER.sub("", THROUGHPUT.sub("", without)))
    return f"{without} step time: predicted at the end |" if found else without


def to_fill_in(line: str, tflop_per_gpu: float | None) -> dict[str, Any] | None:
    """The line of an iteration with places for predicted numbers; None for other lines."""
    if not ELAPSED.search(line):
        return None
    line = POWER.sub("", line).replace("{", "{{").replace("}", "}}")
    line = ELAPSED.sub(r" \1: {step_ms:.1f} |", line)
    if tflop_per_gpu is None:
        return {"text": THROUGHPUT.sub("", line)}
    return {"text": THROUGHPUT.sub(r" \1: {rates[0]:.1f} |", line), "work": [tflop_per_gpu * 1e3]}


def _print_for_last_rank(integration: Integration, work: dict[str, float], message: Any) -> None:
    if not _stands_for_last_rank():
        return
    line = str(message)
    flop = work.get("flop")
    entry = to_fill_in(line, None if flop is None else flop / 1e12 / integration.world_size)
    if entry is not None:
        integration.log["iteration"] = entry
    print(masked(line), flush=True)


def _stands_for_last_rank() -> bool:
    parallel = sys.modules["megatron.core.parallel_state"]
    if not parallel.model_parallel_is_initialized():
        return True
    first = parallel.get_tensor_model_parallel_rank() == 0 and not parallel.get_data_parallel_rank(True)
    return bool(first and parallel.is_pipeline_last_stage(ignore_virtual=True))


def _noted(original: Callable[..., Any], work: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(original)
    def num_floating_point_operations(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        work["flop"] = float(found)
        return found

    return num_floating_point_operations


def _masked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_rank(message: Any, *args: Any, **kwargs: Any) -> Any:
        return original(masked(str(message)), *args, **kwargs)

    return print_rank


def _nothing(*_: Any, **__: Any) -> None:
    return None
