"""`maya check` as a gate in CI."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from maya_here import refused
from search_here import MLP, write
from typer.testing import CliRunner

from maya_core import cli
from maya_core.report.prediction_file import read_prediction
from maya_core.search import gate
from maya_core.search.trial import outcome_of

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")
runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, what `maya check` keeps of it, a baseline, and a recorded run of the same program."""
    place = tmp_path_factory.mktemp("gate")
    write(place)
    words = [MAYA, "check", "mlp.yaml", "--study", "study", "--write-baseline", "baseline.json"]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return place


def check(folder: Path, *words: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = runner.invoke(cli.app, ["check", "mlp.yaml", "--study", "study", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def test_limits(folder: Path) -> None:
    baseline = json.loads((folder / "baseline.json").read_text())["jobs"]["mlp"]
    seconds, used = baseline["step_time_s"], baseline["memory_bytes"]
    assert check(folder, "--max-memory", "20GiB", "--max-step-time", f"{seconds * 1.01:.6f}")[0] == 0
    code, told = check(folder, "--max-memory", f"{used / 2**30 * 0.99:.3f}GiB")
    assert code == 1 and "failed memory within limit" in told
    code, told = check(folder, "--max-step-time", f"{seconds * 990:.3f}ms", "--max-cost-per-1k-steps", "0.0001")
    assert code == 1 and "failed step time within limit" in told and "failed cost per 1,000 steps within limit" in told


def test_a_regression_against_the_baseline(folder: Path) -> None:
    assert check(folder, "--baseline", "baseline.json", "--max-regression", "0%")[0] == 0
    better = json.loads((folder / "baseline.json").read_text())
    better["jobs"]["mlp"]["step_time_s"] /= 1.05
    (folder / "better.json").write_text(json.dumps(better))
    code, told = check(folder, "--baseline", "better.json", "--max-regression", "3%")
    assert code == 1 and "failed step time vs. baseline" in told and "(+5.0%)" in told
    assert check(folder, "--baseline", "better.json", "--max-regression", "6%")[0] == 0


def test_junit_and_markdown(folder: Path) -> None:
    code, _ = check(folder, "--max-memory", "1MiB", "--junit", "out.xml", "--markdown", "out.md")
    assert code == 1
    suite = xml.parse(folder / "out.xml").getroot()[0]
    assert suite.attrib == {"name": "mlp", "tests": "2", "failures": "1", "errors": "0"}
    failure = suite.find("testcase[@name='memory within limit']/failure")
    assert failure is not None and "limit 1.00 MiB" in failure.attrib["message"]
    rows = [line for line in (folder / "out.md").read_text().splitlines() if line.startswith("|")]
    assert rows[0] == "| job | | check | predicted | limit |" and all(row.count(" | ") >= 3 for row in rows[2:])
    assert "❌" in rows[3] and "1 job, 1 failed." in (folder / "out.md").read_text()


def test_what_does_not_fit_fails(tmp_path: Path) -> None:
    recipe = write(tmp_path, MLP.replace("default: {{micro: 4194304}}", "default: {{micro: 16777216, width: 128}}"))
    done = subprocess.run(
        [MAYA, "check", str(recipe)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1 and "out of memory" in done.stdout


def test_a_recorded_run(folder: Path, tmp_path: Path) -> None:
    program = Path(__file__).parent / "mlp.py"
    words = [
        MAYA,
        "run",
        "--gpu",
        "l4",
        "--steps",
        "2",
        "--out",
        "recorded",
        "--",
        "python",
        str(program),
        "--batch",
        "4194304",
    ]
    words += ["--accumulate", "4", "--width", "64"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=300, check=False).returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        done = runner.invoke(
            cli.app, ["check", "recorded", "--baseline", str(folder / "baseline.json"), "--max-regression", "0%"]
        )
        assert done.exit_code == 0 and "the baseline does not contain this job" in " ".join(done.output.split())
        prediction = read_prediction(tmp_path / "recorded" / "latest" / "prediction.json")
        # The recipe's default is this very program: forked from a warm process or started, it predicts the same.
        baseline = json.loads((folder / "baseline.json").read_text())["jobs"]["mlp"]
        assert gate.Figures.of(prediction).model_dump() == baseline
        # Ranks that wait for one that ran out of memory do not make it a hang.
        waits = prediction.model_copy(update={"hangs": ["rank 1 would wait forever"]})
        full = waits.model_copy(update={"memory": prediction.memory.model_copy(update={"fits": False})})
        assert (outcome_of(waits).status, outcome_of(full).status) == ("hangs", "out of memory")
        assert gate.judge("job", full, gate.Limits(), None).checks[0].found == "out of memory"
        crashed = prediction.model_copy(update={"trace": prediction.trace.model_copy(update={"ended": "failed"})})
        unknown = prediction.model_copy(update={"memory": prediction.memory.model_copy(update={"fits": None})})
        assert not gate.judge("job", crashed, gate.Limits(), None).ok
        assert not gate.judge("job", unknown, gate.Limits(), None).ok
        words = ["check", "recorded", "--baseline", "recorded/latest/prediction.json", "--max-regression", "0%"]
        assert runner.invoke(cli.app, words).exit_code == 0


def test_a_program_that_fails_is_judged_like_the_others(folder: Path) -> None:
    write(folder, MLP.replace("{{recompute}}", "{{recompute}} --fail"), "fails")
    code, told = check(folder, "fails.yaml", "--junit", "both.xml", "--markdown", "both.md")
    assert code == 1 and "this program was told to fail" in told
    suites = xml.parse(folder / "both.xml").getroot()
    assert [(suite.attrib["name"], suite.attrib["failures"]) for suite in suites] == [("mlp", "0"), ("fails", "1")]
    assert "`fails` | ❌ | runs" in (folder / "both.md").read_text()


def test_a_baseline_has_no_figures_of_a_job_that_fails(folder: Path) -> None:
    write(folder, MLP.replace("{{recompute}}", "{{recompute}} --fail"), "fails")
    assert check(folder, "fails.yaml", "--write-baseline", "some.json")[0] == 1
    kept = json.loads((folder / "some.json").read_text())
    assert kept["jobs"].keys() == {"mlp"}
    kept["jobs"]["mlp"] = dict.fromkeys(kept["jobs"]["mlp"])  # as one without figures would be
    (folder / "empty.json").write_text(json.dumps(kept))
    _, told = check(folder, "--baseline", "empty.json", "--max-regression", "0%")
    assert "the baseline does not contain this job" in told


def test_a_baseline_keeps_what_it_has_of_other_jobs(folder: Path) -> None:
    there = json.loads((folder / "baseline.json").read_text())
    there["jobs"]["another"] = there["jobs"]["mlp"]
    (folder / "shared.json").write_text(json.dumps(there))
    assert check(folder, "--write-baseline", "shared.json")[0] == 0
    assert json.loads((folder / "shared.json").read_text())["jobs"].keys() == {"another", "mlp"}


def test_text_stays_text_in_markdown() -> None:
    told = gate.markdown([gate.failed("job", "train.py:3 in <module> & a | b\nnext")])
    assert "train.py:3 in &lt;module> &amp; a \\| b next" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mlp.yaml"], "two of these jobs have the name mlp"),
        (["--max-memory", "lots"], "--max-memory lots: it must be a size"),
        (["--baseline", "baseline.json"], "only work together"),
        (["--baseline", "none.json", "--max-regression", "3%"], "no baseline at none.json"),
        (["--baseline", "mlp.yaml", "--max-regression", "3%"], "mlp.yaml is not a baseline"),
        (["--junit", "mlp.yaml"], "mlp.yaml exists and was not written by Maya"),
    ],
)
def test_bad_use(
    words: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused("check", "mlp.yaml", *words, cwd=folder, monkeypatch=monkeypatch, capsys=capsys)
    assert found.exit_code == 2 and said in found.stderr
