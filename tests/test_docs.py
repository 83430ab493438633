"""What the documentation site generates from the code is complete, and figures that several pages state are the same."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import maya_core
from maya_core.report.field_tables import unit
from maya_core.report.prediction import Prediction

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
generated = runpy.run_path(str(DOCS / "_generated.py"))
SCHEMA = Prediction.model_json_schema()
PARTS = SCHEMA["$defs"]


def built(page: str) -> str:
    """The page as the site has it, in Markdown."""
    text: str = generated["on_page_markdown"]((DOCS / f"{page}.md").read_text())
    assert "<!-- generated" not in text
    return text


def section(text: str, heading: str) -> str:
    """What stands under a heading of the third level."""
    return text.split(f"\n### {heading}\n")[1].split("\n### ")[0]


def test_every_field_of_a_prediction_is_on_its_page() -> None:
    page = built("prediction")
    tables = {"Prediction": (page.split("\n## ")[0], SCHEMA["properties"])}
    tables |= {name: (section(page, name), part["properties"]) for name, part in PARTS.items()}
    assert len(tables) == 26
    for name, (text, properties) in tables.items():
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .*? \| (.+) \|$", text, re.MULTILINE)
        assert [row[0] for row in rows] == list(properties), name
        assert all(kind and meaning for _, kind, meaning in rows), name


@pytest.mark.parametrize(
    ("name", "field", "kind", "shown_unit"),
    [
        ("Prediction", "step_time_s", "number or null", "s"),
        ("Prediction", "step_time_range_s", "list of 2 numbers or null", "s"),
        ("Prediction", "memory", "[Memory](#memory)", ""),
        ("Prediction", "tokens_per_s_per_gpu", "number or null", "tokens/s"),
        ("DeviceMemory", "outside_bytes", "object of integer", "bytes"),
        ("DeviceMemory", "at_peak", "list of [Peak](#peak)", ""),
        ("DeviceMemory", "fits", "true or false or null", ""),
        ("Cost", "usd_per_hour", "number or null", "US$/h"),
        ("Communication", "bytes_per_s", "number or null", "bytes/s"),
        ("Flops", "peak_flops_per_gpu", "number", "FLOP/s"),
    ],
)
def test_types_and_units(name: str, field: str, kind: str, shown_unit: str) -> None:
    page = built("prediction")
    text = page.split("\n## ")[0] if name == "Prediction" else section(page, name)
    assert f"| `{field}` | {kind} | {shown_unit} |" in text


def test_every_number_that_is_no_count_has_a_unit() -> None:
    counts = {"samples_per_step", "tokens_per_step", "batches_per_step"}
    for name, part in {"Prediction": SCHEMA, **PARTS}.items():
        for field, content in part["properties"].items():
            if "'number'" in str(content) and field not in counts:
                assert unit(field, content), f"{name}.{field}"


def test_every_public_name_is_on_the_page_of_the_python_interface() -> None:
    page = built("api")
    names = [f"maya_core.{name}" for name in maya_core.__all__ if name != "__version__"]
    names += ["maya_lightning.MayaEmulator", "maya_huggingface.MayaCallback", "maya_mlflow.record_actual"]
    assert sorted(re.findall(r"^### ([\w.]+)$", page, re.MULTILINE)) == sorted(names)
    for name in names:
        assert f"```python\n{name}" in section(page, name)


def test_signatures_and_members() -> None:
    page = built("api")
    assert "maya_core.predict(job: JobTrace | str | Path, **options)" in page
    assert "maya_lightning.MayaEmulator(gpu: str | None = None, **options)" in page
    assert "    warm_up: int = 3,\n" in section(page, "maya_mlflow.record_actual")
    assert "- **`prediction`**: " in section(page, "maya_core.EmulatedBlock")
    assert "- **`world_size`**: The number of GPUs." in section(page, "maya_core.JobTrace")


@pytest.mark.parametrize(
    ("option", "taken"),
    [("gpus_per_node", "plugins, `emulate`, `what_if`"), ("json", "plugins"), ("attention", "all"), ("network", "all")],
)
def test_who_takes_an_option(option: str, taken: str) -> None:
    row = next(line for line in built("api").splitlines() if line.startswith(f"| `{option}` |"))
    assert row.endswith(f"| {taken} |")


def test_ranks_are_no_option_of_python() -> None:
    assert "| `ranks` |" not in built("api")
    assert "`--ranks`" in built("options")


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")]
    subprocess.run(mkdocs, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        assert not re.findall(
            r"""(?:src|srcset)=["']?(?:https?:)?//|<link[^>]*rel="?stylesheet"?[^>]*https?://""", text
        )
        assert 'data-md-component="source"' not in text, "the theme would ask api.github.com for stars"


# ---- the accuracy of published runs ----


class Runs:
    """The tables of docs/accuracy.md, which tests/accuracy/published_runs.py writes."""

    def __init__(self) -> None:
        page = (DOCS / "accuracy.md").read_text()
        self.prose, _, tables = page.partition("<!-- published runs: ")
        rows = [line.split(" | ") for line in tables.splitlines() if re.match(r"\| \d+ \| ", line)]
        self.count = len(rows)
        self.times = self._errors(rows, 4)
        self.memory = self._errors(rows, 7)

    @staticmethod
    def _errors(rows: list[list[str]], column: int) -> np.ndarray:
        cells = [row[column].strip() for row in rows]
        return np.abs([float(cell.removesuffix(" %")) for cell in cells if cell])


def test_accuracy_is_the_same_on_every_page() -> None:
    runs, readme, faq = Runs(), (ROOT / "README.md").read_text(), (DOCS / "faq.md").read_text()
    readme, faq, prose = (" ".join(text.replace("**", "").split()) for text in (readme, faq, runs.prose))
    timed, measured = len(runs.times), len(runs.memory)
    assert runs.count == timed + measured  # each run has one of the two figures

    def median_and_p90(errors: np.ndarray) -> tuple[float, float]:
        return float(np.median(errors)), float(np.percentile(errors, 90))

    (median, p90), (memory_median, memory_p90) = median_and_p90(runs.times), median_and_p90(runs.memory)
    sentences = (
        f"Step time: the error is {median:.1f} % in the median and {p90:.1f} % at the 90th percentile of {timed} runs",
        f"Peak memory: the error is {memory_median:.1f} % in the median and {memory_p90:.1f} % at the 90th percentile of {measured} runs",
    )
    for sentence in sentences:
        assert sentence in prose
    both = f"{runs.count} published runs: {timed} published their step time, and {measured} their peak memory"
    assert both in prose
    assert both in readme
    assert f"The error of step time is {median:.1f} % in the median and {p90:.0f} % at the 90th percentile" in readme
    assert f"the error of peak memory is {memory_median:.1f} % and {memory_p90:.1f} %" in readme
    assert f"{median:.1f} % in the median of {timed} published runs, and {p90:.0f} % at the 90th percentile" in faq
    assert f"{runs.count} published training runs" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tables_of_published_runs_are_those_that_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "accuracy"))
    script = runpy.run_path(str(ROOT / "tests" / "accuracy" / "published_runs.py"))
    script["write_page"](tmp_path / "page.md", [], [])
    page = (DOCS / "accuracy.md").read_text()
    for line in (tmp_path / "page.md").read_text().splitlines():
        assert line in page
    assert script["markdown"]([*script["HEADINGS"], "source"], []) in page
