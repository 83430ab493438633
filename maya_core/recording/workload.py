"""Describes what a training step works on, from its first two steps: parameters, inputs, precision and sharding.

Only torch's own hooks are used, so the description is the same on emulated and on real GPUs. A prediction and the real run that it
predicted are paired by it.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from maya_core.recording.batches import batch_size, tensors_of
from maya_core.torch_seam import distributed as seam

STEPS = 2  # lengths that differ between these steps belong to the data, not to the job
WRAPPERS = {"DistributedDataParallel": "ddp", "DataParallel": "dp"}
# Entry points: modules of frameworks that wrap models or shard parameters in their own way. `WRAPPERS` names classes and what they are called
# here; `whole_shape(parameter)` returns the unsharded shape and what shards it, or None.
GROUP = "maya.workloads"


@dataclass(frozen=True)
class _Call:
    """One call of a model with gradients enabled."""

    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    samples: int
    tokens: int
    model: int  # the id of the model


# Registers two module hooks, before and after forward, and returns a function that removes them.
WatchModules = Callable[[Callable[..., None], Callable[..., None]], Callable[[], None]]


def by_hooks(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, with_kwargs=True)]

    def remove() -> None:
        while hooks:
            hooks.pop().remove()

    return remove


class WorkloadRecord:
    """Observes the first training steps in this process until `close`; `found` returns the description."""

    def __init__(self, watch_modules: WatchModules = by_hooks) -> None:
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._shapes: Counter[str] = Counter()
        self._parameters = {True: 0, False: 0}  # counts, by whether the parameters are trained
        self._sharding: set[str] = set()
        self._groups: list[int] = []
        self._autocast = ""
        self._step: list[_Call] = []
        self._steps: list[list[_Call]] = []
        self._lead: int | None = None  # the optimizer that steps first; its step ends a training step
        self._hooks = [
            register_optimizer_step_post_hook(self._after_step).remove,
            watch_modules(self._before_forward, self._after_forward),
        ]

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop()()

    @property
    def samples_per_step(self) -> float:
        """The samples of this rank."""
        return _mean(sum(call.samples for call in _calls_of_first_model(step)) for step in self._steps)

    @property
    def tokens_per_step(self) -> float:
        return _mean(sum(call.tokens for call in _calls_of_first_model(step)) for step in self._steps)

    def found(self) -> dict[str, Any] | None:
        """The fields of `report.prediction.Workload`; None if no step was trained."""
        if not self._steps:
            return None
        return {
            "trained_parameters": self._parameters[True],
            "frozen_parameters": self._parameters[False],
            "shapes": dict(sorted(self._shapes.items())),
            "autocast": self._autocast,
            "inputs": self._inputs(),
            "calls_per_step": round(_mean(len(step) for step in self._steps)),
            "sharding": sorted(self._sharding),
            "group_sizes": self._groups,
        }

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # Validation and models that only infer are ignored: they may or may not run before the training.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not self._autocast:
            self._autocast = _autocast()
        if module not in self._known:
            self._meet(module)

    def _meet(self, root: nn.Module) -> None:
        """Records a model. A module that runs and was not seen before is the root of one."""
        self._roots.add(root)
        for module in root.modules():
            self._known.add(module)
            if kind := _wrappers().get(type(module).__name__):
                self._sharding.add(kind)
        for shape, dtype, trained, sharding in _parameters(root):
            self._shapes[f"{_words(shape)} {dtype}" + ("" if trained else " frozen")] += 1
            self._parameters[trained] += _product(shape)
            self._sharding.update(sharding)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if torch.compiler.is_compiling() or module not in self._roots or not torch.is_grad_enabled():
            return
        try:
            tensors = [one for one in tensors_of([args, kwargs]) if one.dim()]
            samples, tokens = batch_size([args, kwargs])
        except Exception:  # inputs of an unknown type: the program must not fail because they are counted
            return
        shapes = [tuple(one.shape) for one in tensors]
        self._step.append(_Call(shapes, [_dtype(one.dtype) for one in tensors], samples, tokens, id(module)))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._lead = self._lead or id(optimizer)
        # Some frameworks step an optimizer several times, part by part, in one training step.
        if id(optimizer) != self._lead or not self._step:
            return
        self._steps.append(self._step)
        self._step = []
        self._groups = _group_sizes()
        if len(self._steps) == STEPS:
            while (
                len(self._hooks) > 1
            ):  # module hooks cost time at every call; torch is iterating over the optimizer hooks now
                self._hooks.pop()()

    def _inputs(self) -> list[str]:
        """The inputs of the models. Lengths that vary are written as '*'."""
        alike: dict[tuple[tuple[str, int], ...], list[_Call]] = {}
        for call in (call for step in self._steps for call in step):
            kind = tuple((dtype, len(shape)) for dtype, shape in zip(call.dtypes, call.shapes, strict=True))
            alike.setdefault(kind, []).append(call)
        found = set()
        for kind, calls in alike.items():
            for place, (dtype, dims) in enumerate(kind):
                lengths = [{call.shapes[place][dim] for call in calls} for dim in range(dims)]
                found.add(f"{_words([one.pop() if len(one) == 1 else '*' for one in lengths])} {dtype}")
        return sorted(found)


@functools.cache
def _frameworks() -> tuple[Any, ...]:
    return tuple(entry.load() for entry in sorted(entry_points(group=GROUP)))


@functools.cache
def _wrappers() -> dict[str, str]:
    return {name: kind for framework in _frameworks() for name, kind in framework.WRAPPERS.items()} | WRAPPERS


def _calls_of_first_model(step: list[_Call]) -> list[_Call]:
    """The calls of the first model, which receives the data. Other models receive its results."""
    return [call for call in step if call.model == step[0].model]


def _parameters(root: nn.Module) -> Iterator[tuple[tuple[int, ...], str, bool, list[str]]]:
    """The unsharded parameters of a model, and what shards them: (shape, dtype, trained, sharding)."""
    flat: set[int] = set()
    for module in root.modules():
        whole = seam.flat_parameter(module)
        if whole is None:
            continue
        # In FSDP1, parameters are parts of a flat one, which knows their shapes.
        parts, shapes = seam.flat_parts(whole)
        flat.update(map(id, (whole, *parts)))
        for shape in shapes:
            yield tuple(shape), _dtype(whole.dtype), whole.requires_grad, ["fsdp"]
    for parameter in nn.Module.parameters(root):
        if id(parameter) in flat:
            continue
        by = []
        shape = tuple(parameter.shape)
        if (
            placements := getattr(parameter, "placements", None)
        ) is not None:  # a DTensor, which has the unsharded shape
            by = [f"dtensor {','.join(map(repr, placements))}"]
        for framework in _frameworks():
            if (found := framework.whole_shape(parameter)) is not None:
                shape, by = found[0], [found[1]]
        yield shape, _dtype(parameter.dtype), parameter.requires_grad, by


def _group_sizes() -> list[int]:
    """The sizes of this rank's process groups: its degrees of parallelism."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    rank = dist.get_rank()
    return sorted({len(ranks) for ranks in seam.group_ranks() if rank in ranks and len(ranks) > 1})


def _autocast() -> str:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return _dtype(torch.get_autocast_dtype(device))
    return ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _mean(numbers: Iterator[int]) -> float:
    every = list(numbers)
    return sum(every) / len(every) if every else 0.0
