"""The report page in a real Chromium, opened as a file: what it shows, how it reacts to the mouse, and that it loads nothing."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.small_jobs import IMAGE, SCRIPT, hung, out_of_memory, trained

from maya_core.report import wording
from maya_core.report.analysis import Analysis
from maya_core.report.html import page, write_page
from maya_core.report.page import timeline_chart as timeline_data
from maya_core.report.prediction import Prediction

pytestmark = pytest.mark.slow

INSTALL = "apt-get install -y chromium chromium-driver; pip install selenium"
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1400,1000",
)  # fmt: skip


def chromium() -> tuple[str, str] | None:
    """Browser and driver; installed if this is a machine of ours to install on."""
    if found := _installed():
        return found
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return None
    with (Path(tempfile.gettempdir()) / "maya-chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and apt in one
        if not _installed():
            for command in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium", "chromium-driver"]):
                subprocess.run(command, capture_output=True, timeout=600, check=False)
    return _installed()


def _installed() -> tuple[str, str] | None:
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def start_browser(*arguments: str, log: bool = False) -> Any:
    """A Chromium that a test can drive. Without one tests are skipped, but not in a CI."""
    webdriver = pytest.importorskip("selenium.webdriver", reason=INSTALL)
    where = chromium()
    if where is None:
        assert "CI" not in os.environ, f"there is no Chromium here, and it could not be installed: {INSTALL}"
        pytest.skip(f"there is no Chromium here: {INSTALL}")
    options = webdriver.ChromeOptions()
    options.binary_location = where[0]
    for argument in (*QUIET, *arguments):
        options.add_argument(argument)
    if log:
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(where[1]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", log=True)
    yield driver
    driver.quit()


Open = Callable[[tuple[Analysis, Prediction]], Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a job's page. Whatever a test does there, no error is logged and nothing is asked of any network."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)

    def open_page(job: tuple[Analysis, Prediction]) -> Any:
        browser.get(write_page(*job, tmp_path / "report.html").as_uri())
        return browser

    yield open_page
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    told = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [each["params"] for each in told if each["method"] == "Network.requestWillBeSent"]
    urls = [
        each["request"]["url"] for each in asked if each["documentURL"].startswith("file:")
    ]  # not the browser's own
    assert {url.partition(":")[0] for url in urls} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in urls) == 1
    browser.get("about:blank")


def text(browser: Any, selector: str) -> str:
    return browser.find_element("css selector", selector).text


def hover(browser: Any, selector: str, x: int, y: int) -> None:
    """Moves the pointer to that place of an element, from its upper left corner."""
    from selenium.webdriver import ActionChains

    element = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    size = element.size
    ActionChains(browser).move_to_element_with_offset(
        element, x - int(size["width"]) // 2, y - int(size["height"]) // 2
    ).perform()


def wheel(browser: Any, x: int, y: int, delta: int) -> None:
    """A turn of the wheel over the timeline."""
    browser.execute_async_script(
        """const canvas = document.getElementById("timeline-canvas"), box = canvas.getBoundingClientRect();
        canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: arguments[2], clientX: box.left + arguments[0], clientY: box.top + arguments[1], bubbles: true, cancelable: true}));
        requestAnimationFrame(() => requestAnimationFrame(arguments[3]));""",
        x, y, delta,
    )  # fmt: skip


def shown_s(browser: Any) -> float:
    """How much time the timeline shows."""
    number, unit = re.search(r"([\d.,]+) (s|ms|µs|ns) shown", text(browser, "#range")).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]


def test_the_headline_is_the_predictions(opened: Open) -> None:
    _, prediction = trained(2)
    browser = opened(trained(2))
    assert "NVIDIA H100 80GB HBM3" in browser.title
    assert text(browser, ".card.step .value") == wording.seconds(prediction.step_time_s)
    low, high = prediction.step_time_range_s  # type: ignore[misc]
    assert f"between {wording.seconds(low)} and {wording.seconds(high)}" in text(browser, ".card.step")
    assert text(browser, ".card.throughput .value") == wording.count(prediction.samples_per_s)
    assert text(browser, ".card.mfu .value") == wording.share(prediction.mfu)
    fullest = prediction.memory.fullest
    assert fullest is not None
    used = fullest.peak_reserved_bytes + fullest.outside_allocator_bytes
    assert text(browser, ".card.memory .value") == wording.size(used)
    assert "✓ fits in 79.2 GiB" in text(browser, ".card.memory")
    assert text(browser, ".card.cost .value") == wording.money(prediction.cost.usd_per_1k_steps)  # type: ignore[union-attr]
    assert not browser.find_elements("css selector", ".alarm")


def test_charts_and_tables_are_there(opened: Open) -> None:
    _, prediction = trained(2)
    browser = opened(trained(2))
    for section in ("split", "timeline", "memory", "families", "confidence", "modules", "kernels", "communication"):
        assert browser.find_element("id", section).is_displayed(), section
    for canvas in ("timeline-canvas", "memory-canvas"):
        colours = browser.execute_script(
            """const canvas = document.getElementById(arguments[0]);
            const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return new Set(pixels).size;""",
            canvas,
        )
        assert colours > 10, f"{canvas} is blank"
    assert len(browser.find_elements("css selector", "#split tbody tr")) == 3  # the mean and two ranks
    rows = browser.find_elements("css selector", ".at-peak:not([hidden]) tbody tr")
    assert len(rows) == min(15, len(prediction.memory.ranks[0].at_peak))
    assert "small_jobs.py:" in rows[0].text
    assert "all_reduce" in text(browser, "#communication tbody")


def test_the_wheel_zooms_dragging_moves_and_a_double_click_shows_all(opened: Open) -> None:
    from selenium.webdriver import ActionChains

    browser = opened(trained(2))
    whole = shown_s(browser)
    _, prediction = trained(2)
    assert whole == pytest.approx(2 * prediction.step_time_s, rel=0.01)  # type: ignore[operator]
    for _ in range(3):
        wheel(browser, 600, 60, -120)
    assert shown_s(browser) < 0.6 * whole
    before = text(browser, "#range")
    canvas = browser.find_element("id", "timeline-canvas")
    ActionChains(browser).drag_and_drop_by_offset(canvas, -150, 0).perform()
    assert text(browser, "#range") != before
    assert text(browser, "#range").rpartition("·")[2] == before.rpartition("·")[2]
    ActionChains(browser).double_click(canvas).perform()
    wheel(browser, 600, 60, 120)  # all is shown already: nothing happens
    assert shown_s(browser) == whole


def test_keys_do_what_the_mouse_does(opened: Open) -> None:
    browser = opened(trained(2))
    whole = shown_s(browser)
    canvas = browser.find_element("id", "timeline-canvas")
    canvas.send_keys("++")
    wheel(browser, 0, 0, 0)
    assert shown_s(browser) < 0.5 * whole
    canvas.send_keys("0n")
    assert "rank 0, default stream" in browser.find_element("id", "selected-work").get_attribute("textContent")
    first = text(browser, "#tip")
    canvas.send_keys("n")
    assert text(browser, "#tip") != first


def test_the_tooltip_says_what_ran(opened: Open) -> None:
    browser = opened(trained(2))
    axis, head, host, row = 24, 20, 10, 17  # heights, as in timeline.js
    for x in range(500, 900, 50):  # some place may lie between two kernels
        hover(browser, "#timeline-canvas", x, axis + head + host + row // 2)
        if said := text(browser, "#tip"):
            break
    assert re.match(r"(addmm|mm|relu|threshold_backward|sum|add|_foreach)", said), said
    assert (
        re.search(r"\d (µs|ms)", said)
        and re.search(r"time (inter|extra)polated, ", said)
        and "rank 0, default stream" in said
    )
    assert "4096x" in said or "tensors" in said
    hover(browser, "#memory-canvas", 600, 150)
    assert "allocated" in text(browser, "#tip") and "parameters" in text(browser, "#tip")


def test_names_of_the_program_are_text_and_never_run(opened: Open) -> None:
    browser = opened(trained())
    assert browser.execute_script("return typeof hacked") == "undefined"
    assert not browser.find_elements("css selector", "img")
    modules = text(browser, "#modules")
    assert SCRIPT in modules and IMAGE in modules
    assert SCRIPT in text(browser, ".at-peak")
    # The tooltip has them too: every piece of work of the stream, one after the other.
    canvas = browser.find_element("id", "timeline-canvas")
    said = []
    for _ in range(20):
        canvas.send_keys("n")
        said.append(text(browser, "#tip"))
    assert any(SCRIPT in each for each in said) and any(IMAGE in each for each in said)
    assert browser.execute_script("return typeof hacked") == "undefined"
    # Nor would a script that got in: the policy knows one by its hash. (The browser logs that it refused.)
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'hacked = 3'; document.body.append(s)"
    )
    assert browser.execute_script("return typeof hacked") == "undefined"
    refused = browser.get_log("browser")
    assert len(refused) == 1 and "Content Security Policy" in refused[0]["message"]


def test_out_of_memory_is_said_first(opened: Open) -> None:
    _, prediction = out_of_memory()
    browser = opened(out_of_memory())
    memory = prediction.memory.ranks[0]
    said = text(browser, "#out-of-memory")
    assert "Does not fit in memory" in said and wording.size(memory.out_of_memory_bytes) in said
    assert "✗ does not fit" in text(browser, ".card.memory")
    assert "did not complete an optimizer step" in text(browser, "#no-step")
    assert browser.find_element("id", "memory-canvas").is_displayed()
    assert not browser.find_elements("id", "timeline")


def test_hangs_are_said_first(opened: Open) -> None:
    browser = opened(hung())
    assert "This job would hang" in text(browser, ".alarm")
    assert "rank 1: in all_reduce (sum) of 2,048 Float" in text(browser, ".alarm pre")
    assert "The job would hang" in text(browser, "#no-step")
    assert browser.find_element("id", "memory-canvas").is_displayed()


def test_dark_and_narrow_and_on_paper(opened: Open) -> None:
    browser = opened(trained(2))
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.set_window_size(1100, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    browser.set_window_size(1400, 1000)
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]) > 10_000


# Without a browser


def test_the_same_analysis_gives_the_same_bytes() -> None:
    assert page(*trained(2)) == page(*trained(2))


def test_nothing_in_the_data_can_end_its_element() -> None:
    whole = page(*trained())
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', whole, re.DOTALL)
    assert data is not None and not set("<>&\u2028\u2029") & set(data[1])
    assert SCRIPT in json.dumps(json.loads(data[1]))
    assert whole.count("<script") == 2 and SCRIPT not in whole and IMAGE not in whole
    assert "http:" not in whole and "https:" not in whole and "eval(" not in whole


def test_omitted_spans_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis, prediction = trained(2)
    monkeypatch.setattr(timeline_data, "MOST_SPANS", 50)
    monkeypatch.setattr(timeline_data, "MOST_RANKS", 1)
    limited = timeline_data.timeline(replace(analysis))
    assert limited is not None and len(limited["ranks"]) == 1
    assert limited["limits"] == [
        "the last step is shown", "1 of 2 emulated ranks are shown", "only the longest 50 pieces of each rank's work are shown",
    ]  # fmt: skip
    assert "only the longest 50 pieces of each rank" in page(analysis, prediction)
