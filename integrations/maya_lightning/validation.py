"""Emulates validation: one batch of every validation loader, once, after the last step. Until then the Trainer's limits are zero, so that
neither the sanity check nor a validation between the steps changes the training that is recorded."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from maya_core.integration import EvaluationLoop, EvaluationRun, Integration


class TrainersValidation:
    """The validation of the Trainer that fits. `during` a fit, hooks in Lightning's loops decide when it runs."""

    def __init__(self, integration: Integration) -> None:
        self._integration = integration
        self._trainer: Any = None  # the one that fits under emulation
        self._limit: int | float = 0  # its own limit_val_batches
        self._sanity_steps: int | float = 0
        self._pending = False
        self._run: EvaluationRun | None = None

    @contextmanager
    def during(self, trainer: Any) -> Iterator[None]:
        """Around a fit. The Trainer's limits are zero inside."""
        self._limit, self._sanity_steps = trainer.limit_val_batches, trainer.num_sanity_val_steps
        self._trainer, self._pending = trainer, False
        trainer.limit_val_batches, trainer.num_sanity_val_steps = 0, 0
        try:
            yield
        finally:
            trainer.limit_val_batches, trainer.num_sanity_val_steps = self._limit, self._sanity_steps
            self._integration.steps.loop_stops = False
            if self._pending and self._integration.steps.enough:
                self._integration.evaluations.not_emulated("one call of training_step takes all the requested steps")
            self._trainer, self._pending = None, False

    # ---- what Lightning's loops call ----
    def begin(self, trainer: Any) -> None:
        """The training begins: the loop, and not the optimizer, stops it, if there is something to validate."""
        if trainer is not self._trainer:  # a training on the CPU besides the emulated one
            return
        with self._own_limit(trainer):
            self._pending = bool(trainer.enable_validation and trainer.optimizers)
        if self._pending and self._sanity_steps == 0 and _first_step(trainer) > _last_step(trainer):
            self._pending = False  # the real training ends before its first validation
        self._integration.steps.loop_stops = self._pending

    def after_batch(self, trainer: Any) -> None:
        if trainer is self._trainer and self._pending and self._integration.steps.enough:
            self.validate(trainer)
            self._integration.steps.stop_if_enough()

    def validate(self, trainer: Any) -> None:
        """Runs validation as Lightning's training loop does."""
        if trainer is not self._trainer or not self._pending:
            return
        self._pending = False
        loop = trainer.fit_loop.epoch_loop.val_loop
        whole: list[int | float] = []
        with self._own_limit(trainer):
            with self._integration.evaluations.attempt():
                loop.setup_data()
                whole = list(loop.max_batches)
            if not sum(whole):
                return
            loop._max_batches = [min(1, batches) for batches in whole]
            modes = [(module, module.training) for module in trainer.lightning_module.modules()]
            trainer.validating = True  # so that the Trainer takes the right loop for the active one
            try:
                with self._integration.evaluations.emulated(self._loops(trainer, whole)) as self._run:
                    trainer.lightning_module.on_validation_model_zero_grad()
                    loop.run()
            finally:
                self._run = None
                loop._max_batches = whole
                trainer.training = True
                for module, mode in modes:  # an error may have left them in evaluation
                    module.training = mode

    @contextmanager
    def batch(self, loader: int) -> Iterator[None]:
        """Around a batch of the loader of that number."""
        if self._run is None:
            yield
            return
        with self._run.batch(loader):
            yield

    # ---- the real validation ----
    @contextmanager
    def _own_limit(self, trainer: Any) -> Iterator[None]:
        trainer.limit_val_batches = self._limit
        try:
            yield
        finally:
            trainer.limit_val_batches = 0

    def _loops(self, trainer: Any, batches: list[int | float]) -> list[EvaluationLoop]:
        """The validation loops of the real training: one for each loader, unless each batch is one of all loaders."""
        every = _every(trainer, self._steps_per_batch(trainer))
        combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
        if combined._mode != "sequential":
            batches = [min(batches) if combined._mode == "min_size" else max(batches)]
        names = [f"validation {number}" if len(batches) > 1 else "validation" for number in range(len(batches))]
        return [
            EvaluationLoop(name, None if math.isinf(count) else int(count), every)
            for name, count in zip(names, batches, strict=True)
        ]

    def _steps_per_batch(self, trainer: Any) -> float:
        if trainer.lightning_module.automatic_optimization:
            return 1 / float(trainer.accumulate_grad_batches)
        return len(self._integration.steps.ends) / (trainer.fit_loop.epoch_loop.total_batch_idx + 1)


def _every(trainer: Any, steps_per_batch: float) -> float | None:
    """Validation runs once in so many steps."""
    interval, epochs, length = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    if interval is None or math.isinf(interval):  # by time, or after an epoch of unknown length
        return None
    if epochs is None or math.isinf(length):
        return float(interval * steps_per_batch)
    return epochs * math.ceil(length * steps_per_batch) / max(1, length // interval)


def _first_step(trainer: Any) -> float:
    """The step after which validation first runs; 0 if that is not known."""
    interval, epochs, length = trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.num_training_batches
    if interval is None or not trainer.lightning_module.automatic_optimization:
        return 0.0
    before = 0 if epochs in (None, 1) else (epochs - 1) * length
    return float(before + interval) / float(trainer.accumulate_grad_batches)


def _last_step(trainer: Any) -> float:
    steps = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        of_an_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        steps.append(trainer.max_epochs * (of_an_epoch if math.isinf(of_an_epoch) else math.ceil(of_an_epoch)))
    return float(min(steps, default=math.inf))


# ---- Lightning's loops ----
def fit_loop(validation: TrainersValidation, integration: Integration, module: ModuleType) -> None:
    loop = module._FitLoop
    integration.patches.set(loop, "on_run_start", _before(loop.on_run_start, validation.begin))
    integration.patches.set(loop, "on_run_end", _before(loop.on_run_end, validation.validate))


def epoch_loop(validation: TrainersValidation, integration: Integration, module: ModuleType) -> None:
    original = module._TrainingEpochLoop.on_advance_end

    @functools.wraps(original)
    def on_advance_end(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        validation.after_batch(self.trainer)

    integration.patches.set(module._TrainingEpochLoop, "on_advance_end", on_advance_end)


def evaluation_loop(validation: TrainersValidation, integration: Integration, module: ModuleType) -> None:
    original = module._EvaluationLoop._evaluation_step

    @functools.wraps(original)
    def evaluation_step(self: Any, batch: Any, index: int, loader: int, *args: Any, **kwargs: Any) -> None:
        with validation.batch(loader):
            original(self, batch, index, loader, *args, **kwargs)

    integration.patches.set(module._EvaluationLoop, "_evaluation_step", evaluation_step)


def _before(original: Callable[..., None], act: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        act(self.trainer)
        original(self, *args, **kwargs)

    return hook
