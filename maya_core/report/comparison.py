"""Tables that show several predictions side by side, for `maya what-if`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from maya_core.report import wording
from maya_core.report.prediction import Prediction
from maya_core.report.terminal import plain_table


def comparison(names: list[str], predictions: list[Prediction]) -> Table:
    """A table of predictions. The others are compared with the first."""
    table = plain_table("", "", *(f">{name}" for name in names))
    first = predictions[0]

    def row(heading: str, values: list[str]) -> None:
        if any(value != "-" for value in values):
            table.add_row(heading, *values)

    def speed(prediction: Prediction) -> str:
        if prediction is first or not prediction.step_time_s or not first.step_time_s:
            return "-"
        return f"{first.step_time_s / prediction.step_time_s:.2f} x"

    row("step time", [wording.seconds(each.step_time_s) if each.step_time_s else "-" for each in predictions])
    row("relative speed", [speed(each) for each in predictions])
    row("tokens/s", [wording.count(each.tokens_per_s) if each.tokens_per_s else "-" for each in predictions])
    row("samples/s", [wording.count(each.samples_per_s) if each.samples_per_s else "-" for each in predictions])
    row("MFU", [wording.share(each.mfu) if each.mfu is not None else "-" for each in predictions])
    row("exposed communication", [_share(each, "exposed_communication_s") for each in predictions])
    row("waiting", [_share(each, "waiting_s") for each in predictions])
    row("cost per 1,000 steps", [_dollars(each) for each in predictions])
    row("memory", [_memory(each) for each in predictions])
    row(
        "measured or interpolated",
        [
            wording.percent(each.confidence.measured + each.confidence.interpolated) if each.confidence else "-"
            for each in predictions
        ],
    )
    return table


def notes(recorded: Prediction, others: Iterable[Prediction]) -> Group:
    """The caveats that apply to the other hardware, but not to the recorded one."""
    caveats = dict.fromkeys(caveat for prediction in others for caveat in prediction.caveats)
    return Group(*(Text(f"Note: {caveat}", style="yellow") for caveat in caveats if caveat not in recorded.caveats))


def _share(prediction: Prediction, name: str) -> str:
    if prediction.world.size == 1 or prediction.time is None or not prediction.step_time_s:
        return "-"
    return wording.share(getattr(prediction.time, name) / prediction.step_time_s)


def _dollars(prediction: Prediction) -> str:
    cost = prediction.cost
    return wording.money(cost.usd_per_1k_steps) if cost and cost.usd_per_1k_steps is not None else "-"


def _memory(prediction: Prediction) -> str:
    fullest = prediction.memory.fullest
    if fullest is None:
        return "-"
    fits = {True: "fits", False: "does not fit", None: "not known to fit"}[prediction.memory.fits]
    return f"{wording.size(fullest.peak_reserved_bytes + fullest.outside_allocator_bytes)} of {wording.size(fullest.capacity_bytes)}, {fits}"
