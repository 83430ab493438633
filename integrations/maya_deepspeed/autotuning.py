"""Supports `deepspeed --autotuning tune|run` under `maya run`. DeepSpeed's own tuner runs, and its experiments are emulated one after
another. Each is a job with its own traces and prediction; the tuner reads the predicted metric from the file in which it expects the
measured one. An experiment that runs out of memory fails as it would on the GPU, and no other machine is used. In the end `maya run`
reports the best experiment or, with `run`, the training with its configuration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

from maya_core import pipeline
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.integration import Patches, RankLauncher, RankProcess
from maya_core.launch.run import collect
from maya_core.messages import say
from maya_core.report.analysis import Analysis
from maya_core.report.framework_log import span_s
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import write_prediction
from maya_core.report.summary import summarize
from maya_core.request import Request
from maya_core.trace.job import PREDICTION, JobTrace
from maya_deepspeed.job import Hosts, run_job, world_of

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed")  # the second one is used by Hugging Face programs
MARK = "predicted-by-maya.json"
POLL_S = 0.05
TIMERS = ("fwd", "bwd", "step")
METRICS = ("throughput", "latency", "flops", "FLOPS_per_gpu", *TIMERS)


def tune(launcher: RankLauncher, runner: ModuleType, args: Namespace, hosts: Hosts) -> int:
    """Runs the tuner, and leaves the best job in the folder of the run. Returns the exit code."""
    launcher.link.idle(True)
    request = launcher.settings.request
    mark = mark_of(request, hosts)
    check(config_of(args.user_args), mark)
    experiments = Experiments(launcher, runner, args)
    patches = Patches()
    try:
        _emulate_experiments(patches, experiments, runner, request)
        tuner = _tuner(runner, args, hosts)
        for folder in (tuner.results_dir, tuner.exps_dir):
            Path(folder, MARK).write_text(mark)
        tuner.tune()
        tuner.print_tuning_results()
        tuner.write_optimal_config()
    finally:
        experiments.end()
        patches.undo()
    name, value = best_of(tuner)
    if not value:
        say(f"no experiment completed: see {tuner.results_dir}/*/stderr.log for the reasons")
        return 1
    say(f"the best experiment is {name}")
    best = experiments.best
    if best is not None and best.name != name:
        best = None  # the best one is from an earlier tuning that must not be overwritten
    if best is not None and args.autotuning == "tune":
        assert launcher.settings.folder is not None
        best.keep(launcher.settings.folder)
        return 0
    chosen = best.args if best is not None else runner.parse_args(tuner.optimal_cmd[1:])
    return run_job(launcher, runner, with_config(chosen, tuner.results_dir), hosts)


def best_of(tuner: Any) -> tuple[str, float]:
    """The name of the best experiment, and its metric; 0 if all failed."""
    records = tuner.get_best_space_records().values()
    best, value, *_ = max(records, key=lambda record: record[1], default=({"name": ""}, 0.0))
    return best["name"], value


def _emulate_experiments(patches: Patches, experiments: Experiments, runner: ModuleType, request: Request) -> None:
    autotuner = sys.modules[runner.Autotuner.__module__]
    scheduler = sys.modules[autotuner.ResourceManager.__module__]
    patches.set(scheduler, "subprocess", SimpleNamespace(Popen=experiments.start))
    patches.set(scheduler, "clean_up", lambda *_: None)  # it kills processes by name, over ssh
    patches.set(scheduler, "TIMEOUT", POLL_S)
    patches.set(autotuner, "has_mlflow", False)  # predictions must not be logged as measurements
    memory = find_gpu(request.gpu_name).memory_bytes
    patches.set(autotuner.Autotuner, "get_gpu_memory_info", lambda self: memory)


def _tuner(runner: ModuleType, args: Namespace, hosts: Hosts) -> Any:
    try:
        tuner = runner.Autotuner(args, hosts)
    except AssertionError as error:  # DeepSpeed's own message
        raise MayaError(f"deepspeed --autotuning: {error}", "Nothing was started.") from error
    if tuner.metric() == "latency":
        say('DeepSpeed considers the largest metric the best: with "metric": "latency" that is the slowest step')
    return tuner


@dataclass(frozen=True)
class Best:
    """The best experiment so far, and its traces."""

    name: str
    value: float
    args: Namespace
    traces: Path

    def keep(self, folder: Path) -> None:
        """Moves its traces to the folder of the run."""
        folder.mkdir(parents=True, exist_ok=True)
        for trace in self.traces.iterdir():
            shutil.move(trace, folder / trace.name)


class Experiments:
    """Replaces subprocess.Popen in the scheduler: emulates the command of an experiment in the scheduler's thread."""

    def __init__(self, launcher: RankLauncher, runner: ModuleType, args: Namespace) -> None:
        assert launcher.settings.coordinator is not None
        self.launcher = launcher
        self.runner = runner
        self.args = args
        self.best: Best | None = None
        self._private = launcher.settings.coordinator.parent
        self._one_at_a_time = threading.Lock()
        self._running: list[RankProcess] = []

    def start(self, command: list[str], stdout: IO[bytes], stderr: IO[bytes]) -> SimpleNamespace:
        with self._one_at_a_time:
            try:
                self._run(command, Path(stdout.name).parent, stdout, stderr)
            except MayaError as error:
                stderr.write(f"maya: Error: {error}\n".encode())  # DeepSpeed searches for the word 'Error'
        return SimpleNamespace(wait=lambda: 0)

    def end(self) -> None:
        """Kills running experiments, because an interrupted scheduler leaves its threads running."""
        for process in self._running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def _run(self, command: list[str], folder: Path, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        args = self.runner.parse_args(command[1:])
        for name in ("master_addr", "launcher", "module", "no_python", "no_local_rank", "force_multi"):
            setattr(args, name, getattr(self.args, name))  # the scheduler does not pass these on
        config = json.loads((folder / "ds_config.json").read_text())
        hosts = self.runner.parse_node_config_list(args.include)
        traces = Path(tempfile.mkdtemp(prefix="experiment-", dir=self._private))
        with self.launcher.separate_job(traces) as launcher:
            code = run_job(launcher, self.runner, args, hosts, (stdout, stderr), self._running.append)
        job = collect(traces, world_of(hosts), code)
        # A failed experiment reports its own error. The first experiment only profiles the model and writes its own result.
        if not code and job is not None and not config["autotuning"].get("model_info", {}).get("profile"):
            value = self._write_metrics(job, folder, config)
            if self.best is None or value > self.best.value:
                if self.best is not None:
                    shutil.rmtree(self.best.traces)
                self.best = Best(folder.name, value, args, traces)
                return
        shutil.rmtree(traces)

    def _write_metrics(self, job: JobTrace, folder: Path, config: dict[str, Any]) -> float:
        """Predicts the job, and writes the metrics to the file that the tuner reads. Returns the metric that it optimizes."""
        analysis, prediction = self._predict(job)
        write_prediction(folder / PREDICTION, prediction)
        if prediction.hangs or prediction.memory.fits is False or not prediction.step_time_s:
            reason = next(iter(prediction.hangs), "the job does not fit, or completed no step")
            raise MayaError(f"there is no metric: {reason}", f"See {folder / PREDICTION}.")
        metrics = metrics_of(analysis, prediction, config["train_batch_size"])
        Path(config["autotuning"]["metric_path"]).write_text(json.dumps(metrics) + "\n")
        return metrics[config["autotuning"].get("metric", "throughput")]

    def _predict(self, job: JobTrace) -> tuple[Analysis, Prediction]:
        request = self.launcher.settings.request
        analysis = pipeline.analyse(replace(job, node=request.node, network=request.network), request)
        return analysis, summarize(analysis)


def metrics_of(analysis: Analysis, prediction: Prediction, batch: int) -> dict[str, float]:
    """The metrics that DeepSpeedEngine._autotuning_exit writes, in its units: microseconds; forward, backward and step per micro-batch."""
    assert prediction.step_time_s is not None
    step_s = prediction.step_time_s
    flops = prediction.flops.model / prediction.world.size / step_s if prediction.flops else 0.0
    rank, trace = next(iter(analysis.job.ranks.items()))
    found: dict[str, float] = {}
    for entry in (trace.meta.get("log") or {}).values():
        if set(TIMERS) <= set(entry.get("names", ())):
            spans = dict(zip(entry["names"], entry["spans"], strict=True))
            for name in TIMERS:
                seconds = span_s(analysis, rank, spans[name])
                if seconds is not None:
                    found[name] = seconds * 1e6 / len(spans[name])
    return {
        **found,
        "latency": step_s * 1e6,
        "FLOPS_per_gpu": flops,
        "flops": flops,  # the metric's name in DeepSpeed's documentation
        "throughput": batch / step_s,
        "rank": 0,
    }


def config_of(user_args: list[str]) -> dict[str, Any]:
    """The program's configuration, found as the tuner finds it; {} if there is none, which the tuner reports itself."""
    for flag in CONFIG_FLAGS:
        if flag in user_args[:-1]:
            file = Path(user_args[user_args.index(flag) + 1])
            if file.suffix == ".json" and file.is_file():
                found = json.loads(file.read_text())
                return found if isinstance(found, dict) else {}
    return {}


def with_config(args: Namespace, results: str) -> Namespace:
    """The command of an experiment with the optimal configuration that the tuner wrote."""
    words = list(args.user_args)
    flag = next(flag for flag in CONFIG_FLAGS if flag in words)
    words[words.index(flag) + 1] = str(Path(results) / "ds_config_optimal.json")
    return Namespace(**{**vars(args), "user_args": words})


def mark_of(request: Request, hosts: Hosts) -> str:
    """The content of the file that marks results as predictions for a cluster."""
    cluster = {"gpu": request.gpu_name, "node": request.node, "network": request.network, "hosts": hosts}
    return json.dumps({"these are": "predictions; nothing was measured", **cluster}, indent=1) + "\n"


def check(config: dict[str, Any], mark: str) -> None:
    """Checks the folders of an earlier tuning, which the tuner removes or reuses: they may only contain predictions."""
    tuning = config.get("autotuning") or {}
    if (metric := tuning.get("metric", "throughput")) not in METRICS:
        raise MayaError(f'there is no metric "{metric}".', f"DeepSpeed's metrics are {', '.join(METRICS)}.")
    for name, usual in (("results_dir", "autotuning_results"), ("exps_dir", "autotuning_exps")):
        folder = Path(tuning.get(name, usual))
        if not folder.is_dir() or not any(folder.iterdir()):
            continue
        found = folder / MARK
        if not found.is_file():
            raise MayaError(
                f"{folder} contains results that Maya did not write: they may have been measured.",
                f'Move the folder, or give another "{name}" under "autotuning".',
            )
        if not tuning.get("overwrite", True) and found.read_text() != mark:
            raise MayaError(
                f'{folder} contains predictions for another cluster, and "overwrite" is false.',
                f'Move the folder, or give another "{name}" under "autotuning".',
            )
