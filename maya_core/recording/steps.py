"""Counts training steps with torch's optimizer hooks, and stops the program after the requested number.

The program may say itself where a step ends (`maya_core.step()`, `--step-at`). A CUDA graph that contains an optimizer's step is a step each
time it is replayed; what ran before, to warm up, is none. Otherwise, a step is a round in which every optimizer of the program steps once. The number of optimizers is learned from the first round,
which is over when one of them steps again. The end of the first step is therefore only known a little later, so step ends are kept
as places in the record and inserted afterwards. If only one step is requested, no second one is run to find its end: the round is
over when every parameter of every optimizer has stepped. In a program without an optimizer of torch, each backward pass ends a step.
"""

from __future__ import annotations

import functools
import gc
import linecache
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from maya_core import marking
from maya_core.marking import HOW_TO_MARK
from maya_core.patches import Patches
from maya_core.recording.module_paths import on_device, on_host
from maya_core.recording.step_line import StepLine
from maya_core.torch_seam.training import INIT_OPTIM_STATE
from maya_core.trace.schema import Category

# How much slower torch's own Adam is on the host than one fused kernel: 1.39 ns per parameter instead of 0.25 (PT-CPU and CPU-Adam
# in the ZeRO-Offload paper, arXiv 2101.06840).
OP_BY_OP = 5.6


_MARK = re.compile(r"maya_core\.step\(|from maya_core import .*\bstep\b")  # in the sources of a program
_MOST_WARMING_UP = 30  # steps before the first replay; DistributedDataParallel wants 11
_MOST_WAITED = 1000  # requested steps that may pass before the first mark of a program that has one


class StopProgram(SystemExit):
    """Raised in the program after the requested steps. It passes `except Exception` and ends the program with exit code 0."""


