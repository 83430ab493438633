"""Delivers a prediction: to the terminal, to the requested files, and to trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from maya_core.errors import MayaError
from maya_core.files import FileKind, check_target, rank_paths
from maya_core.report.analysis import Analysis
from maya_core.report.framework_log import framework_log
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import write_prediction
from maya_core.report.terminal import render
from maya_core.request import Request
from maya_core.trace.job import JobTrace
from maya_core.tracking import LogPrediction, prediction_trackers


@dataclass(frozen=True)
class Outputs:
    """The requested files. Whether they can be written is checked at once, not after minutes of work."""

    json_file: Path | None = None
    html: Path | None = None
    timeline: Path | None = None
    snapshot: Path | None = None
    rank: int | None = None  # the rank of timeline and snapshot; None: all of them
    trackers: tuple[LogPrediction, ...] = ()  # receive the prediction at the end

    def __post_init__(self) -> None:
        for path, kind in (
            (self.json_file, FileKind.PREDICTION),
            (self.html, FileKind.PAGE),
            (self.timeline, FileKind.TIMELINE),
            (self.snapshot, FileKind.SNAPSHOT),
        ):
            if path is not None:
                check_target(path, kind)
        if self.timeline is not None and not self.timeline.name.endswith((".json", ".json.gz")):
            raise MayaError(
                f"--timeline {self.timeline}: a timeline must be named *.json or *.json.gz.",
                "Give FILE.json or FILE.json.gz.",
            )

    @classmethod
    def of(
        cls, request: Request, timeline: Path | None = None, snapshot: Path | None = None, rank: int | None = None
    ) -> Outputs:
        """The files and trackers of a request."""
        trackers = tuple(prediction_trackers(request.tracking))
        return cls(request.json_file, request.html, timeline, snapshot, rank, trackers)

    def check_rank(self, job: JobTrace) -> None:
        if self.rank is not None and self.rank not in job.ranks:
            raise MayaError(
                f"rank {self.rank} was not emulated.", f"The emulated ranks are {', '.join(map(str, job.ranks))}."
            )

    def show(self, analysis: Analysis, prediction: Prediction) -> None:
        """Prints the prediction, and the framework's own log with predicted times."""
        console = Console()
        console.print(render(prediction))
        for line in framework_log(analysis):
            console.print(Text(line), soft_wrap=True)

    def log(self, analysis: Analysis, prediction: Prediction, written: Iterable[Path]) -> None:
        """Lists the files that were written, and hands the prediction to the trackers."""
        console = Console()
        for path in written:
            console.print(Text(f"Written: {path}", style="dim"))
        for tracker in self.trackers:
            tracker(analysis, prediction)

    def write(self, analysis: Analysis, prediction: Prediction, progress: Callable[[str], None]) -> Iterator[Path]:
        if self.json_file is not None:
            write_prediction(self.json_file, prediction)
            yield self.json_file
        if self.html is not None:
            from maya_core.report.html import write_page

            progress("drawing the page")
            write_page(analysis, prediction, self.html)
            yield self.html
        if self.snapshot is not None:
            from maya_core.report.snapshot import write_snapshot

            progress("writing the memory snapshot")
            ranks = analysis.job.ranks
            for rank, path in rank_paths(self.snapshot, list(ranks) if self.rank is None else [self.rank]).items():
                yield write_snapshot(ranks[rank], path)
        if self.timeline is not None:
            from maya_core.report.timeline_file import write_trace

            progress("writing the timeline")
            yield from write_trace(analysis, self.timeline, self.rank)
