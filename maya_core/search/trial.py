"""Runs one trial: emulates a program, predicts it on a cluster, and stores the outcome.

A trial runs in a worker that runs many of them and keeps what later trials can use: fork servers, traces of programs, and earlier
predictions. Which trials run is decided by `study.py`; where they run, by `executors.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from maya_core import pipeline
from maya_core.errors import MayaError
from maya_core.hardware.catalog import use_hardware_file
from maya_core.hardware.cluster import Cluster
from maya_core.launch.fork_server import ForkServer
from maya_core.predictor.calibration import load_calibration, shipped_digest
from maya_core.recording.files_read import installed, stamp
from maya_core.report.prediction import Prediction
from maya_core.report.unknown_values import memory_in_words
from maya_core.request import EmulationOptions, PredictionOptions, Request
from maya_core.search.recipe import HARDWARE, CheckedRecipe, Point, Program
from maya_core.trace.job import read_run
from maya_core.version import __version__

LOG = "output.log"
TRACE = "trace"
LAST_LINES = 12
MOST_FORK_SERVERS = 2  # each needs a few hundred MB

Status = Literal[
    "fits", "out of memory", "failed", "hangs", "slower", "not known"
]  # slower: certainly slower than another one that fits; not known: memory depends on values that nobody knows


class Task(BaseModel):
    """Everything that a worker needs to run a trial."""

    model_config = ConfigDict(frozen=True)

    program: Program
    request: Request
    modules: list[str] | None = None  # imported by the fork server
    folder: Path  # where traces and predictions are stored
    keep_traces: bool = False  # because other hardware may be predicted from them

    @property
    def program_key(self) -> str:
        """A digest of what is known about a program before it runs: its command, the folder, the files it names, and the installed
        software."""
        named = {part for word in self.program.words for part in (word, word.rpartition("=")[2])}
        files = {word: stamp(word) for word in named if ("/" in word or "." in word) and Path(word).is_file()}
        software = [installed(), __version__, sys.version]
        emulation = self.request.model_dump(
            mode="json", include=set(EmulationOptions.model_fields) - {"out", "name", "keep_files"}
        )
        return _digest([self.program.model_dump(), emulation, os.getcwd(), files, software])

    @property
    def files(self) -> dict[str, str] | None:
        """The present state of the user's files that the program read in its last run; None if it has not run in this folder."""
        try:
            return {path: stamp(path) for path in json.loads(_list(self).read_text())}
        except (OSError, ValueError):
            return None

    @property
    def trace_key(self) -> str | None:
        """A digest that is equal for programs with equal traces; None for a program that has not run."""
        files = self.files
        return None if files is None else _digest([self.program_key, files])

    @property
    def pricing(self) -> str:
        """A digest of what turns a trace into a prediction: the content of hardware, prices and calibration, not their names."""
        machine, own = self.machine, load_calibration(self.request.gpu_name, self.request.profile)
        quotes = [quote.model_dump(mode="json") for quote in machine.quotes()]
        return _digest(
            [machine.model_dump(mode="json"), quotes, shipped_digest(), own.model_dump_json() if own else ""]
        )

    @property
    def key(self) -> str | None:
        """A digest that is equal for equal predictions; None for a program that has not run."""
        named = {"profile", "hardware"}  # `pricing` covers their content
        options = self.request.model_dump(mode="json", include=PredictionOptions.model_fields.keys() - named)
        program = self.trace_key
        return program and _digest([program, options, self.pricing])

    @property
    def machine(self) -> Cluster:
        return self.request.cluster(self.program.gpus_per_node, self.program.nodes)


def task_of(job: CheckedRecipe, point: Point, folder: Path, given: Request | None = None) -> Task:
    """The trial of one configuration of a recipe. Options in `given` replace those of the recipe; results are stored in `folder`."""
    from maya_core.launch.fork_server import imports_of

    program = job.program(point)
    scripts = [Path(word) for word in program.words if word.endswith(".py")]
    modules = job.recipe.preload
    options = given.model_dump(exclude_unset=True, include=set(PredictionOptions.model_fields)) if given else {}
    if options.get("hardware"):
        options["hardware"] = options["hardware"].resolve()
    return Task(
        program=program,
        request=job.request(point).model_copy(update=options),
        modules=modules if modules is not None else [name for script in scripts[:1] for name in imports_of(script)],
        folder=folder.resolve(),
        keep_traces=bool(set(HARDWARE) & job.knobs.keys()),
    )


