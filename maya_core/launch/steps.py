"""Training steps: counted at optimizer steps, by torch's own hooks, and the program stopped after enough of them.

A step is a round in which every optimizer of the program steps once. Which those are is learnt from the first round:
it is over when one of them steps again. So the end of the first step is known only a little later, and step ends are
kept as places in the record instead of being put there at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from maya_core.device.patches import Patches
from maya_core.launch.modules import on_device
from maya_core.trace.schema import Category


class StopProgram(SystemExit):
    """Raised in the program once the steps asked for are done: unwinds it cleanly, past `except Exception`, with exit code 0."""


class StepCounter:
    """Counts rounds of optimizer steps. `ends` holds, per finished step, how many events had been recorded by then."""

    def __init__(self, native: ModuleType, limit: int | None, on_step: Callable[[int], None] | None = None) -> None:
        self.native = native
        self.limit = limit
        self.on_step = on_step
        self.restart()

    def restart(self) -> None:
        self.ends: list[int] = []
        self._round: list[int] = []  # optimizers that have stepped since the last end
        self._round_size: int | None = None  # how many there are, once the first round is over
        self._round_end = 0
        self.idle = 0  # optimizers that are there and never stepped, by the last step's end
        self._stepped: set[int] = set()

    @property
    def enough(self) -> bool:
        return self.limit is not None and len(self.ends) >= self.limit

    def put_on(self, patches: Patches) -> None:
        patches.on_undo(torch_optimizer.register_optimizer_step_pre_hook(self._before).remove)
        patches.on_undo(torch_optimizer.register_optimizer_step_post_hook(self._after).remove)

    def finish(self) -> None:
        """The program is over: so is the first round, if no second one came to tell."""
        if self._round and self._round_size is None:
            self._end_step()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._round:
            self._round_size = self._round_size or len(self._round)
            self._end_step()
            if self.enough:
                raise StopProgram(0)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.native.label(on_device(parameters), Category.PARAMETERS)
        self.native.label(on_device(p.grad for p in parameters), Category.GRADIENTS)
        self.native.enter_optimizer()

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.native.leave_optimizer()
        states = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
        self.native.label(on_device(states), Category.OPTIMIZER_STATE)
        self._round.append(id(optimizer))
        self._stepped.add(id(optimizer))
        self._round_end = self.native.event_count()
        if len(self._round) == self._round_size:
            self._end_step()
            if self.enough:
                raise StopProgram(0)

    def _end_step(self) -> None:
        self._round.clear()
        self.ends.append(self._round_end)
        if self.enough:
            there = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
            self.idle = sum(id(one) not in self._stepped and bool(one.param_groups) for one in there)
        if self.on_step:
            self.on_step(len(self.ends))
