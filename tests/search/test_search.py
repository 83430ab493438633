"""The search: what it finds, that it finds the same after it was killed, and what it skips."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from maya_here import refused
from search_here import MLP, job, search, write

from maya_core.cpp_build import cache_folder
from maya_core.errors import MayaError
from maya_core.launch.signals import TERMINATED
from maya_core.search import result
from maya_core.search.executors import LocalExecutor
from maya_core.search.pruning import Pruner
from maya_core.search.recipe import read_recipe
from maya_core.search.study import SKIPPED, Goal, Search
from maya_core.search.trial import Outcome, Task, close_worker, run_task, task_of

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")


class Computed:
    """Outcomes by a formula instead of an emulation, for what the search makes of them."""

    workers = 2

    def __init__(self, die_after: int | None = None) -> None:
        self.asked: list[Task] = []
        self._left = die_after

    def outcomes(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Outcome]]:
        for number in reversed(tasks):  # the last first: order of arrival is not that of numbers
            if self._left is not None:
                if not self._left:
                    raise KeyboardInterrupt
                self._left -= 1
            self.asked.append(tasks[number])
            yield number, self.outcome(tasks[number])

    @staticmethod
    def outcome(task: Task) -> Outcome:
        words = task.program.words
        micro, width = int(words[3]), int(words[7])
        full = micro * (1 if "--recompute" in words else 4) > 2**24
        if full:
            return Outcome(status="out of memory")
        step = (2**24 / micro) ** 0.5 + width / 64 + (1.5 if "--recompute" in words else 0)
        return Outcome(
            status="fits",
            step_time_s=step,
            usd_per_hour=2.0,
            usd_per_1k_steps=step * 2 / 3.6,
            samples_per_s=2**24 / step,
        )

    def close(self) -> None:
        pass


def kept_in(folder: Path) -> list[Any]:
    study = optuna.load_study(study_name="mlp", storage=f"sqlite:///{folder}/study.db")
    return [(one.number, one.params, one.state, one.values) for one in study.trials]


def trials_of(found: Search) -> list[tuple[int, dict[str, Any], str | None]]:
    return [(trial.number, trial.point, trial.broken) for trial in found.trials]


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsga2", "grid", "random"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(sampler: str, tmp_path: Path) -> None:
    recipe = job(tmp_path)
    goal = Goal(pareto=sampler == "nsga2")
    whole = search(recipe, tmp_path / "whole", goal, sampler=sampler)
    whole.run(16, Computed())
    stored = kept_in(tmp_path / "whole")
    assert [(number, params) for number, params, *_ in stored] == [(one.number, one.point) for one in whole.trials]
    assert len({str(params) for _, params, *_ in stored}) == len(stored) == 16  # no configuration twice
    for die_after in (0, 3, 8):
        folder = tmp_path / f"{sampler}-{die_after}"
        broken = search(recipe, folder, goal, sampler=sampler)
        with pytest.raises(KeyboardInterrupt):
            broken.run(16, Computed(die_after))
        broken.close()
        again = search(recipe, folder, goal, sampler=sampler)
        rest = Computed()
        again.run(16, rest)
        again.close()
        assert trials_of(again) == trials_of(whole)
        assert kept_in(folder) == stored
        assert die_after == 0 or len(rest.asked) < 16
    whole.close()


def test_killed_at_any_word_to_the_database(tmp_path: Path) -> None:
    """By a process that ends, unannounced, before its n-th statement: while tables are made, a study begun, a trial written."""
    recipe = job(tmp_path)
    whole = search(recipe, tmp_path / "whole", sampler="random")
    whole.run(5, Computed())

    def statements_of(folder: Path, die_before: int | None) -> int | None:
        """How many there were; None if it was killed."""
        child = os.fork()
        if not child:
            said = 0

            def count(*_: object) -> None:
                nonlocal said
                if said == die_before:
                    os._exit(255)
                said += 1

            sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
            sqlalchemy.event.listen(sqlalchemy.Engine, "commit", count)
            search(recipe, folder, sampler="random").run(5, Computed())
            (folder / "said").write_text(str(said))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 255)
        return None if status else int((folder / "said").read_text())

    statements = statements_of(tmp_path / "counted", None)
    assert statements is not None and statements > 100
    for die_before in range(0, statements, 29):
        folder = tmp_path / str(die_before)
        assert statements_of(folder, die_before) is None
        again = search(recipe, folder, sampler="random")
        again.run(5, Computed())
        again.close()
        assert trials_of(again) == trials_of(whole)
        assert kept_in(folder) == kept_in(tmp_path / "whole")
    whole.close()


def test_more_trials_than_there_are_configurations(tmp_path: Path) -> None:
    found = search(job(tmp_path), tmp_path / "study", sampler="tpe")
    found.run(1000, Computed())
    assert len(found.trials) == found.possible == 20
    best = found.best()[0]
    assert best.point == {"width": 64, "micro": 2**22, "recompute": "no"}
    assert best.outcome.step_time_s == 3.0


def test_what_surely_does_not_fit_is_skipped_and_counted(tmp_path: Path) -> None:
    executor = Computed()
    found = search(job(tmp_path), tmp_path / "study", sampler="grid")
    found.run(20, executor)
    counts = found.counts()
    skipped = [trial for trial in found.trials if trial.how == SKIPPED]
    assert counts[SKIPPED] == len(skipped) > 0 and counts["emulated"] + len(skipped) == 20 == len(found.trials)
    assert len(executor.asked) == counts["emulated"]
    for trial in skipped:  # soundly: each of them would not have fitted
        task = found.make_task(trial.point)
        assert Computed.outcome(task).status == "out of memory"
    slower = MLP.replace("memory: falls}}", "memory: falls, time: rises}}")
    less = search(job(tmp_path, slower), tmp_path / "less", sampler="grid")
    less.run(20, Computed())
    assert less.counts()["emulated"] < counts["emulated"] and less.best()[0].point == found.best()[0].point
    assert {trial.broken for trial in less.trials} == {None, "out of memory", "slower"}
    without = search(job(tmp_path), tmp_path / "other", sampler="grid", prune=False)
    without.run(20, Computed())
    assert [one.point for one in without.best()] == [one.point for one in found.best()]


def test_what_may_be_concluded(tmp_path: Path) -> None:
    pruner = Pruner(job(tmp_path))
    pruner.note_out_of_memory({"width": 64, "micro": 2**22, "recompute": "yes"})
    full = {"width": 64, "micro": 2**22, "recompute": "no"}
    assert pruner.out_of_memory(full) and pruner.out_of_memory(full | {"micro": 2**24})
    assert not pruner.out_of_memory(full | {"micro": 2**20})  # less of one, more of the other
    assert not pruner.out_of_memory(full | {"width": 128})  # nobody said what width does
    assert not pruner.out_of_memory({"width": 64, "micro": 2**21, "recompute": "yes"})


def test_what_is_faster_need_not_be_cheaper(tmp_path: Path) -> None:
    """More nodes take less time and cost more; a larger batch takes more and trains more."""
    text = MLP.replace("space:", "space:\n      nodes: {{values: [1, 2], time: falls}}")
    text = text.replace("memory: rises}}", "memory: rises, time: rises}}").replace("rows\n", "micro\n")
    pruner = Pruner(job(tmp_path, text))
    fits = {"nodes": 2, "width": 64, "micro": 2**20, "recompute": "no"}
    pruner.note_usable(fits)
    for other in ({"nodes": 1}, {"micro": 2**21}):
        assert pruner.slower(fits | other, alike=False) == fits
        assert pruner.slower(fits | other, alike=True) is None


def test_constraints_and_objectives(tmp_path: Path) -> None:
    goal = Goal(max_step_time_s=4.5)
    found = search(job(tmp_path), tmp_path / "study", goal, sampler="grid")
    found.run(20, Computed())
    assert {trial.broken for trial in found.trials} == {None, "out of memory", "a step takes longer than 4.5 s"}
    assert all((trial.outcome.step_time_s or 0) <= 4.5 for trial in found.best())
    outcome = Outcome(
        status="fits", step_time_s=1.0, tokens_per_s=1e6, usd_per_hour=36.0, used_bytes=95, capacity_bytes=100
    )
    assert Goal(tokens=1e12, deadline_s=3600 * 24).broken(outcome) == "does not finish by the deadline"
    assert Goal(tokens=1e12, deadline_s=3600 * 300).broken(outcome) is None
    assert Goal(tokens=1e12, budget_usd=9_000).broken(outcome) == "costs more than the budget"
    assert Goal(tokens=1e12).training_usd(outcome) == pytest.approx(10_000)
    assert Goal(memory_margin=0.1).broken(outcome) == "leaves only 5.0% of memory free instead of 10.0%"
    assert Goal(objective="tokens_per_dollar").values(outcome) == [pytest.approx(1e8)]
    assert Goal(objective="cost").values(outcome) is None
    assert Goal(objective="cost").broken(outcome) == "the price is not known"
    assert Goal(max_usd_per_1k_steps=5).broken(outcome) == "the price is not known"
    assert (
        Goal(samples=1e6).broken(outcome)
        == "the number of samples per step is not known (give samples_per_step in the recipe)"
    )
    unknown = Goal(objective="samples_per_dollar").broken(outcome)
    assert unknown is not None and "give samples_per_step in the recipe" in unknown


def test_a_study_is_of_one_search(tmp_path: Path) -> None:
    recipe = job(tmp_path)
    first = search(recipe, tmp_path / "study")
    with pytest.raises(MayaError, match="another search is running"):
        search(recipe, tmp_path / "study")
    first.run(1, Computed())
    first.close()
    with pytest.raises(MayaError, match="started with another plan"):
        search(recipe, tmp_path / "study", seed=7)
    with pytest.raises(MayaError, match="started with another recipe"):
        search(job(tmp_path, MLP.replace("[64, 128]", "[64, 256]")), tmp_path / "study")


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """With a name so short that sockets go there, too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def searched(
    tmp_path_factory: pytest.TempPathFactory, temporary: Path
) -> tuple[Path, subprocess.CompletedProcess[str], list[Any]]:
    """`maya search`, killed in the middle, asked to end a little later, and again to its end."""
    folder = tmp_path_factory.mktemp("searched")
    recipe = write(folder)
    words = [MAYA, "search", str(recipe), "--trials", "9", "--study", "study", "--sampler", "random"]
    database = folder / "study" / "study.db"
    environment = os.environ | {"TMPDIR": str(temporary)}

    def ended(by: signal.Signals, after: int) -> int:
        """Its exit code, when it is ended after so many trials."""
        child = subprocess.Popen(
            words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=None if by == signal.SIGKILL else environment,
        )  # fmt: skip
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and child.poll() is None and _count(database) < after:
            time.sleep(0.1)
        time.sleep(0.3)  # a trial is in the database a moment before the search counts it
        assert child.poll() is None, "it ended before it could be killed"
        os.kill(child.pid, by)
        return child.wait(60)

    assert ended(signal.SIGKILL, 2) == -signal.SIGKILL
    assert not (folder / "study" / "result.json").exists()
    assert ended(signal.SIGTERM, 4) == TERMINATED  # it tells what it has
    before = kept_in(folder / "study")
    assert len(json.loads((folder / "study" / "result.json").read_text())["trials"]) == len(before)
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder, done, before


