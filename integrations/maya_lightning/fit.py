"""Runs `Trainer.fit` under emulation: a few steps of the program's own training, and after them one batch of validation (validation.py).
Checkpoints, profilers and logs are skipped. Schedules are unchanged, because the limits of the training stay the same.

In a process that continues afterwards, the model and the Trainer are restored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from maya_core.integration import Integration, ModelState
from maya_core.messages import say
from maya_core.session.plugin import PluginSession
from maya_lightning.plugin import MayaEmulator
from maya_lightning.validation import TrainersValidation

NO_WEIGHTS = "the emulated training has no weights to use"


def install(integration: Integration, validation: TrainersValidation, module: ModuleType) -> None:
    """Patches the Trainer in `module`."""
    patches = integration.patches
    trainer = module.Trainer
    patches.set(trainer, "fit", _emulated(trainer.fit, validation))
    for name in ("validate", "test", "predict"):
        patches.set(trainer, name, _skipped(name, []))
    patches.set(trainer, "save_checkpoint", _skipped("save_checkpoint", None))


def _skipped(name: str, answer: Any) -> Callable[..., Any]:
    printed: list[str] = []

    def skip(*_: Any, **__: Any) -> Any:
        if not printed:
            say(f"under emulation trainer.{name} is skipped: {NO_WEIGHTS}")
        printed.append(name)
        return answer

    return skip


def _emulated(original: Callable[..., None], validation: TrainersValidation) -> Callable[..., None]:
    @functools.wraps(original)
    def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.strategy.root_device.type != "cuda":
            return original(trainer, model, *args, **kwargs)  # a training on the CPU besides the emulated one
        if kwargs.pop("ckpt_path", None) is not None:
            say("under emulation no checkpoint is read: the training starts at its first step")
        session = PluginSession.current
        weights = ModelState(model) if isinstance(model, nn.Module) else None
        try:
            with _only_steps(trainer, weights), validation.during(trainer):
                original(trainer, model, *args, **kwargs)
        except BaseException as error:
            if session is None or not _end(session, trainer, error):
                raise
        else:
            if session is not None:
                _end(session, trainer, None)

    return fit


def _end(session: PluginSession, trainer: Any, error: BaseException | None) -> bool:
    """Ends the emulation. True if the error only marked the end of the requested steps."""
    stopped = session.end(error)
    if stopped:
        trainer.state.status = type(trainer.state.status).FINISHED
    emulator = trainer._accelerator_connector.cluster_environment
    if isinstance(emulator, MayaEmulator):
        _emulate_again(trainer, emulator)
    return stopped


def _emulate_again(trainer: Any, emulator: MayaEmulator) -> None:
    """Makes another `fit` emulate again, because this Trainer can only use emulated GPUs."""

    def fit(*args: Any, **kwargs: Any) -> None:
        emulator.session.begin()
        integration = emulator.session.integration
        assert integration is not None and emulator.world is not None
        integration.become_world(emulator.world)
        type(trainer).fit(trainer, *args, **kwargs)

    trainer.fit = fit
    for name in ("validate", "test", "predict"):
        setattr(trainer, name, _skipped(name, []))
    trainer.save_checkpoint = _skipped("save_checkpoint", None)


@contextmanager
def _only_steps(trainer: Any, weights: ModelState | None) -> Iterator[None]:
    package = sys.modules[type(trainer.state).__module__.partition(".trainer")[0]]  # one of the two distributions
    loggers, profiler = trainer.loggers, trainer.profiler
    # Reading the name of a logger may create an experiment. Checkpoint callbacks read it and remember it.
    state = [(one, dict(vars(one))) for one in (*loggers, *trainer.checkpoint_callbacks)]
    teardown = trainer.strategy.teardown

    def release() -> None:
        """Runs before Lightning copies weights and optimizer states to the host, which would be pointless."""
        trainer.strategy.optimizers = []
        if weights is not None:
            weights.put_back()
        teardown()

    trainer.loggers = [_silent(package.loggers.logger.DummyLogger, logger) for logger in loggers]
    trainer.profiler = package.profilers.PassThroughProfiler()
    trainer.strategy.teardown = release
    try:
        yield
    finally:
        del trainer.strategy.teardown
        trainer.loggers, trainer.profiler = loggers, profiler
        for one, before in state:
            vars(one).clear()
            vars(one).update(before)
        trainer.strategy.optimizers = []
        if weights is not None:
            weights.put_back()


def _silent(base: type, logger: Any) -> Any:
    """A logger with the same name and folder that accepts everything and writes nothing."""

    def delegated(name: str) -> property:
        return property(lambda _: getattr(logger, name))

    return type("SilentLogger", (base,), {name: delegated(name) for name in ("name", "version", "save_dir")})()
