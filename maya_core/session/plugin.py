"""An emulation that a framework's plugin begins and ends in the user's own process, and the prediction that it reports at the end."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from maya_core import pipeline
from maya_core.hardware.catalog import hardware_file_in_use
from maya_core.integration import Integration
from maya_core.launch.rerun import program_again
from maya_core.messages import say
from maya_core.report.outputs import Outputs
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import write_prediction
from maya_core.request import Request
from maya_core.session import process
from maya_core.session.block import EmulatedBlock
from maya_core.session.emulation import Emulation
from maya_core.trace.job import PREDICTION
from maya_core.trace.schema import EventKind


class PluginSession:
    """`begin` switches the emulation on; `end` switches it off and reports the prediction. Under `maya run` the process is emulated already,
    for its whole life and with the command's own options: then neither does anything.

        PluginSession("MayaEmulator", gpu="h100", nodes=8)
    """

    current: PluginSession | None = None  # the one that is on in this process

    def __init__(self, who: str, **options: Any) -> None:
        self.who = who  # the plugin, as the user knows it
        self.request = Request.of(**options)
        with hardware_file_in_use(self.request.hardware):
            self.request.check()
        self.outputs = Outputs.of(self.request)
        self.prediction: Prediction | None = None
        self._block: EmulatedBlock | None = None
        self._explained = False

    @property
    def on(self) -> bool:
        """Whether this plugin has switched the emulation on."""
        return self._block is not None

    @property
    def integration(self) -> Integration | None:
        """The emulation of this process, whoever began it; None if there is none."""
        emulation = self._emulation
        return Integration(emulation) if emulation is not None else None

    @property
    def _emulation(self) -> Emulation | None:
        return self._block.emulation if self._block is not None else process.emulation_here()

    def begin(self) -> None:
        if process.emulation_here() is not None:
            self._explain_under_run()
            return
        if self._block is not None:
            return
        if PluginSession.current is not None:
            PluginSession.current.drop()
        request = self.request.model_copy(update={"nodes": None})
        self._block = EmulatedBlock(request, rerun=program_again() is not None).__enter__()
        PluginSession.current = self
        atexit.register(self._end_at_exit)

    def end(self, error: BaseException | None = None) -> bool:
        """Ends the emulation and reports the prediction. Whether the error was only Maya's way to stop the program after its steps."""
        block, self._block = self._block, None
        if block is None:
            return False
        self._forget()
        stopped = block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        with hardware_file_in_use(self.request.hardware):
            self.prediction = self._report(block)
        return stopped

    def drop(self) -> None:
        """Ends without a report: nothing was trained."""
        block, self._block = self._block, None
        if block is not None:
            self._forget()
            block.__exit__(None, None, None)

    def _forget(self) -> None:
        PluginSession.current = None
        atexit.unregister(self._end_at_exit)

    def _report(self, block: EmulatedBlock) -> Prediction | None:
        out_of_memory = bool((block.trace.events["kind"] == EventKind.OUT_OF_MEMORY).any())
        if block.trace.meta["steps"] == 0 and not out_of_memory:
            say("no step was trained, so there is no prediction")
            return None
        prediction = pipeline.report(block.job, self.request, self.outputs)
        if block.folder is not None:
            write_prediction(block.folder / PREDICTION, prediction)
        return prediction

    def _explain_under_run(self) -> None:
        settings = process.emulation_here().settings  # type: ignore[union-attr]
        if not self._explained and settings.rank in (None, 0):
            self._explained = True
            say(f"under `maya run` the command's options count; of {self.who} only the size of the cluster is used")

    def _end_at_exit(self) -> None:
        """The program is over, and nothing has ended the emulation: it was a plain loop, or failed."""
        self.end(getattr(sys, "last_value", None))