def _count(database: Path) -> int:
    """How many trials there are. Only reads: Optuna would make the tables where there are none yet, under the feet of the search."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return int(connection.execute("select count(*) from trials").fetchone()[0])
    except sqlite3.OperationalError:  # not there yet, or without its tables
        return 0


def test_the_command_killed_and_run_again(searched: tuple[Path, subprocess.CompletedProcess[str], list[Any]]) -> None:
    folder, done, before = searched
    assert 4 <= len(before) < 9
    after = kept_in(folder / "study")
    assert after[: len(before)] == before and len(after) == 9
    assert f"{len(before)} trials are already stored" in " ".join(done.stdout.split())
    # The whole of it, by a search that was never killed: the same trials, with the same figures.
    recipe = job(folder)
    whole = search(recipe, folder / "whole", sampler="random")
    executor = LocalExecutor(2)
    whole.run(9, executor)
    executor.close()
    told = json.loads((folder / "study" / "result.json").read_text())
    drop = {"seconds", "how"}
    mine = [{**trial.outcome.model_dump(exclude=drop), **trial.point} for trial in whole.trials]
    theirs = [{**{k: v for k, v in one["outcome"].items() if k not in drop}, **one["point"]} for one in told["trials"]]
    assert mine == theirs
    whole.close()


def test_what_it_tells(searched: tuple[Path, subprocess.CompletedProcess[str], list[Any]], temporary: Path) -> None:
    folder, done, _ = searched
    text = " ".join(done.stdout.split())
    assert "3 knobs, 20 points, of which 20 are possible and different" in text
    assert "Launch the best configuration with:" in text and "mlp.py --batch" in text
    told = json.loads((folder / "study" / "result.json").read_text())
    best = min((one for one in told["trials"] if not one["broken"]), key=lambda one: one["outcome"]["step_time_s"])
    assert told["best"] == best["number"] and told["command"] in done.stdout
    assert (folder / "study" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    # A smaller micro-batch takes as long and needs less; the largest ones do not fit.
    statuses = {(one["point"]["micro"], one["point"]["recompute"]): one["outcome"]["status"] for one in told["trials"]}
    assert statuses.get((16777216, "no"), "out of memory") == "out of memory"
    assert not list(folder.glob("maya-out*"))
    assert not list(temporary.iterdir())


def test_a_search_of_hardware_runs_the_program_once(tmp_path: Path) -> None:
    text = MLP.replace("width: [64, 128]", "gpu: [h100, l4, a100]").replace("--width {{width}}", "--width 64")
    text = text.replace(
        "micro: {{values: [1048576, 2097152, 4194304, 8388608, 16777216]", "micro: {{values: [1048576, 2097152]"
    )
    found = search(
        job(tmp_path, text.replace("default: {{micro: 4194304}}", "default: {{gpu: h100}}")),
        tmp_path / "study",
        sampler="grid",
    )
    executor = LocalExecutor(1)
    found.run(12, executor)
    executor.close()
    assert found.counts() == {"emulated": 4, "from a trace": 8}
    by_gpu = {trial.outcome.gpu: trial.outcome.step_time_s for trial in found.trials if trial.point["micro"] == 1048576}
    assert by_gpu["h100"] < by_gpu["a100"] < by_gpu["l4"]  # type: ignore[operator]


READS_FILES = """
import json
import os

