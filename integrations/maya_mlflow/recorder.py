"""Records real trainings as actual runs, under the same keys as predicted ones.

    with maya_mlflow.record_actual():
        train()

It counts optimizer steps with torch's hooks, skips the first ones, and reads the clock after every few steps, when it waits for the
GPU. This is the only slowdown of a training. No exception of the recorder reaches the training.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import maya_core
from maya_core.calibrate.profiler_trace import gpu_by_driver_name
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.cluster import cluster
from maya_core.messages import say
from maya_core.recording.workload import WorkloadRecord
from maya_core.report.prediction import Workload
from maya_core.torch_seam.distributed import default_store
from maya_mlflow import draft as drafts
from maya_mlflow import keys
from maya_mlflow.context import FINGERPRINT_VARIABLE, PAIR_VARIABLE, checked_pair, emulated
from maya_mlflow.draft import Draft
from maya_mlflow.fingerprint import JobIdentity
from maya_mlflow.upload import Sent, configured, require_mlflow, upload_or_keep

WINDOW = 5  # steps between two readings of the clock; waiting for the GPU costs the overlap of two steps
BEFORE_TRAINING = -1  # DeepSpeed counts steps from 0
OTHERS_S = 10.0  # how long rank 0 waits for the memory figures of other ranks

_recordings = 0  # recordings of this process; ranks identify a recording by its number


class record_actual:
    """Records a training on real GPUs, from here to the end of the block, and logs it to MLflow as an actual run.

        with maya_mlflow.record_actual(experiment="llama"):
            train()

    `gpu` names the GPU if the driver's name is not in the catalog, or if this machine has none. The first `warm_up` steps are skipped,
    then `steps` are timed. Samples and tokens per step of the whole job are taken from the model's inputs if all ranks have their own
    data. The run is a new one, unless `run_id` names an existing one ('active': the active run of this process), which is then
    neither started nor ended.
    """

    def __init__(
        self,
        *,
        gpu: str | None = None,
        warm_up: int = 3,
        steps: int = 50,
        samples_per_step: float | None = None,
        tokens_per_step: float | None = None,
        price_per_gpu_hour: float | None = None,
        pair_id: str | None = None,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        run_id: str | None = None,
        name: str | None = None,
    ) -> None:
        require_mlflow()
        if warm_up < 1 or steps < 1:
            raise MayaError(f"warm_up={warm_up}, steps={steps}: both must be at least 1.", "Give positive numbers.")
        self._gpu = find_gpu(gpu).name if gpu is not None else None
        self._warm_up, self._limit = warm_up, steps
        self._given = {keys.SAMPLES: samples_per_step, keys.TOKENS: tokens_per_step}
        self._price = price_per_gpu_hour
        self._pair = checked_pair(pair_id or os.environ.get(PAIR_VARIABLE) or None)
        self._where = partial(configured, tracking_uri, experiment)
        self._run_id, self._name = run_id, name
        self.sent: Sent | None = None  # afterwards, if it was sent
        self.metrics: dict[str, float] = {}  # afterwards
        self._on = False

    # ---- the block ----

    def __enter__(self) -> record_actual:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.finish(error)

    def begin(self) -> None:
        """Begins recording, for programs that cannot use a `with` block."""
        global _recordings
        if self._on:
            return
        if emulated():
            say("under emulation no actual run is recorded")
            return
        _recordings += 1
        self._number = _recordings
        self._on, self._by_hand, self._was_emulated = True, False, False
        self._deepspeed_step = BEFORE_TRAINING
        self._started_ms = int(time.time() * 1000)
        self._workload = WorkloadRecord()
        self._restart()
        self._hook = register_optimizer_step_post_hook(self._after_optimizer)

    def _restart(self) -> None:
        self._lead: int | None = None
        self._done = 0  # steps
        self._readings: list[tuple[int, float]] = []  # (steps done, time) for each reading of the clock

    def step(self) -> None:
        """Counts a step, for programs whose steps cannot be recognized from torch's optimizers."""
        if self._on:
            if not self._by_hand:
                self._by_hand = True
                self._restart()
            self._count()

    def finish(self, error: BaseException | None = None) -> None:
        """Ends recording, and logs what was recorded, from rank 0. `error` is what ended the training, if something did."""
        if not self._on:
            return
        self._on = False
        self._hook.remove()
        self._workload.close()
        try:
            self._log(error)
        except Exception as failure:  # an error here must not destroy the result of the training
            say(f"the actual run was not recorded: {failure}")
            if not isinstance(failure, MayaError):
                traceback.print_exc()

    # ---- steps ----

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._lead = self._lead or id(optimizer)
        if id(optimizer) != self._lead or self._by_hand:
            return
        if (step := _step_of_deepspeed()) is not None:
            if step == self._deepspeed_step:
                return
            self._deepspeed_step = step
        self._count()

    def _count(self) -> None:
        if emulated():
            self._was_emulated = True
            return
        self._done += 1
        measured = self._done - self._warm_up
        if not 0 <= measured <= self._limit:
            return
        on_gpu = _on_gpu()
        if measured % (WINDOW if on_gpu else 1) == 0:
            if on_gpu:
                torch.cuda.synchronize()
            self._readings.append((self._done, time.perf_counter()))

    def step_times(self) -> list[float]:
        """The mean step time of each window."""
        windows = itertools.pairwise(self._readings)
        return [(end - begin) / (last - first) for (first, begin), (last, end) in windows]

    # ---- logging ----

    def _log(self, error: BaseException | None) -> None:
        if self._was_emulated:
            say("the actual run was not recorded, because some of its steps were emulated")
            return
        rank, world = _rank()
        peaks = _peaks_of_all(self._number, rank, world)
        if rank != 0:
            return
        times = self.step_times()
        if not times:
            needed = self._warm_up + (WINDOW if _on_gpu() else 1)
            say(
                f"the actual run was not recorded: it had {self._done} steps, but {needed} are needed, including {self._warm_up} for warm-up"
            )
            return
        job = self._job(world)
        self.metrics = self._metrics(statistics.median(times), times, job, peaks)
        draft = self._draft(job, error)
        folder = drafts.new_folder(draft)
        drafts.write(draft, folder)
        if isinstance(error, KeyboardInterrupt):
            say(f"interrupted: the recorded run is stored and can be sent with  maya mlflow upload {folder}")
            return
        self.sent = upload_or_keep(draft, folder)
        if self.sent is not None:
            say(f"the actual run is logged: {self.sent.address}")

    def _job(self, world: int) -> JobIdentity | None:
        found = self._workload.found()
        if found is None:
            return None
        job = JobIdentity(
            gpu=self._gpu_name(), world_size=world, gpus_per_node=_per_node(world), workload=Workload(**found)
        )
        expected = os.environ.get(FINGERPRINT_VARIABLE)
        if expected and expected != job.fingerprint:
            say(f"this run is not the one that was predicted ({expected}): `maya compare` shows how they differ")
        return job

    def _gpu_name(self) -> str:
        if self._gpu is not None:
            return self._gpu
        if not _on_gpu():
            return "cpu"
        driver = torch.cuda.get_device_name()
        found = gpu_by_driver_name(driver)
        return found.name if found is not None else driver

    def _metrics(
        self, step: float, times: list[float], job: JobIdentity | None, peaks: list[tuple[int, int]]
    ) -> dict[str, float]:
        world = job.world_size if job is not None else _rank()[1]
        work = self._per_step(world)
        found = {keys.STEP_TIME: step, keys.STEPS: float(self._readings[-1][0] - self._readings[0][0])}
        if len(times) > 3:
            first, _, third = statistics.quantiles(times, n=4)
            found[keys.SPREAD] = 100 * (third - first) / step
        found |= {name: amount / step for name, amount in work.items() if amount}
        if keys.TOKENS in found:
            found[keys.TOKENS_PER_GPU] = found[keys.TOKENS] / world
        if any(reserved for _, reserved in peaks):
            found[keys.PEAK_ALLOCATED] = max(allocated for allocated, _ in peaks) / keys.MB
            found[keys.PEAK_RESERVED] = max(reserved for _, reserved in peaks) / keys.MB
        if job is not None and (hourly := self._usd_per_hour(job)) is not None:
            found[keys.COST] = hourly * step / 3600 * 1000
        return found

    def _per_step(self, world: int) -> dict[str, float | None]:
        """Samples and tokens per step of the whole job: as given, or those of this rank times the number of ranks with their own data."""
        record, groups = self._workload, (self._workload.found() or {}).get("group_sizes", [])
        replicas = world if set(groups) <= {world} else None
        seen = {keys.SAMPLES: record.samples_per_step, keys.TOKENS: record.tokens_per_step}
        return {
            name: given if (given := self._given[name]) is not None else replicas and amount * replicas
            for name, amount in seen.items()
        }

    def _usd_per_hour(self, job: JobIdentity) -> float | None:
        try:
            nodes = -(-job.world_size // job.gpus_per_node)
            return cluster(job.gpu, job.gpus_per_node, nodes, price_per_gpu_hour=self._price).price_per_hour()
        except MayaError:  # a GPU or a node that is not in the catalog
            return self._price and self._price * job.world_size

    def _draft(self, job: JobIdentity | None, error: BaseException | None) -> Draft:
        device = torch.cuda.get_device_name() if _on_gpu() else f"cpu, {torch.get_num_threads()} threads"
        params = keys.job_params(job) | {
            "maya/device": device,
            "maya/torch": torch.__version__,
            "maya/python": platform.python_version(),
            "maya/version": maya_core.__version__,
        }
        for key, amount in self._per_step(_rank()[1]).items():
            if amount:
                params[key.replace("_per_s", "_per_step")] = f"{amount:g}"
        tags = keys.job_tags("actual", job, self._pair or "")
        if job is None and (expected := os.environ.get(FINGERPRINT_VARIABLE)):
            tags[keys.FINGERPRINT] = expected
        tags[keys.ENDED] = "completed" if error is None else "failed"
        run_id = _active_run() if self._run_id == "active" else self._run_id
        where = self._where()
        name = self._name or f"actual {job.world_size} x {job.gpu}" if job is not None else self._name or "actual"
        return Draft(
            kind="actual",
            name=name,
            run_id=run_id,
            started_ms=self._started_ms,
            status="FINISHED" if error is None else "FAILED",
            metrics=self.metrics,
            params=params,
            tags=tags,
            tracking_uri=where.tracking_uri,
            experiment=where.experiment,
            experiment_id=where.experiment_id,
        )


def _step_of_deepspeed() -> int | None:
    """The number of the step whose optimizer DeepSpeed is stepping; None if it is not DeepSpeed that steps it.

    DeepSpeed steps an optimizer part by part, and once before the training to create its state.
    """
    frame: FrameType | None = sys._getframe() if "deepspeed.runtime.engine" in sys.modules else None
    found = None
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("deepspeed.runtime"):
            found = BEFORE_TRAINING
            if frame.f_code.co_name == "_take_model_step":
                return int(frame.f_locals["self"].global_steps)
        frame = frame.f_back
    return found


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _per_node(world: int) -> int:
    return min(world, int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, torch.cuda.device_count()))


def _peaks_of_all(number: int, rank: int, world: int) -> list[tuple[int, int]]:
    """The peak memory (allocated, reserved) of every rank's GPU, on rank 0. It uses the store of the job instead of a collective, so
    that it also works without ranks that have ended."""
    mine = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if _on_gpu() else (0, 0)
    if world == 1 or not dist.is_initialized():
        return [mine]
    store = default_store()
    name = f"maya/actual/{number}/{{}}"
    if rank != 0:
        store.set(name.format(rank), json.dumps(mine))
        return [mine]
    try:
        store.wait([name.format(other) for other in range(1, world)], timedelta(seconds=OTHERS_S))
        return [mine, *(tuple(json.loads(store.get(name.format(other)))) for other in range(1, world))]
    except Exception as error:  # a store can raise many kinds of errors
        say(
            f"peak memory is that of rank 0 only, because the other ranks did not report theirs ({type(error).__name__})"
        )
        return [mine]


def _active_run() -> str:
    mlflow: Any = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None else None
    if run is None:
        raise MayaError(
            "run_id='active' was given, but no MLflow run is active.", "Start a run first, or remove run_id."
        )
    return str(run.info.run_id)