class Outcome(BaseModel):
    """The outcome of a trial. Figures are None if the job has none, because it did not fit or failed."""

    model_config = ConfigDict(frozen=True)

    status: Status
    how: Literal["emulated", "from a trace", "cached"] = "emulated"
    why: str = ""  # the reason, if it does not fit
    seconds: float = 0.0  # the duration of the trial
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    usd_per_hour: float | None = None
    usd_per_1k_steps: float | None = None
    usd_per_million_tokens: float | None = None
    mfu: float | None = None
    used_bytes: int | None = None  # on the fullest GPU, including memory outside the allocator
    capacity_bytes: int | None = None
    gpus: int = 0
    gpu: str = ""


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def outcome_of(prediction: Prediction, log: str = "") -> Outcome:
    fullest, cost = prediction.memory.fullest, prediction.cost
    status: Status = "fits"
    why = ""
    # This comes first: other ranks may wait for the one that ran out of memory, which is not a hang of the program.
    if prediction.memory.fits is False:
        status, why = "out of memory", _memory_words(prediction)
    elif prediction.hangs:
        status, why = "hangs", prediction.hangs[0]
    elif prediction.step_time_s is None or prediction.trace.ended == "failed":
        status, why = "failed", log or f"the program {prediction.trace.ended} before it completed a step"
    elif prediction.memory.fits is None and prediction.memory.depends_on:
        status, why = "not known", memory_in_words(prediction.memory)
    timed = status == "fits"
    return Outcome(
        status=status,
        why=why,
        step_time_s=prediction.step_time_s if timed else None,
        tokens_per_s=prediction.tokens_per_s if timed else None,
        samples_per_s=prediction.samples_per_s if timed else None,
        usd_per_hour=cost.usd_per_hour if cost else None,
        usd_per_1k_steps=cost.usd_per_1k_steps if cost and timed else None,
        usd_per_million_tokens=cost.usd_per_million_tokens if cost and timed else None,
        mfu=prediction.mfu if timed else None,
        used_bytes=fullest.peak_reserved_bytes + fullest.outside_allocator_bytes if fullest else None,
        capacity_bytes=fullest.capacity_bytes if fullest else None,
        gpus=prediction.world.size,
        gpu=prediction.cluster.gpu,
    )


def _memory_words(prediction: Prediction) -> str:
    fullest = prediction.memory.fullest
    return (
        f"{fullest.peak_source or 'the program'} requests more memory than a GPU has" if fullest else "it does not fit"
    )


def cached(task: Task) -> Outcome | None:
    """The outcome that an earlier trial, or an earlier search in the same folder, found for the same task."""
    found = predicted(task)
    return None if found is None else outcome_of(found).model_copy(update={"how": "cached"})


def predicted(task: Task) -> Prediction | None:
    """The prediction of a trial that has run in this folder and did not fail."""
    key = task.key
    if key is None:
        return None
    try:
        return Prediction.model_validate_json(_answer(task, key).read_bytes())
    except (OSError, ValidationError):
        return None


def run_task(task: Task) -> Outcome:
    """Finds the outcome in the fastest way: from a stored prediction, from a recorded trace, or by emulation."""
    use_hardware_file(task.request.hardware)
    if (known := cached(task)) is not None:
        return known
    started = time.monotonic()
    outcome = _from_trace(task) or _emulated(task)
    return outcome.model_copy(update={"seconds": round(time.monotonic() - started, 3)})


# ---- how an outcome is found ----


def _from_trace(task: Task) -> Outcome | None:
    """Predicts the outcome from the program's trace on another GPU or network.

    None if there is no trace, or if it is uncertain whether memory fits: the allocator would behave differently, and only an
    emulation can show how.
    """
    program = task.trace_key
    if program is None or not (folder := _traces(task, program)).joinpath("job.json").exists():
        return None
    prediction = pipeline.predict(read_run(folder), task.request, task.machine)
    if prediction.memory.fits is None:
        return None
    _keep(task, prediction)
    return outcome_of(prediction).model_copy(update={"how": "from a trace"})