with open("rows.json") as file:
    rows = json.load(file)
os.environ["PYTORCH_ALLOC_CONF"] = os.environ.get("CONF", "")  # which torch reads when it is imported
import torch
from shape import WIDTH

with open("log.txt", "a") as file:
    file.write("run")
layer = torch.nn.Linear(WIDTH, WIDTH).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
for _ in range(4):
    layer(torch.ones(rows, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("own_process", [False, True])
def test_what_is_known_of_a_program_holds_while_its_files_are_the_same(
    own_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that its command does not name, too: a model's module, a configuration. A search goes on with the same ones only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    if own_process:
        monkeypatch.setenv("CONF", "expandable_segments:True")
    files = {"train.py": READS_FILES, "shape.py": "WIDTH = 256", "rows.json": "1024"}
    for name, text in files.items():
        Path(name).write_text(text)
    Path("job.yaml").write_text(
        "about: It reads files.\ncommand: python train.py\ncluster: {gpu: l4}\nsteps: 2\nspace: {gpu: [l4, h100]}\n"
    )
    recipe = read_recipe(Path("job.yaml"))

    def outcome() -> Outcome:
        return run_task(task_of(recipe, recipe.default, tmp_path / "cache"))

    try:
        first = outcome()
        assert (first.how, outcome().how) == ("emulated", "cached")
        found = search(recipe, tmp_path / "study", sampler="grid")
        executor = LocalExecutor(1)
        found.run(1, executor)
        executor.close()
        found.close()
        search(recipe, tmp_path / "study", sampler="grid").close()
        changes = {"rows.json": "65536", "shape.py": "WIDTH = 512", "train.py": f"{READS_FILES}\n"}
        for name, other in list(changes.items())[: 1 if own_process else None]:
            Path(name).write_text(other)
            changed = outcome()
            assert changed.how == "emulated" and outcome().how == "cached", name
            assert (changed.used_bytes != first.used_bytes) == (name != "train.py")
            with pytest.raises(MayaError, match=f"{name} changed since the study"):
                search(recipe, tmp_path / "study", sampler="grid")
            Path(name).write_text(files[name])
            assert outcome().model_copy(update={"how": "emulated", "seconds": first.seconds}) == first, name
    finally:
        close_worker()


def test_a_trial_has_the_emulations_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork, too: inductor's caches are Maya's, never the user's, and there is an nvidia-smi."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("MAYA_CACHE_DIR", str(cache_folder()))
    seen = tmp_path / "cache-of-the-user"  # a folder whose files are real
    seen.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(seen))
    Path("train.py").write_text(
        "import json, os, shutil, torch\n"
        "torch.nn.Linear(8, 8).cuda()\n"
        "seen = [os.environ['TORCHINDUCTOR_CACHE_DIR'], shutil.which('nvidia-smi'), os.environ['KNOB']]\n"
        "json.dump(seen, open('cache-of-the-user/seen.json', 'w'))\n"
    )
    Path("job.yaml").write_text(
        "about: It looks around.\ncommand: python train.py\ncluster: {gpu: l4}\nenvironment: {KNOB: '7'}\nspace: {gpu: [l4]}\n"
    )
    recipe = read_recipe(Path("job.yaml"))
    try:
        run_task(task_of(recipe, recipe.default, tmp_path / "cache"))
    finally:
        close_worker()
    caches, smi, knob = json.loads((seen / "seen.json").read_text())
    assert Path(caches).is_relative_to(cache_folder())
    assert "maya-smi-" in smi and knob == "7"


def test_a_program_that_fails_ends_the_search_at_once(tmp_path: Path) -> None:
    recipe = write(tmp_path, MLP.replace("{{recompute}}", "{{recompute}} --fail"))
    done = subprocess.run(
        [MAYA, "search", str(recipe)], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2
    assert "the default configuration of mlp fails" in done.stderr and "this program was told to fail" in done.stderr


class Fails(Computed):
    @staticmethod
    def outcome(task: Task) -> Outcome:
        return Outcome(status="failed", why="a typing error")


def test_a_default_that_fails_is_mended_and_tried_again(tmp_path: Path) -> None:
    recipe = job(tmp_path)
    broken = search(recipe, tmp_path / "study")
    with pytest.raises(MayaError, match="the default configuration of mlp fails: a typing error"):
        broken.run(4, Fails())
    broken.close()
    again = search(recipe, tmp_path / "study", seed=7)  # no trial is there that would be another plan's
    again.run(4, Computed())
    assert [trial.number for trial in again.trials] == [0, 1, 2, 3] and again.trials[0].broken is None


def test_a_study_is_of_one_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept, too: the same GPU at another price is another prediction."""
    recipe = job(tmp_path)
    task = task_of(recipe, recipe.default, tmp_path)
    before = task.pricing
    first = search(recipe, tmp_path / "study")
    first.run(1, Computed())
    first.close()
    own = tmp_path / "hardware.toml"
    own.write_text('[[prices]]\ngpu = "l4"\nprovider = "ours"\nusd_per_hour = 0.1\n')
    monkeypatch.setenv("MAYA_HARDWARE", str(own))
    assert task.pricing != before
    with pytest.raises(MayaError, match="started with another hardware, price or calibration"):
        search(recipe, tmp_path / "study")


def test_a_worker_that_is_killed_takes_no_trial_with_it(tmp_path: Path) -> None:
    found = search(job(tmp_path), tmp_path / "study", sampler="random")
    executor = LocalExecutor(2)
    killed = []

    def on_trial(trial: Any) -> None:
        if trial.number == 1:
            killed.append(next(iter(executor._pool._processes)))
            os.kill(killed[0], signal.SIGKILL)

    found.run(6, executor, on_trial)
    executor.close()
    assert killed and [trial.number for trial in found.trials] == list(range(6))
    assert all(trial.outcome.status in ("fits", "out of memory") for trial in found.trials)


def test_the_winner_against_the_default(tmp_path: Path) -> None:
    found = search(job(tmp_path), tmp_path / "study", sampler="grid")
    found.run(20, Computed())
    assert result.saved(found) == "The default configuration is the best one."
    assert [one.number for one in result.front(found.trials)] == [found.best()[0].number]
    worse = MLP.replace("default: {{micro: 4194304}}", "default: {{width: 128, micro: 1048576}}")
    for goal, said in (
        (
            Goal(),
            "The best configuration is 2.00 times as fast as the default, and 1,000 steps cost $1.67 instead of $3.33, which saves 50 %.",
        ),
        (
            Goal(objective="samples_per_dollar"),
            "The best configuration processes 2.00 times as many samples per dollar as the default, which saves 50 %.",
        ),
    ):
        other = search(job(tmp_path, worse), tmp_path / goal.objective, goal, sampler="grid")
        other.run(20, Computed())
        assert result.saved(other) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sampler", "bayes"], "there is no sampler 'bayes'"),
        (["--objective", "joy"], "there is no objective 'joy'"),
        (["--deadline", "72h"], "neither --tokens nor --samples"),
        (["--tokens", "1e9", "--samples", "1e6"], "both --tokens and --samples"),
        (["--memory-margin", "5"], "--memory-margin 5: it must be a share, like '3%' or 0.03; 5 would be 500%"),
        (["--tokens", "many"], "--tokens many: it must be a number"),
        (["--executor", "slurm"], "there is no executor 'slurm'"),
        (["--ray-address", "auto"], "--ray-address was given without --executor ray"),
    ],
)
def test_bad_use(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path)
    found = refused("search", str(recipe), *words, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert found.exit_code == 2 and said in found.stderr
