"""An emulation that a framework's plugin begins and ends in the user's own process, and what it tells at the end."""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu, find_node
from maya_core.hardware.cluster import cluster
from maya_core.launch.rerun import program_again
from maya_core.launch.run import check_out, without_secrets
from maya_core.launch.world import World
from maya_core.messages import say
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION, check_attention
from maya_core.report.analysis import Options
from maya_core.report.outputs import Outputs
from maya_core.report.prediction import Prediction
from maya_core.report.tracking import mlflow_tracker
from maya_core.report.what_if import recorded_cluster
from maya_core.session import process
from maya_core.session.block import emulate
from maya_core.session.emulation import Emulation
from maya_core.trace.job import PREDICTION, write_manifest
from maya_core.trace.schema import EventKind


@dataclass(frozen=True)
class Asked:
    """What the user of a plugin may say; the same words as `maya run`'s options."""

    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    steps: int = 3
    node: str | None = None
    network: str | None = None
    price_per_gpu_hour: float | None = None
    attention: str = DEFAULT_ATTENTION
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    out: str | Path | None = None
    html: str | Path | None = None
    json: str | Path | None = None
    mlflow: bool | str = False  # whether to log a predicted run, or in which experiment

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "steps"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise MayaError(f"{name}={value!r} is no number of {name.replace('_', ' ')}.", "Give a number from 1.")
        check_attention(self.attention, find_gpu(self.gpu_name))
        if self.node is not None or self.network is not None:
            self._check_cluster()

    @property
    def gpu_name(self) -> str:
        if self.gpu is not None:
            return find_gpu(self.gpu).name
        return find_node(self.node).gpu if self.node is not None else DEFAULT_GPU

    def outputs(self) -> Outputs:
        return Outputs(
            Path(self.json) if self.json else None,
            Path(self.html) if self.html else None,
            tracker=mlflow_tracker(self.mlflow),
        )

    def world(self, gpus_per_node: int, nodes: int) -> World:
        """The world of a program that asks for so many, where the user did not say otherwise to Maya."""
        return World(self.nodes or nodes, self.gpus_per_node or gpus_per_node)

    def _check_cluster(self) -> None:
        cluster(self.gpu_name, self.gpus_per_node or 1, self.nodes or 1, node=self.node, network=self.network)


class PluginSession:
    """`begin` switches the emulation on, `end` switches it off and tells the prediction. Under `maya run` the process is emulated
    already, for all its life and by the command's own options: then neither does anything."""

    current: PluginSession | None = None  # the one that is on in this process

    def __init__(self, who: str, asked: Asked) -> None:
        self.who = who  # the plugin, as the user knows it
        self.asked = asked
        self.outputs = asked.outputs()
        self.prediction: Prediction | None = None
        self._job: emulate | None = None
        self._told_under_run = False

    @property
    def on(self) -> bool:
        return self._job is not None

    @property
    def emulation(self) -> Emulation | None:
        """Of this process, whoever began it."""
        if self._job is not None:
            return self._job.emulation
        return process.emulation_here()

    def begin(self) -> None:
        if process.emulation_here() is not None:
            self._say_under_run()
            return
        if self._job is not None:
            return
        if PluginSession.current is not None:
            PluginSession.current.drop()
        if self.asked.out is not None:
            check_out(Path(self.asked.out))
        job = emulate(
            self.asked.gpu_name,
            gpus=self.asked.gpus_per_node or 1,
            steps=self.asked.steps,
            out=self.asked.out,
            rerun=program_again() is not None,
        )
        self._job = job.__enter__()
        PluginSession.current = self
        atexit.register(self._end_at_exit)

    def end(self, error: BaseException | None = None) -> bool:
        """Whether the error was only Maya's way to stop the program after its steps."""
        job, self._job = self._job, None
        if job is None:
            return False
        self._forget()
        stopped = job.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        self.prediction = self._tell(job)
        return stopped

    def drop(self) -> None:
        """Ends without a word: nothing was trained."""
        job, self._job = self._job, None
        if job is not None:
            self._forget()
            job.__exit__(None, None, None)

    def _forget(self) -> None:
        PluginSession.current = None
        atexit.unregister(self._end_at_exit)

    def _tell(self, emulated: emulate) -> Prediction | None:
        full = bool((emulated.trace.events["kind"] == EventKind.OUT_OF_MEMORY).any())
        if emulated.trace.meta["steps"] == 0 and not full:
            say("no step was trained: there is no prediction")
            return None
        command = program_again() or []
        job = replace(emulated.job, command=without_secrets(command), node=self.asked.node, network=self.asked.network)
        machine = recorded_cluster(job, price_per_gpu_hour=self.asked.price_per_gpu_hour)
        asked = self.asked
        options = Options(
            attention=asked.attention, samples_per_step=asked.samples_per_step, tokens_per_step=asked.tokens_per_step
        )
        prediction = self.outputs.tell(job, machine, options.calibrated(machine.gpu))
        if asked.out is not None:
            from maya_core.report.files import write_prediction

            write_manifest(Path(asked.out), job)
            write_prediction(Path(asked.out) / PREDICTION, prediction)
        return prediction

    def _say_under_run(self) -> None:
        settings = process.emulation_here().settings  # type: ignore[union-attr]
        if not self._told_under_run and settings.rank in (None, 0):
            self._told_under_run = True
            say(f"under `maya run` its options count, and of {self.who}'s only the size of the cluster")

    def _end_at_exit(self) -> None:
        """The program is over, and nothing has ended the emulation: a plain loop, or an error."""
        self.end(getattr(sys, "last_value", None))