def _emulated(task: Task, forked: bool = True, also_read: frozenset[str] = frozenset()) -> Outcome:
    from maya_core.launch.fork_server import NOT_HERE
    from maya_core.launch.ranks import RankSetting
    from maya_core.launch.run import plan_run, split_command

    machine = task.machine
    words = split_command(list(task.program.words))
    environment = dict(task.program.environment)
    with tempfile.TemporaryDirectory(prefix="maya-trial-") as place:
        log = Path(place) / LOG
        size = (None, None) if _has_world(words) else (machine.nodes, machine.gpus_per_node)
        request = task.request.model_copy(update={"nodes": size[0], "gpus_per_node": size[1]})
        with log.open("wb") as file:
            server = _fork_server(task, environment) if forked else None
            done = plan_run(words, request).run(Path(place) / TRACE, RankSetting(environment, (file, file), server))
        ranks = done.job.ranks.values() if done.job is not None else ()
        read = also_read.union(*(trace.meta["files"] for trace in ranks))
        if forked and done.exit_code == NOT_HERE:
            # The program cannot run in a fork. The files that the fork read are kept: a process of its own is only observed from
            # `import torch` on.
            return _emulated(task, forked=False, also_read=read)
        tail = _tail(log)
        if done.job is None:
            return Outcome(status="failed", why=tail or f"the command ended with exit code {done.exit_code}")
        if done.job.world_size != machine.gpus:
            raise MayaError(
                f"the command starts {done.job.world_size} ranks, but the recipe's cluster has {machine.gpus} GPUs.",
                "Use {nodes} and {gpus_per_node} in the command.",
            )
        prediction = pipeline.predict(done.job, task.request, machine)
        _write(_list(task), json.dumps(sorted(read)).encode())
        program = task.trace_key
        if task.keep_traces and prediction.memory.fits and program is not None:
            _move(Path(place) / TRACE, _traces(task, program))
        outcome = outcome_of(prediction, tail)
        if done.exit_code and outcome.status == "fits":
            return Outcome(status="failed", why=tail or f"the command ended with exit code {done.exit_code}")
        if outcome.status != "failed":  # a failure may be caused by this machine
            _keep(task, prediction)
        return outcome


def _has_world(words: list[str]) -> bool:
    """Whether the command itself sets the number of ranks."""
    from maya_core.launch import launchers, torchrun

    return torchrun.parse(words) is not None or launchers.launcher_in(words) is not None


# ---- what a worker keeps between trials ----

_fork_servers: dict[str, ForkServer] = {}


def _fork_server(task: Task, environment: dict[str, str]) -> ForkServer:
    """The fork server for this task. The most recent ones are kept."""
    gpus = task.program.gpus_per_node
    key = _digest([task.request.gpu_name, gpus, environment, task.modules])
    if key not in _fork_servers:
        while len(_fork_servers) >= MOST_FORK_SERVERS:
            _fork_servers.pop(next(iter(_fork_servers))).close()
        _fork_servers[key] = ForkServer(
            task.modules or ["torch"], request=task.request, gpus=gpus, environment=environment
        )
    return _fork_servers[key]


def close_worker() -> None:
    """Stops the fork servers of this worker."""
    while _fork_servers:
        _, server = _fork_servers.popitem()
        server.close()


def _list(task: Task) -> Path:
    return task.folder / "programs" / f"{task.program_key}.json"


def _answer(task: Task, key: str) -> Path:
    return task.folder / "predictions" / f"{key}.prediction.json"


def _traces(task: Task, program: str) -> Path:
    return task.folder / "traces" / program


def _keep(task: Task, prediction: Prediction) -> None:
    key = task.key
    if key is not None:
        _write(_answer(task, key), prediction.model_dump_json().encode())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


def _move(source: Path, target: Path) -> None:
    """Moves a folder. If another worker was faster, its trace is kept: it is the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.copytree(source, part, dirs_exist_ok=True)
    try:
        os.rename(part, target)
    except OSError:
        shutil.rmtree(part)


def _tail(log: Path) -> str:
    """The last lines of a program's output, which usually show what went wrong."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    begins = [place for place, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins and len(lines) - begins[-1] > LAST_LINES:  # the first lines of a traceback are the program's own code
        return "\n".join([*lines[begins[-1] : begins[-1] + LAST_LINES // 2], "  ...", *lines[-LAST_LINES // 2 :]])
    return "\n".join(lines[-LAST_LINES:])
