"""MLflow's own page in a real Chromium: a predicted and an actual run side by side, on the same rows.

MAYA_SCREENSHOTS=$PWD/docs/images pytest tests/integrations/mlflow/test_mlflow_ui.py    # takes the pictures of docs/mlflow.md anew
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
from maya_mlflow import keys
from maya_mlflow.commands import add
from maya_mlflow.predicted import PredictedRuns
from maya_mlflow.recorder import record_actual
from mlflow_here import SIZES, example, one_thread, predicted
from report.test_page import start_browser
from typer.testing import CliRunner

from maya_core import cli

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
PINNED = re.findall(r"^mlflow==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)
pytestmark = pytest.mark.skipif(mlflow.__version__ not in PINNED, reason="reads the pages of the pinned MLflow")

add(cli.app, cli.calibrate.app)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", "--window-size=1500,1300")
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pair(uri: str, place: Path, sent_here: None) -> dict[str, Any]:
    """A prediction, the training it was made for, and their errors."""
    analysis, prediction = predicted(SIZES[1])
    foretold = PredictedRuns(experiment="compared", tracking_uri=uri)(analysis, prediction)
    with one_thread(), record_actual(gpu="one-core", experiment="compared", tracking_uri=uri, steps=10) as record:
        example().train(**SIZES[1], steps=13)
    assert foretold is not None and record.sent is not None
    words = [
        "compare",
        foretold.run_id,
        record.sent.run_id,
        "--tracking-uri",
        uri,
        "--threshold",
        "inf",
        "--out",
        "one",
    ]
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    return {
        "ids": (foretold.run_id, record.sent.run_id),
        "experiment": foretold.experiment_id,
        "steps": (prediction.step_time_s, record.metrics[keys.STEP_TIME]),
    }


def until(driver: Any, ready: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What `ready` gives once it gives something: a page of MLflow's is drawn bit by bit."""
    from selenium.common.exceptions import WebDriverException

    end = time.monotonic() + seconds
    while True:
        try:
            if found := ready():
                return found
        except WebDriverException:
            pass
        assert time.monotonic() < end, driver.find_element("tag name", "body").text
        time.sleep(0.3)


def text(driver: Any) -> str:
    return str(driver.find_element("tag name", "body").text)


def keep(driver: Any, name: str) -> None:
    """Where it was asked for, a picture for the docs."""
    if folder := os.environ.get("MAYA_SCREENSHOTS"):
        driver.save_screenshot(str(Path(folder) / name))


# The metrics are two grids side by side, of names and of values, that hold only the rows in sight: what lies on one height is a row.
ROWS = """
const [top, done] = arguments;
const [names, values] = [...document.querySelectorAll('[role=grid]')].filter(
  (grid, _, all) => all.some(one => one.querySelector('a[title="Plot chart"]')));
values.scrollTop = names.scrollTop = top;
setTimeout(() => {
  const rows = {};
  const cells = grid => [...grid.querySelectorAll('[role=rowgroup] > div')];
  for (const name of cells(names)) {
    const row = cells(values).filter(cell => cell.style.top == name.style.top);
    row.sort((one, other) => parseFloat(one.style.left) - parseFloat(other.style.left));
    if (row.length) rows[name.innerText.trim()] = row.map(cell => cell.innerText.trim());
  }
  done([rows, values.scrollHeight - values.clientHeight]);
}, 400);
"""


def metric_rows(driver: Any) -> dict[str, list[str]]:
    """Every row of the metrics, scrolled through."""
    found: dict[str, list[str]] = {}
    top, last = 0, 1
    while top <= last + 200:
        rows, last = driver.execute_async_script(ROWS, top)
        found |= rows
        top += 200
    return found


def close_assistant(driver: Any) -> None:
    """MLflow's own panel on the right, which takes a third of the width."""
    for button in driver.find_elements(
        "css selector", "button[aria-label='Close'], button[data-component-id*='assistant'][data-component-id*='close']"
    ):
        button.click()


def test_the_compare_view_has_both_runs_on_the_same_rows(browser: Any, uri: str, pair: dict[str, Any]) -> None:
    first, second = pair["ids"]
    browser.get(f'{uri}/#/compare-runs?runs=["{first}","{second}"]&experiments=["{pair["experiment"]}"]')
    until(browser, lambda: "Comparing 2 Runs from 1 Experiment" in text(browser) and "maya/precision" in text(browser))
    close_assistant(browser)
    for section in ("Visualizations", "Parameters"):
        browser.find_element("xpath", f"//*[@role='button' or self::button][contains(., '{section}')]").click()
    until(browser, lambda: "maya/precision" not in text(browser) and "error/step_time_s_pct" in text(browser))
    names = browser.find_element("xpath", "//*[contains(text(), 'Run Name:')]/ancestor::tr").text.split()[2:]
    assert [name for name in names if name in ("predicted", "actual")] == ["predicted", "actual"]
    keep(browser, "mlflow_compare.png")  # before it is scrolled through: MLflow moves names and values apart
    rows = metric_rows(browser)
    assert [float(cell) for cell in rows[keys.STEP_TIME]] == pytest.approx(pair["steps"], rel=0.02, abs=6e-4)
    for key in (keys.SAMPLES, keys.TOKENS, keys.COST, "error/step_time_s_pct"):
        assert len(rows[key]) == 2 and "NaN" not in rows[key], (key, rows)
    assert rows["error/step_time_s_pct"][0] == rows["error/step_time_s_pct"][1]
    assert rows["maya_predicted/compute_s"][1] == "NaN"  # the prediction's alone


def test_the_runs_of_an_experiment_are_told_apart_by_their_kind(browser: Any, uri: str, pair: dict[str, Any]) -> None:
    browser.get(
        f"{uri}/#/experiments/{pair['experiment']}/runs?searchFilter=tags.%60maya.run_kind%60+%3D+%27predicted%27"
    )
    until(browser, lambda: "predicted 1 x one-core" in text(browser))
    assert "actual 1 x one-core" not in text(browser)


def test_a_predicted_run_shows_its_figures(browser: Any, uri: str, pair: dict[str, Any]) -> None:
    browser.get(f"{uri}/#/experiments/{pair['experiment']}/runs/{pair['ids'][0]}/artifacts/figures/memory.png")
    picture = until(
        browser,
        lambda: browser.execute_script(
            "return [...document.querySelectorAll('img')].map(one => one.naturalWidth).find(width => width > 400)"
        ),
    )
    assert picture
    close_assistant(browser)
    keep(browser, "mlflow_artifacts.png")