class StepCounter:
    """Counts rounds of optimizer steps. `ends` contains, for each completed step, the number of events recorded by then."""

    def __init__(
        self,
        native: ModuleType,
        limit: int | None,
        on_step: Callable[[int], None] | None = None,
        tell: Callable[[str], None] = lambda _: None,
        step_at: str | None = None,
        is_library: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`tell` is called with what the user should know; `step_at` is the line of the program at which a step ends; `is_library` tells of
        a file whether it is no part of the program."""
        self.native = native
        self.limit = limit
        self.on_step = on_step
        self._tell = tell
        self._is_library = is_library
        self._line = StepLine(step_at, self.mark) if step_at else None
        self.before_stop: Callable[[], None] = lambda: None  # called where the program is stopped
        self.loop_stops = False  # an integration calls `stop_if_enough` between the steps of its framework's loop
        self.restart()

    def restart(self) -> None:
        self.ends: list[int] = []
        self._round: list[int] = []  # optimizers that have stepped since the last step end
        self._round_size: int | None = None  # the number of optimizers, once the first round is over
        self._round_end = 0
        self._entered = 0  # events recorded when the last optimizer step began
        self._aside = 0
        self._marked = self._line is not None  # the program says where steps end
        self._seen: set[int] = set()  # ids of optimizers that have stepped
        self._backwards: list[int] = []  # events recorded at the end of each backward pass before any optimizer stepped
        self._by_backwards = False
        self._awaits_mark: bool | None = None  # whether the program will mark its steps; None: nobody has looked
        self._awaits_graph: bool | None = None  # whether the program will capture its step; None: nobody has looked
        self._captured = 0  # optimizer steps in the capture that is going on
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # that contain an optimizer's step
        self._by_replays = False
        self.idle = 0  # optimizers that had not stepped by the end of the last step
        self._stepped: set[int] = (
            set()
        )  # ids of parameters, because frameworks wrap optimizers in others with the same parameters

    @property
    def enough(self) -> bool:
        if self.limit is None or len(self.ends) < self.limit:
            return False
        if self._awaits_graph and len(self.ends) < self.limit + _MOST_WARMING_UP:
            return False
        return not (self._awaits_mark and len(self.ends) < _MOST_WAITED * self.limit)

    def stop_if_enough(self) -> None:
        if self.enough:
            self.before_stop()
            raise StopProgram(0)

    def _stop_here(self) -> None:
        """Stops at the end of a step, if the framework's loop does not. A loop that takes many steps at once is not waited for."""
        if not self.loop_stops or (self.limit is not None and len(self.ends) > self.limit + 1):
            self.stop_if_enough()

    @property
    def under_way(self) -> int:
        """The number of the present step, counted from 1."""
        first_is_over = self._round_size is None and bool(self._round)
        return len(self.ends) + 1 + first_is_over

    @property
    def marked_line_was_reached(self) -> bool:
        """Whether the program came to the line that the user gave, if one was given."""
        return self._line is None or self._line.reached

    @property
    def begun(self) -> bool:
        """Whether an optimizer has stepped, so that on a GPU the weights would have changed."""
        return bool(self._stepped)

    def install(self, patches: Patches) -> None:
        patches.on_undo(torch_optimizer.register_optimizer_step_pre_hook(self._before).remove)
        patches.on_undo(torch_optimizer.register_optimizer_step_post_hook(self._after).remove)
        patches.set(torch.autograd, "backward", self._noting_backward(torch.autograd.backward))
        marking.listeners.append(self.mark)
        patches.on_undo(lambda: marking.listeners.remove(self.mark))
        if self._line is not None:
            self._line.install(patches)
        INIT_OPTIM_STATE.wrap(patches, self._aside_of)
        patches.wrap(torch.cuda.CUDAGraph, "capture_end", self._ending_capture)
        patches.wrap(torch.cuda.CUDAGraph, "replay", self._counting_replays)

    def finish(self) -> None:
        """Called at the end of the program, which also ends a first round that had no second one."""
        if self._round and self._round_size is None and not self._marked:
            self._end_step()
        if not self.ends and not self._marked and len(self._backwards) > 1:  # a single one is no training loop
            self._count_backwards(len(self._backwards))
        if self._awaits_mark or self._awaits_graph:  # there was none
            self._awaits_mark = self._awaits_graph = False
        if self.enough:  # a framework's loop may have gone on until it could be stopped
            del self.ends[self.limit :]

    # ---- marks of the program ----
    def mark(self) -> None:
        """The program says that a step ends here."""
        if not self._marked or self._by_backwards:
            self._forget_rounds()
        self._round_end = self.native.event_count()
        self._end_step()
        if not self.loop_stops:
            self.stop_if_enough()

    def _forget_rounds(self) -> None:
        """What was taken for steps before the first mark."""
        self._marked, self._by_backwards, self._awaits_mark = True, False, False
        self.ends.clear()
        self._round.clear()
        self._backwards.clear()

    def _is_marked_later(self) -> bool:
        """Whether the program has not come to its first mark yet: the source of a function that runs now calls `maya_core.step`."""
        files = {code.co_filename for code in self._running()}
        return any(_MARK.search("".join(linecache.getlines(file))) for file in files)

    def _is_captured_later(self) -> bool:
        """Whether the program will capture its work in a CUDA graph: a function that runs now, or one that is defined in it, names one."""
        return any(map(_names_a_graph, self._running()))

    def _running(self) -> Iterator[CodeType]:
        """The code of the program's functions that run now, the innermost first."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if not self._is_library(frame.f_code.co_filename):
                yield frame.f_code
            frame = frame.f_back

    # ---- steps in CUDA graphs ----
    def _ending_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if self._captured:
                self._graphs.add(graph)
            self._captured, self._awaits_graph = 0, False
            return result

        return capture_end

    def _counting_replays(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            if graph in self._graphs and (self._by_replays or not self._marked):
                if not self._by_replays:
                    self._forget_rounds()
                    self._by_replays = True
                self._round_end = self.native.event_count()
                self._end_step()
                if not self.loop_stops:
                    self.stop_if_enough()
            return result

        return replay

    # ---- programs without an optimizer of torch ----
    def _noting_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            now = self.native.event_count()
            on_gpu = now > (self._backwards[-1] if self._backwards else 0)
            if on_gpu and not (self._stepped or self._round or self._marked or self._aside):
                self._backwards.append(now)
                if self.limit is not None and len(self._backwards) > self.limit and not self.loop_stops:
                    self._count_backwards(self.limit)
                    self.stop_if_enough()
            return result

        return backward

    def _count_backwards(self, steps: int) -> None:
        """Takes each backward pass for a step, if the program has no optimizer of torch."""
        if not steps or any(issubclass(type(one), torch.optim.Optimizer) for one in gc.get_objects()):
            return
        self._tell(
            "The program uses no optimizer of torch, so the end of each backward pass was taken for the end of a step. If a step is something "
            f"else, {HOW_TO_MARK}."
        )
        self._marked = self._by_backwards = True
        for end in self._backwards[:steps]:
            self._round_end = end
            self._end_step()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._begin(optimizer)
        self._enter(optimizer)
        # A closure runs forward and backward inside the optimizer's step. Lightning trains in this way.
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
        """Records a step of torch's optimizer on the host, where offloaded parameters are updated."""
        work = 0.0
        for group in optimizer.param_groups:
            slower = 1.0 if group.get("fused") else OP_BY_OP
            for parameter in group["params"]:
                local = on_host([parameter] if parameter.grad is not None else [])
                states = on_host(optimizer.state.get(parameter, {}).values()) if local else []
                large = sum(one.nbytes for one in states if one.numel() == local[0].numel())
                work += slower * (3 * sum(one.nbytes for one in local) + 2 * large)  # the gradient is only read
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
        """Counts all optimizer steps inside as one step of the owner: ZeRO steps each group of parameters separately."""
        self._begin(owner)
        with self.aside():
            yield
        self._end(owner)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Ignores the optimizer steps inside: some frameworks create the optimizer's state with one."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    def _aside_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def aside(*args: Any, **kwargs: Any) -> Any:
            with self.aside():
                return original(*args, **kwargs)

        return aside

    def _begin(self, optimizer: Any) -> None:
        if self.native.capturing():
            return
        if not self._aside and not self._marked and id(optimizer) in self._round:
            self._round_size = self._round_size or len(self._round)
            self._end_step()
            self._stop_here()

    def _end(self, optimizer: Any) -> None:
        if self.native.capturing():
            self._captured += 1
            return
        if self._aside or self._marked:
            return
        if self.ends and id(optimizer) not in self._seen:
            self._tell(
                "The program's optimizers take turns, and not all of them stepped in the first step, so steps may differ. If a step is "
                f"something else, {HOW_TO_MARK}."
            )
        self._seen.add(id(optimizer))
        self._round.append(id(optimizer))
        self._round_end = self.native.event_count()
        if self._round_size is None and self.limit == 1 and not _waiting(self._stepped):
            self._round_size = len(self._round)
        if len(self._round) == self._round_size:
            self._end_step()
            self._stop_here()

    def _end_step(self) -> None:
        self._round.clear()
        self.ends.append(self._round_end)
        if self.enough and not self._marked and self._awaits_mark is None:
            self._awaits_mark = self._is_marked_later()
        if self.enough and not self._marked and self._awaits_graph is None:
            self._awaits_graph = self._is_captured_later()
        if self.enough:
            self.idle = _waiting(self._stepped)
        if self.on_step:
            self.on_step(len(self.ends))


def _names_a_graph(code: CodeType) -> bool:
    names = set(code.co_names)
    inside = (each for each in code.co_consts if isinstance(each, CodeType))
    return "CUDAGraph" in names or {"cuda", "graph"} <= names or any(map(_names_a_graph, inside))


def _waiting(stepped: set[int]) -> int:
    """The number of optimizers with parameters on the device that have not stepped."""
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    waiting = [[p for p in _parameters(one) if id(p) not in stepped] for one in optimizers]
    return sum(bool(on_device(parameters)) for parameters in waiting)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
