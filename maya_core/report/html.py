"""Writes the report as one self-contained HTML page, which needs no network, no server and no other file.

    write_page(analysis, prediction, Path("report.html"))

Names on the page come from the user's program and must never act as markup: the template escapes them, the scripts only set text,
the embedded JSON has no character that could end its element, and a content security policy allows only the page's own script and
style, by their hashes. The same analysis produces the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from maya_core.files import FileKind, write_file
from maya_core.predictor.families import title
from maya_core.report import wording
from maya_core.report.analysis import Analysis
from maya_core.report.data_loading import noticed_loading
from maya_core.report.page.memory_chart import curves, shown
from maya_core.report.page.timeline_chart import timeline
from maya_core.report.prediction import Prediction
from maya_core.report.terminal import ENDINGS
from maya_core.report.unknown_values import memory_in_words
from maya_core.trace.call_names import abbreviated

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("shared.js", "timeline.js", "memory.js")
MOST_BARS = 16  # one for each rank
CLASSES = ("compute", "communication", "waiting", "copy", "host")  # of the parts of a step, in the order they are drawn
PARTS = [(field, name, kind) for (field, name), kind in zip(wording.STEP_PARTS.items(), CLASSES, strict=True)]
PROVENANCE = {
    "measured": "exactly this kernel was timed on this GPU",
    "interpolated": "between measurements of this GPU",
    "extrapolated": "outside the range of the measurements, or from another GPU",
    "bound": "a lower bound from the data sheet",
}


def write_page(analysis: Analysis, prediction: Prediction, path: str | Path) -> Path:
    path = Path(path)
    write_file(path, page(analysis, prediction), FileKind.PAGE)
    return path


def page(analysis: Analysis, prediction: Prediction) -> str:
    style = _read("page.css")
    script = "\n".join(_read(name) for name in SCRIPTS)
    chart = timeline(analysis)
    return (
        _environment()
        .get_template("page.html")
        .render(
            p=prediction,
            fullest=prediction.memory.fullest,
            loading=noticed_loading(prediction),
            memory_words=memory_in_words(prediction.memory),
            devices=shown(prediction.memory),
            bars=_bars(prediction),
            parts=PARTS,
            provenance=PROVENANCE,
            busiest=prediction.detailed_rank if len(prediction.ranks) > 1 else None,
            emulated=abbreviated(prediction.world.emulated_ranks),
            ended=ENDINGS.get(prediction.trace.ended, prediction.trace.ended),
            timeline=chart,
            data=_embedded({"timeline": chart, "memory": curves(analysis, prediction.memory)}),
            style=Markup(style),
            script=Markup(script),
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def _bars(prediction: Prediction) -> list[tuple[str, Any]]:
    """The steps that are drawn: the mean over all ranks, and the first ranks."""
    ranks = [(f"rank {rank.rank}", rank) for rank in prediction.ranks[:MOST_BARS]]
    return [("mean", prediction.time), *ranks] if len(ranks) > 1 and prediction.time is not None else list(ranks)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("seconds", "size", "count", "rate", "money", "energy", "share", "line", "moment"):
        environment.filters[name] = getattr(wording, name)
    environment.filters["family"] = title
    return environment


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> Markup:
    """JSON for a <script> element. No character in it can end the element, open another one or end a line."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only: U+2028 and U+2029 are escaped too
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
