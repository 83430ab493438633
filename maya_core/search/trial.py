"""One trial: a program emulated, its trace priced for a cluster, and what came of it. Runs in a worker that lives on and keeps what the
next trial can use: a process with everything imported, traces of programs, predictions that were made before."""

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

import maya_core
from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, use_hardware_file
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.calibration import load_calibration, shipped_digest
from maya_core.recording.files_read import installed, stamp
from maya_core.report.prediction import Prediction
from maya_core.search.recipe import HARDWARE, CheckedRecipe, ClusterSpec, Point, Program

LOG = "output.log"
TRACE = "trace"
LAST_LINES = 12
MOST_FORK_SERVERS = 2  # processes with a program's modules imported, each some hundred MB

Status = Literal["fits", "out of memory", "failed", "hangs", "slower"]  # slower: than another that fits, surely


class Task(BaseModel):
    """What a worker is told of a trial."""

    model_config = ConfigDict(frozen=True)

    program: Program
    cluster: ClusterSpec
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    attention: str
    profile: str | None = None  # the user's calibration by name; None for the newest
    hardware: Path | None = None  # the user's own hardware file
    modules: list[str] | None = None  # to have imported
    folder: Path  # where programs and their predictions are kept
    keep_traces: bool = False  # because other hardware may be asked for

    @property
    def gpu(self) -> str:
        return self.cluster.board or DEFAULT_GPU

    @property
    def program_key(self) -> str:
        """Equal for programs that are the same by what is told before they run: the command, where, the files it names, and what runs it."""
        named = {part for word in self.program.words for part in (word, word.rpartition("=")[2])}
        files = {word: stamp(word) for word in named if ("/" in word or "." in word) and Path(word).is_file()}
        runs_it = [installed(), maya_core.__version__, sys.version]
        return _digest([self.program.model_dump(), os.getcwd(), files, runs_it])

    @property
    def files(self) -> dict[str, str] | None:
        """The files of the user's that the program read when it was run last, as they are now; None if it was not run in this folder."""
        try:
            return {path: stamp(path) for path in json.loads(_list(self).read_text())}
        except (OSError, ValueError):
            return None

    @property
    def trace_key(self) -> str | None:
        """Equal for programs that leave equal traces; None for one that was not run."""
        files = self.files
        return None if files is None else _digest([self.program_key, files])

    @property
    def pricing(self) -> str:
        """Equal where the same is predicted of a trace: by hardware, prices and calibration, whatever they are called."""
        machine, own = _cluster(self), load_calibration(self.gpu, self.profile)
        quotes = [quote.model_dump(mode="json") for quote in machine.quotes()]
        return _digest(
            [machine.model_dump(mode="json"), quotes, shipped_digest(), own.model_dump_json() if own else ""]
        )

    @property
    def key(self) -> str | None:
        """Equal for equal predictions."""
        told = self.model_dump(include={"samples_per_step", "tokens_per_step", "attention"})
        program = self.trace_key
        return program and _digest([program, told, self.pricing])


def task_of(
    job: CheckedRecipe, point: Point, folder: Path, *, profile: str | None = None, hardware: Path | None = None
) -> Task:
    """What is asked of a recipe's configuration. Its answers are kept in the folder."""
    from maya_core.launch.fork_server import imports_of

    program = job.program(point)
    scripts = [Path(word) for word in program.words if word.endswith(".py")]
    modules = job.recipe.preload
    return Task(
        program=program,
        cluster=job.cluster_of(point),
        attention=job.recipe.attention,
        profile=profile,
        hardware=hardware.resolve() if hardware else None,
        modules=modules if modules is not None else [name for script in scripts[:1] for name in imports_of(script)],
        folder=folder.resolve(),
        keep_traces=bool(set(HARDWARE) & job.knobs.keys()),
        **job.per_step(point),
    )


