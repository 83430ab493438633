"""Emulates the evaluation of Megatron-LM's training script: one iteration on every validation set, once, after the last step. Those that the
script itself runs between the steps, or after them, are skipped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from maya_core.integration import EvaluationLoop, Integration


class ScriptsEvaluation:
    """The evaluation of the training that runs. `run` is called where it is stopped."""

    def __init__(self, integration: Integration) -> None:
        self._integration = integration
        self._module: ModuleType | None = None
        self._given: dict[str, Any] | None = None  # the arguments of `train`, until its evaluation has been run

    def install(self, module: ModuleType) -> None:
        patches = self._integration.patches
        self._module = module
        patches.set(module, "train", self._around(module.train))
        patches.set(module, "evaluate_and_print_results", self._skipping(module.evaluate_and_print_results))

    def _around(self, train: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(train)

        @functools.wraps(train)
        def emulated(*args: Any, **kwargs: Any) -> Any:
            self._given = signature.bind(*args, **kwargs).arguments
            found = train(*args, **kwargs)
            self.run(trains=False)
            return found

        return emulated

    def _skipping(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(evaluate)
        def skip(*_: Any, **__: Any) -> None:
            self._integration.skip("evaluation is skipped, except for one iteration after the last step")

        return skip

    def run(self, trains: bool = True) -> None:
        """Evaluates the model as the script would, but with one iteration. If the script `trains` no more, its parameters are gathered already."""
        given, self._given, module = self._given, None, self._module
        if given is None or module is None:
            return
        options = module.get_args()
        if not options.do_valid:
            return
        if getattr(options, "perform_rl_step", False):
            self._integration.evaluations.not_emulated("evaluation of reinforcement learning is a loop of its own")
            return
        data = given["valid_data_iterator"]
        sets, iterations = [data], [options.eval_iters]
        if getattr(options, "multiple_validation_sets", False):
            sets, iterations = data, options.eval_iters
        every = float(options.eval_interval) if options.eval_interval else None
        loops = [
            EvaluationLoop("validation" if len(sets) == 1 else f"validation {number}", count, every)
            for number, count in enumerate(iterations)
        ]
        overlapped = trains and module.should_disable_forward_pre_hook(options)
        with self._integration.evaluations.emulated(loops) as run:
            if overlapped:  # parameters are gathered at once, and not before each layer
                module.disable_forward_pre_hook(given["model"])
            for number, iterator in enumerate(sets):
                with run.batch(number):
                    module.evaluate(
                        given["forward_step_func"],
                        iterator,
                        given["model"],
                        given["process_non_loss_data_func"],
                        given["config"],
                        non_loss_data_func=given.get("non_loss_data_func"),
                        eval_iters=1,
                    )
