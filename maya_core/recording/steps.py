"""Training steps: counted at optimizer steps, by torch's own hooks, and the program stopped after enough of them.

A step is a round in which every optimizer of the program steps once. Which those are is learnt from the first round:
it is over when one of them steps again. So the end of the first step is known only a little later, and step ends are
kept as places in the record instead of being put there at once. Where only one step is asked for, a second one is not
run to learn that: the round is over when no parameter of any optimizer is left that has not stepped.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from maya_core.patches import Patches
from maya_core.recording.module_paths import on_device, on_host
from maya_core.trace.schema import Category

# What torch's own Adam takes on the host against one fused kernel: 1.39 ns a parameter and 0.25 (PT-CPU and CPU-Adam of the
# ZeRO-Offload paper, arXiv 2101.06840).
OP_BY_OP = 5.6


class StopProgram(SystemExit):
    """Raised in the program once the steps asked for are done: unwinds it cleanly, past `except Exception`, with exit code 0."""


class StepCounter:
    """Counts rounds of optimizer steps. `ends` holds, per finished step, how many events had been recorded by then."""

    def __init__(self, native: ModuleType, limit: int | None, on_step: Callable[[int], None] | None = None) -> None:
        self.native = native
        self.limit = limit
        self.on_step = on_step
        self.loop_stops = False  # an integration asks, by `stop_if_enough`, between the steps of its framework's loop
        self.restart()

    def restart(self) -> None:
        self.ends: list[int] = []
        self._round: list[int] = []  # optimizers that have stepped since the last end
        self._round_size: int | None = None  # how many there are, once the first round is over
        self._round_end = 0
        self._entered = 0  # events recorded when the last optimizer step began
        self._aside = 0
        self.idle = 0  # optimizers that are there and never stepped, by the last step's end
        self._stepped: set[int] = set()  # parameters: frameworks wrap optimizers in others of the same parameters

    @property
    def enough(self) -> bool:
        return self.limit is not None and len(self.ends) >= self.limit

    def stop_if_enough(self) -> None:
        if self.enough:
            raise StopProgram(0)

    @property
    def under_way(self) -> int:
        """The number of the step that the program is in, from 1."""
        first_is_over = self._round_size is None and bool(self._round)
        return len(self.ends) + 1 + first_is_over

    @property
    def begun(self) -> bool:
        """An optimizer has stepped: on a GPU the weights would be others by now."""
        return bool(self._stepped)

    def install(self, patches: Patches) -> None:
        patches.on_undo(torch_optimizer.register_optimizer_step_pre_hook(self._before).remove)
        patches.on_undo(torch_optimizer.register_optimizer_step_post_hook(self._after).remove)

    def finish(self) -> None:
        """The program is over: so is the first round, if no second one came to tell."""
        if self._round and self._round_size is None:
            self._end_step()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._begin(optimizer)
        self._enter(optimizer)
        # A closure is forward and backward, inside the optimizer's step; Lightning does all its training so.
        if args and callable(args[0]):
            args = (self._outside(optimizer, args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._outside(optimizer, kwargs["closure"])}
        return args, kwargs

    def _enter(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters(optimizer)
        self.native.label(on_device(parameters), Category.PARAMETERS)
        self.native.label(on_device(p.grad for p in parameters), Category.GRADIENTS)
        self.native.enter_optimizer()
        self._entered = self.native.event_count()

    def _note_host_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing was asked of the device: parameters that were offloaded are stepped on the host, by torch's own optimizers."""
        work = 0.0
        for group in optimizer.param_groups:
            slower = 1.0 if group.get("fused") else OP_BY_OP
            for parameter in group["params"]:
                here = on_host([parameter] if parameter.grad is not None else [])
                states = on_host(optimizer.state.get(parameter, {}).values()) if here else []
                large = sum(one.nbytes for one in states if one.numel() == here[0].numel())
                work += slower * (3 * sum(one.nbytes for one in here) + 2 * large)  # the gradient is only read
        if work and self.native.event_count():
            self.native.record_host_work(round(work))

    def _outside(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def outside() -> Any:
            self.native.leave_optimizer()
            result = closure()
            self._enter(optimizer)
            return result

        return outside

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.native.leave_optimizer()
        if self.native.event_count() == self._entered:
            self._note_host_step(optimizer)
        states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        self.native.label(on_device(states), Category.OPTIMIZER_STATE)
        self._stepped.update(map(id, _parameters(optimizer)))
        self._end(optimizer)

    @contextmanager
    def one_step_of(self, owner: Any) -> Iterator[None]:
        """Optimizers that a framework steps inside, in parts (ZeRO: each group of parameters), are the owner's one step."""
        self._begin(owner)
        with self.aside():
            yield
        self._end(owner)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Optimizer steps that are none of the training: some frameworks make the optimizer's state by one."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def _begin(self, optimizer: Any) -> None:
        if not self._aside and id(optimizer) in self._round:
            self._round_size = self._round_size or len(self._round)
            self._end_step()
            if not self.loop_stops:
                self.stop_if_enough()

    def _end(self, optimizer: Any) -> None:
        if self._aside:
            return
        self._round.append(id(optimizer))
        self._round_end = self.native.event_count()
        if self._round_size is None and self.limit == 1 and not _waiting(self._stepped):
            self._round_size = len(self._round)
        if len(self._round) == self._round_size:
            self._end_step()
            if not self.loop_stops:
                self.stop_if_enough()

    def _end_step(self) -> None:
        self._round.clear()
        self.ends.append(self._round_end)
        if self.enough:
            self.idle = _waiting(self._stepped)
        if self.on_step:
            self.on_step(len(self.ends))


def _waiting(stepped: set[int]) -> int:
    """How many optimizers there are with parameters on the device that have not stepped."""
    there = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    waiting = [[p for p in _parameters(one) if id(p) not in stepped] for one in there]
    return sum(bool(on_device(parameters)) for parameters in waiting)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