class Outcome(BaseModel):
    """What a trial found. Figures are None where the job has none: it did not fit, or failed."""

    model_config = ConfigDict(frozen=True)

    status: Status
    how: Literal["emulated", "from a trace", "cached"] = "emulated"
    why: str = ""  # in words, where it is not a fit
    seconds: float = 0.0  # that it took
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    usd_per_hour: float | None = None
    usd_per_1k_steps: float | None = None
    usd_per_million_tokens: float | None = None
    mfu: float | None = None
    used_bytes: int | None = None  # of the fullest GPU, with what is outside the allocator
    capacity_bytes: int | None = None
    gpus: int = 0
    gpu: str = ""


def _digest(told: object) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


def outcome_of(prediction: Prediction, log: str = "") -> Outcome:
    fullest, cost = prediction.memory.fullest, prediction.cost
    status: Status = "fits"
    why = ""
    if (
        prediction.memory.fits is False
    ):  # others may wait for the rank that failed for it: that is no hang of the program's
        status, why = "out of memory", _memory_words(prediction)
    elif prediction.hangs:
        status, why = "hangs", prediction.hangs[0]
    elif prediction.step_time_s is None or prediction.trace.ended == "failed":
        status, why = "failed", log or f"the program {prediction.trace.ended} before a step was over"
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
    return f"{fullest.peak_source or 'it'} asks for more than a GPU has" if fullest else "it does not fit"


def cached(task: Task) -> Outcome | None:
    """What an earlier trial, or an earlier search in the same folder, found for the very same question."""
    found = predicted(task)
    return None if found is None else outcome_of(found).model_copy(update={"how": "cached"})


def predicted(task: Task) -> Prediction | None:
    """The whole prediction of a trial that was run in this folder and did not fail."""
    key = task.key
    if key is None:
        return None
    try:
        return Prediction.model_validate_json(_answer(task, key).read_bytes())
    except (OSError, ValidationError):
        return None


def run_task(task: Task) -> Outcome:
    """The outcome, by the shortest way: said before, priced from a trace that is there, or emulated."""
    use_hardware_file(task.hardware)
    if (known := cached(task)) is not None:
        return known
    started = time.monotonic()
    machine = _cluster(task)
    outcome = _from_trace(task, machine) or _emulated(task, machine)
    return outcome.model_copy(update={"seconds": round(time.monotonic() - started, 3)})


# ---- ways to an outcome ----


def _from_trace(task: Task, machine: Cluster) -> Outcome | None:
    """The program has been run for another GPU or network: what it did is priced anew. Not if its memory might or might not fit
    there: the allocator would do other things, and only an emulation tells."""
    from maya_core.trace.job import read_job

    program = task.trace_key
    if program is None or not (folder := _traces(task, program)).joinpath("job.json").exists():
        return None
    prediction = _predict(task, read_job(folder), machine)
    if prediction.memory.fits is None:
        return None
    _keep(task, prediction)
    return outcome_of(prediction).model_copy(update={"how": "from a trace"})


