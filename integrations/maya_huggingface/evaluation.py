"""Emulates evaluation: the first batches of every evaluation data set, once, after the last step. Until then Trainer evaluates nothing, so
that the training that is recorded stays the same.

Trainer keeps the losses, and with metrics also the predictions, of all batches on the GPU until the loop ends. A second batch is therefore
run as the last one, next to what all batches before it have left. No metrics are computed: they would be made up.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from math import ceil
from types import ModuleType
from typing import Any

import torch

from maya_core.integration import EvaluationLoop, EvaluationRun, Integration, length_of
from maya_huggingface.skipped import NoMetrics

NOTICED = 2**20  # bytes that a batch leaves on the GPU; fewer need no note


def install(integration: Integration) -> None:
    evaluation = TrainersEvaluation(integration)
    patches = integration.patches

    def trainer(module: ModuleType) -> None:
        kind = module.Trainer
        patches.set(kind, "train", evaluation.around(kind.train))
        patches.set(kind, "_maybe_log_save_evaluate", evaluation.after_a_step(kind._maybe_log_save_evaluate))
        patches.set(kind, "evaluation_loop", evaluation.few_batches(kind.evaluation_loop, module.EvalLoopOutput))
        if hasattr(kind, "prediction_loop"):  # before transformers 5, if the arguments ask for it
            patches.set(kind, "prediction_loop", evaluation.few_batches(kind.prediction_loop, module.EvalLoopOutput))

    def containers(module: ModuleType) -> None:
        container = module.EvalLoopContainer
        patches.set(container, "add", evaluation.keeping(container.add))

    def callbacks(module: ModuleType) -> None:
        patches.set(module.EarlyStoppingCallback, "on_evaluate", lambda *_, **__: None)

    patches.when_imported("transformers.trainer", trainer)
    patches.when_imported("transformers.trainer_pt_utils", containers)
    patches.when_imported("transformers.trainer_callback", callbacks)


class _Enough(BaseException):
    """Ends an evaluation loop after its first batches. Programs do not catch it."""


class TrainersEvaluation:
    """The evaluation of the Trainer that trains."""

    def __init__(self, integration: Integration) -> None:
        self._integration = integration
        self._trainer: Any = None  # while it trains
        self._pending = False  # whether it will be evaluated
        self._evaluates = False
        self._seen: set[str] = set()  # loops that were emulated, by their prefix of metrics
        self._kept: _Kept | None = None  # in a loop

    # ---- when ----
    def around(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """The loop, and not the optimizer, stops a training that evaluates."""

        @functools.wraps(train)
        def emulated(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = self._integration.steps
            self._trainer = trainer
            self._pending = steps.loop_stops = trainer.eval_dataset is not None and trainer.args.device.type == "cuda"
            try:
                return train(trainer, *args, **kwargs)
            finally:
                steps.loop_stops = False
                if self._pending and steps.enough:
                    self._integration.evaluations.not_emulated("this Trainer has a training loop of its own")
                self._trainer, self._pending = None, False

        return emulated

    def after_a_step(self, log_save_evaluate: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(log_save_evaluate)

        @functools.wraps(log_save_evaluate)
        def emulated(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            found = log_save_evaluate(trainer, *args, **kwargs)
            given = signature.bind(trainer, *args, **kwargs).arguments
            if trainer is self._trainer and self._pending:
                ends = trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps
                if ends or self._integration.steps.enough:
                    self._evaluate(trainer, given.get("ignore_keys_for_eval"))
                self._integration.steps.stop_if_enough()
            return found

        return emulated

    def _evaluate(self, trainer: Any, ignore_keys: list[str] | None) -> None:
        self._pending, self._evaluates = False, True
        modes = [(module, module.training) for module in trainer.model.modules()]
        try:
            with self._integration.evaluations.attempt():
                trainer.evaluate(ignore_keys=ignore_keys)
        except torch.OutOfMemoryError as error:
            if (
                trainer.args.auto_find_batch_size
            ):  # which takes it for one of training, and would reduce the batches of that
                raise RuntimeError("Evaluation ran out of memory: reduce per_device_eval_batch_size.") from error
            raise
        finally:
            self._evaluates = False
            for module, mode in modes:
                module.training = mode

    # ---- what ----
    def few_batches(self, evaluation_loop: Callable[..., Any], output: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(evaluation_loop)

        @functools.wraps(evaluation_loop)
        def emulated(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            def evaluate(data: Any) -> Any:
                return evaluation_loop(trainer, data, *args, **kwargs)

            if trainer.train_dataset is None:  # evaluation is all that the program does
                return evaluate(dataloader)
            prefix = signature.bind(trainer, dataloader, *args, **kwargs).arguments.get("metric_key_prefix", "eval")
            afterwards = self._integration.steps.begun and not trainer.is_in_train
            if (self._evaluates or afterwards) and prefix not in self._seen:
                self._seen.add(prefix)
                self._integration.skip("evaluation runs the first batches only, and computes no metrics")
                self._run(trainer, evaluate, dataloader, prefix)
            else:
                self._integration.skip("evaluation is skipped, except for its first batches after the last step")
            return output(predictions=None, label_ids=None, metrics=NoMetrics(), num_samples=0)

        return emulated

    def _run(self, trainer: Any, evaluate: Callable[[Any], Any], dataloader: Any, prefix: str) -> None:
        batches = length_of(dataloader)
        loop = EvaluationLoop(_name(prefix), batches, _every(trainer))
        self._kept = _Kept(batches, trainer.args.eval_accumulation_steps)
        try:
            with self._integration.evaluations.emulated([loop]) as run:
                few = _FewBatches(dataloader, run, self._kept.most)
                try:
                    evaluate(few)
                except _Enough:
                    pass
                finally:
                    few.close()
        finally:
            kept, self._kept = self._kept, None
        if kept.unknown:
            self._integration.evaluations.not_emulated(
                f"the predictions of all batches stay on the GPU until the {loop.name} ends, and its data has no length"
            )

    def keeping(self, add: Callable[..., None]) -> Callable[..., None]:
        """Patches the container of what a batch leaves. After the first batch it holds what all batches but the last one leave."""

        @functools.wraps(add)
        def emulated(container: Any, tensors: Any) -> None:
            is_first = container.tensors is None
            add(container, tensors)
            if self._kept is not None and is_first:
                container.tensors = self._kept.before_the_last(container.tensors)

        return emulated


class _Kept:
    """What batches leave on the GPU until the end of the loop, or until Trainer moves it to the host."""

    def __init__(self, batches: int | None, accumulation_steps: int | None) -> None:
        together = [count for count in (batches, accumulation_steps) if count is not None]
        self._together = min(together, default=None)
        self.unknown = False  # whether it is much, and nobody knows of how many batches

    @property
    def most(self) -> int:
        """The batches to run: the first one, and one that finds what the others have left."""
        return 1 if self._together is None else min(2, self._together)

    def before_the_last(self, tensors: Any) -> Any:
        if self._together is None:
            self.unknown = self.unknown or _bytes(tensors) > NOTICED
            return tensors
        return _repeated(tensors, max(1, self._together - 1))


def _repeated(value: Any, times: int) -> Any:
    """Tensors of as many rows as that many batches have, in the same structure."""
    if isinstance(value, torch.Tensor):
        return value.new_empty((value.shape[0] * times, *value.shape[1:])) if value.is_cuda and value.dim() else value
    if isinstance(value, dict):
        return type(value)({name: _repeated(one, times) for name, one in value.items()})
    return type(value)(_repeated(one, times) for one in value) if isinstance(value, list | tuple) else value


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.is_cuda else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_bytes, parts))


_END = object()


class _FewBatches:
    """A data loader that ends the loop over it after its first batches."""

    def __init__(self, loader: Any, run: EvaluationRun, most: int) -> None:
        self._loader, self._run, self._most = loader, run, most
        self._batches: Iterator[Any] = iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._batches = iter(self._loader)
        for _ in range(self._most):
            with self._run.batch():
                batch = next(self._batches, _END)
                if batch is _END:  # there are fewer than the loader says
                    return
                yield batch
        raise _Enough

    def close(self) -> None:
        """Ends the loader's own bookkeeping, as the end of its data would."""
        del self._batches
        if hasattr(self._loader, "end"):  # accelerate's
            self._loader.end()


def _name(prefix: str) -> str:
    return "evaluation" if prefix == "eval" else f"evaluation of {prefix.removeprefix('eval_')}"


def _every(trainer: Any) -> float | None:
    """Evaluation runs once in so many steps."""
    strategy = str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy))
    if strategy == "steps":
        return float(trainer.state.eval_steps or trainer.args.eval_steps)
    length = length_of(trainer.callback_handler.train_dataloader) if strategy == "epoch" else None
    return float(ceil(length / trainer.args.gradient_accumulation_steps)) if length else None
