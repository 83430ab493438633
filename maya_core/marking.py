"""`maya_core.step()`: lets a program say where its training steps end. Without an emulation, it does nothing."""

from __future__ import annotations

from collections.abc import Callable

HOW_TO_MARK = "call maya_core.step() where it ends, or give --step-at FILE:LINE"
listeners: list[Callable[[], None]] = []  # the step counters of emulations that are on


def step() -> None:
    """Marks the end of a training step, where it is not what Maya takes for one:

        for batch in loader:
            rollout()
            for minibatch in shuffled(batch):
                update(minibatch)
            maya_core.step()

    From the first mark on, only marks count; optimizers do not. Without an emulation, the call does nothing, so it can stay in the program.
    """
    for each in tuple(listeners):
        each()