def _emulated(task: Task, machine: Cluster, forked: bool = True, also_read: frozenset[str] = frozenset()) -> Outcome:
    from maya_core.launch.fork_server import NOT_HERE
    from maya_core.launch.ranks import RankSetting
    from maya_core.launch.run import run_command, split_command

    words = split_command(list(task.program.words))
    own = dict(task.program.environment)
    spec = task.cluster
    with tempfile.TemporaryDirectory(prefix="maya-trial-") as place:
        log = Path(place) / LOG
        with log.open("wb") as file:
            within = RankSetting(own, (file, file), _fork_server(task, own) if forked else None)
            told = (
                {"nodes": None, "gpus": None}
                if _has_world(words)
                else {"nodes": spec.nodes, "gpus": machine.gpus_per_node}
            )
            done = run_command(
                words,
                gpu=task.gpu,
                steps=task.program.steps,
                ranks=(),
                out=Path(place) / TRACE,
                node=spec.node,
                network=spec.network,
                attention=task.attention,
                within=within,
                **told,
            )
        ranks = done.job.ranks.values() if done.job is not None else ()
        read = also_read.union(*(trace.meta["files"] for trace in ranks))
        if forked and done.exit_code == NOT_HERE:
            # A process of its own is heard from `import torch` on, this fork was from its first line.
            return _emulated(task, machine, forked=False, also_read=read)
        tail = _tail(log)
        if done.job is None:
            return Outcome(status="failed", why=tail or f"the command ended with exit code {done.exit_code}")
        if done.job.world_size != machine.gpus:
            raise MayaError(
                f"the command starts {done.job.world_size} ranks, and the recipe's cluster has {machine.gpus} GPUs.",
                "Use {nodes} and {gpus_per_node} in the command.",
            )
        prediction = _predict(task, done.job, machine)
        _write(_list(task), json.dumps(sorted(read)).encode())
        program = task.trace_key
        if task.keep_traces and prediction.memory.fits and program is not None:
            _move(Path(place) / TRACE, _traces(task, program))
        outcome = outcome_of(prediction, tail)
        if done.exit_code and outcome.status == "fits":
            return Outcome(status="failed", why=tail or f"the command ended with exit code {done.exit_code}")
        if outcome.status != "failed":  # which may be this machine's fault
            _keep(task, prediction)
        return outcome


def _has_world(words: list[str]) -> bool:
    """Does the command itself say how many ranks there are?"""
    from maya_core.launch import torchrun
    from maya_core.launch.run import launcher_in

    return torchrun.parse(words) is not None or launcher_in(words) is not None


def _predict(task: Task, job: object, machine: Cluster) -> Prediction:
    from maya_core.report.analysis import Options
    from maya_core.report.summary import predict
    from maya_core.trace.job import JobTrace

    assert isinstance(job, JobTrace)
    options = Options(
        attention=task.attention, samples_per_step=task.samples_per_step, tokens_per_step=task.tokens_per_step
    )
    return predict(job, machine, options.calibrated(machine.gpu, task.profile))


def _cluster(task: Task) -> Cluster:
    spec = task.cluster
    return cluster(
        spec.gpu if spec.gpu or spec.node else DEFAULT_GPU,
        task.program.gpus_per_node,
        task.program.nodes,
        node=spec.node,
        network=spec.network,
        price_per_gpu_hour=spec.price_per_gpu_hour,
    )


# ---- what a worker keeps ----

_fork_servers: dict[str, object] = {}


def _fork_server(task: Task, environment: dict[str, str]):  # type: ignore[no-untyped-def]
    """The process to fork ranks from; of several kinds the last few are kept."""
    from maya_core.launch.fork_server import ForkServer

    key = _digest([task.gpu, task.program.gpus_per_node, environment, task.modules])
    if key not in _fork_servers:
        while len(_fork_servers) >= MOST_FORK_SERVERS:
            oldest = _fork_servers.pop(next(iter(_fork_servers)))
            assert isinstance(oldest, ForkServer)
            oldest.close()
        _fork_servers[key] = ForkServer(
            task.modules or ["torch"], gpu=task.gpu, gpus=task.program.gpus_per_node, environment=environment
        )
    return _fork_servers[key]


def close_worker() -> None:
    """Ends what the worker keeps running."""
    while _fork_servers:
        _, fork_server = _fork_servers.popitem()
        fork_server.close()  # type: ignore[attr-defined]


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
    """Another worker may have been there first: then its trace is as good."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    shutil.copytree(source, part, dirs_exist_ok=True)
    try:
        os.rename(part, target)
    except OSError:
        shutil.rmtree(part)


def _tail(log: Path) -> str:
    """The last words of a program, where something went wrong."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    begins = [place for place, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins and len(lines) - begins[-1] > LAST_LINES:  # where it begins is the program's own
        return "\n".join([*lines[begins[-1] : begins[-1] + LAST_LINES // 2], "  ...", *lines[-LAST_LINES // 2 :]])
    return "\n".join(lines[-LAST_LINES:])
