"""Where a prediction goes: the terminal, and the files that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster
from maya_core.report.analysis import Analysis, Options, analyse
from maya_core.report.files import FileKind, check_target, rank_paths, write_prediction
from maya_core.report.framework_log import framework_log
from maya_core.report.prediction import Prediction
from maya_core.report.summary import prediction_of
from maya_core.report.terminal import render
from maya_core.report.tracking import Tracker
from maya_core.trace.job import JobTrace


@dataclass(frozen=True)
class Outputs:
    """The files asked for; whether they can be written is found out at once, not after minutes of work."""

    json_file: Path | None = None
    html: Path | None = None
    timeline: Path | None = None
    snapshot: Path | None = None
    rank: int | None = None  # of timeline and snapshot; None for all
    tracker: Tracker | None = None  # is given the prediction at the end

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
            raise MayaError(f"--timeline {self.timeline}: not a name for a timeline.", "Give FILE.json or FILE.json.gz")

    def tell(self, job: JobTrace, cluster: Cluster, options: Options) -> Prediction:
        """Predicts, prints, and writes the files."""
        console = Console()
        if self.rank is not None and self.rank not in job.ranks:
            raise MayaError(f"rank {self.rank} was not emulated.", f"There are: {', '.join(map(str, job.ranks))}.")
        with _progress() as progress:
            analysis = analyse(job, cluster, options, progress)
            progress("putting the report together")
            prediction = prediction_of(analysis)
        console.print(render(prediction))
        for line in framework_log(analysis):
            console.print(Text(line), soft_wrap=True)
        with _progress() as progress:
            written = list(self._write(analysis, prediction, progress))
        for path in written:
            console.print(Text(f"Written: {path}", style="dim"))
        if self.tracker is not None:
            self.tracker(analysis, prediction)
        return prediction

    def _write(self, analysis: Analysis, prediction: Prediction, progress: Callable[[str], None]) -> Iterator[Path]:
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


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """On a terminal, what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("maya") as status:
        yield lambda what: status.update(f"maya: {what} ...")
