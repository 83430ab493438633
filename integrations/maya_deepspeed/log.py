"""Fills predicted times into DeepSpeed's log. While the program runs, lines with times are suppressed, because the times would be those
of this machine. After the run each line is printed once, as it was last written, with predicted times
(maya_core/report/framework_log.py). DeepSpeed's timers are pairs of CUDA events, which are recorded; their time is the time between
the events on the emulated GPU. A program that reads a timer itself gets NaN. What timers do on the device (events, synchronization)
still happens and is counted."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from maya_core.integration import Integration
from maya_core.messages import say

UNKNOWN = float("nan")
GLOBAL_TIMERS = ("fwd", "bwd", "step")
SAMPLES_PER_S = re.compile(r"(RunningAvgSamplesPerSec|CurrSamplesPerSec)=[^,]*")
ITERATION = re.compile(r"iter time \(s\): \S+ samples/sec: \S+")
PER_MODULE = "-" * 29 + " Aggregated Profile per GPU"


def install(integration: Integration) -> None:
    parts = {
        "deepspeed.utils.timer": _timers,
        "deepspeed.runtime.pipe.engine": _pipeline,
        "deepspeed.runtime.engine": _engine,
        "deepspeed.profiling.flops_profiler.profiler": _profiler,
    }
    for module, part in parts.items():
        integration.patches.when_imported(module, functools.partial(part, integration))


def _timers(integration: Integration, module: ModuleType) -> None:
    patches = integration.patches
    events, timers, throughput = module.CudaEventTimer, module.SynchronizedWallClockTimer, module.ThroughputTimer
    elapsed, start, stop = events.get_elapsed_msec, timers.Timer.start, timers.Timer.stop
    read = timers.Timer.elapsed

    @functools.wraps(elapsed)
    def get_elapsed_msec(self: Any) -> float:
        elapsed(self)
        return UNKNOWN

    @functools.wraps(start)
    def noted_start(self: Any) -> None:
        start(self)
        self.start_event.place = integration.event_count() - 1

    @functools.wraps(stop)
    def noted_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        stop(self, *args, **kwargs)
        self.event_timers[-1].end_event.place = integration.event_count() - 1

    @functools.wraps(read)
    def read_only(self: Any, reset: bool = True) -> Any:
        """Before DeepSpeed 0.18.9, reading a timer resets it, so that after its monitors and its profiler the log would show zeros."""
        pairs = list(self.event_timers)
        value = read(self, reset)
        if not reset and not self.event_timers:
            self.event_timers.extend(pairs)
        return value

    def log(self: Any, names: Iterable[str], normalizer: float = 1.0, reset: bool = True, *_: Any, **__: Any) -> None:
        known = [name for name in (sorted(names) if isinstance(names, set) else names) if name in self.timers]
        if known and _is_rank_0():
            places = "".join(f" | {name}: {{ms[{i}]:.2f}}" for i, name in enumerate(known))
            integration.log[f"timers {' '.join(known)}"] = {
                "text": f"time (ms){places}",
                "spans": [pairs_of(self.timers[name]) for name in known],
                "names": known,
                "over": normalizer,
            }
        for name in known:
            self.timers[name].elapsed(reset=reset)

    patches.set(events, "get_elapsed_msec", get_elapsed_msec)
    patches.set(timers.Timer, "start", noted_start)
    patches.set(timers.Timer, "stop", noted_stop)
    patches.set(timers.Timer, "elapsed", read_only)
    patches.set(timers, "log", log)
    _throughput(integration, throughput)


def pairs_of(timer: Any) -> list[tuple[int, int]]:
    """The places of a timer's events in the record, one pair for each time that it ran since it was reset."""
    return [(one.start_event.place, one.end_event.place) for one in timer.event_timers]


def _throughput(integration: Integration, timer: Any) -> None:
    """Makes the throughput timer synchronize in every step. Normally it skips the first two, so the few emulated steps would differ."""
    patches = integration.patches
    made, stop = timer.__init__, timer.stop

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.start_step = 0

    @functools.wraps(stop)
    def noted_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        written: list[str] = []
        logging, self.logging = self.logging, written.append
        try:
            stop(self, *args, **kwargs)
        finally:
            self.logging = logging
        for line in written:
            if SAMPLES_PER_S.search(line):
                integration.log["throughput"] = {
                    "text": SAMPLES_PER_S.sub(r"\1={rates[0]:.4f}", _plain(line)),
                    "work": [self.batch_size * 1e3],
                }

    patches.set(timer, "__init__", __init__)
    patches.set(timer, "stop", noted_stop)
    patches.set(timer, "_is_report_boundary", lambda self: self.steps_per_output is not None)
    patches.set(timer, "avg_samples_per_sec", lambda self: UNKNOWN)


def _pipeline(integration: Integration, module: ModuleType) -> None:
    """Suppresses and records the line of the pipeline engine. It contains the loss, so it is taken where DeepSpeed prints it."""
    patches, engine = integration.patches, module.PipelineEngine
    original = engine.train_batch
    written: list[str] = []

    def hold_back(*words: Any, **kwargs: Any) -> None:
        line = " ".join(map(str, words))
        if ITERATION.search(line):
            written.append(line)
        else:
            print(*words, **kwargs)

    @functools.wraps(original)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        written.clear()
        loss = original(self, *args, **kwargs)
        if self.global_rank == 0 and self.steps_per_print() is not None:
            line = written[-1] if written else f"steps: {self.global_steps} iter time (s): 0 samples/sec: 0"
            places = "iter time (s): {step_s:0.3f} samples/sec: {rates[0]:0.3f}"
            integration.log["iteration"] = {
                "text": ITERATION.sub(places, _plain(line)),
                "work": [self.train_batch_size() * 1e3],
            }
        return loss

    patches.set(engine, "train_batch", train_batch)
    patches.add(module, "print", hold_back)  # the builtin, in this module


def _engine(integration: Integration, module: ModuleType) -> None:
    patches, engine = integration.patches, module.DeepSpeedEngine
    step = engine.flops_profiler_profile_step

    @functools.wraps(step)
    def flops_profiler_profile_step(self: Any) -> int:
        """Never profile for the autotuner, because the prediction counts FLOPs."""
        return -1 if self.autotuning_enabled() else int(step(self))

    def _autotuning_exit(self: Any) -> None:
        """Ends the experiment without writing its metric, which autotuning.py predicts."""
        sys.exit()

    patches.set(engine, "flops_profiler_profile_step", flops_profiler_profile_step)
    patches.set(engine, "_autotuning_exit", _autotuning_exit)
    # Layers of a mixture of experts keep only the sums of their timers, not the events.
    patches.set(engine, "print_forward_breakdown", lambda self, fwd_time: None)


def _profiler(integration: Integration, module: ModuleType) -> None:
    patches, profiler = integration.patches, module.FlopsProfiler
    made, original = profiler.__init__, profiler.print_model_profile

    @functools.wraps(made)
    def __init__(self: Any, model: Any, ds_engine: Any = None, *args: Any, **kwargs: Any) -> None:
        made(self, model, ds_engine, *args, **kwargs)
        limit = integration.request.steps
        if ds_engine is None or ds_engine.autotuning_enabled() or limit is None or not _is_rank_0():
            return
        if (step := ds_engine.flops_profiler_profile_step()) + 2 > limit:
            say(
                f"the flops profiler's profile_step {step} is not among the {limit} emulated steps: use --steps {step + 2}"
            )

    @functools.wraps(original)
    def print_model_profile(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.started:
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed, _with_breakdown(self.ds_engine):
            original(self, *args, **{**kwargs, "detailed": False, "output_file": None})
        summary = printed.getvalue().partition(PER_MODULE)[0].strip("\n")
        integration.log["flops profiler"] = profile_to_fill_in(
            summary,
            self.get_total_flops(),
            self.recompute_fwd_factor,
            self.ds_engine,
        )

    def get_total_duration(self: Any, as_string: bool = False) -> float | str:
        return str(UNKNOWN) if as_string else UNKNOWN

    patches.set(profiler, "__init__", __init__)
    patches.set(profiler, "print_model_profile", print_model_profile)
    patches.set(profiler, "print_model_aggregated_profile", lambda self, *args, **kwargs: None)
    patches.set(profiler, "get_total_duration", get_total_duration)
    # To time each module, the profiler waits for the GPU. These times are not reported, and the step must be like the others.
    patches.set(module, "get_accelerator", lambda: SimpleNamespace(synchronize=lambda: None))


@contextlib.contextmanager
def _with_breakdown(engine: Any) -> Any:
    """Enables wall_clock_breakdown. Backward and step are only reported with it, although they are timed without it."""
    if engine is None:
        yield
        return
    engine.wall_clock_breakdown = lambda: True
    try:
        yield
    finally:
        del engine.wall_clock_breakdown


def profile_to_fill_in(summary: str, flops: float, recompute: float, engine: Any) -> dict[str, Any]:
    """The profiler's summary with places for predicted values of the last micro-batch. Without an engine nothing was timed."""
    whole = 3 + recompute
    each = flops * 1e3  # rates are per millisecond
    values = {
        "fwd latency: ": "{seconds[0]:si}s",
        "fwd FLOPS per GPU = ": "{rates[0]:si}FLOPS",
        "bwd latency: ": "{seconds[1]:si}s",
        "bwd FLOPS per GPU = ": "{rates[1]:si}FLOPS",
        "fwd+bwd FLOPS per GPU = ": "{rates[2]:si}FLOPS",
        "step latency: ": "{seconds[2]:si}s",
        "iter latency: ": "{seconds[3]:si}s",
        "FLOPS per GPU = ": "{rates[3]:si}FLOPS",
        "samples/second: ": "{rates[4]:.2f}",
    }
    lines = []
    for line in summary.splitlines():
        label = next((label for label in values if line.startswith(label)), None)
        if label is None:
            lines.append(_plain(line))
        elif engine is not None:
            lines.append(f"{_plain(line[: line.rindex(': ') + 1]):<70}  {values[label]}")
    if engine is None:
        return {"text": "\n".join(lines)}
    lines.append("(predicted; latencies of single modules are not included)")
    last = [pairs_of(engine.timers(name))[-1:] for name in GLOBAL_TIMERS]
    samples = engine.train_micro_batch_size_per_gpu() * engine.world_size
    return {
        "text": "\n".join(lines),
        "spans": [*last, [pair for pairs in last for pair in pairs]],
        "work": [
            (each, [0]),
            (each * (whole - 1), [1]),
            (each * whole, [0, 1]),
            (each * whole, [3]),
            (samples * 1e3, [3]),
        ],
    }


def _plain(line: str) -> str:
    """Escapes braces, so that nothing is filled in there."""
    return line.replace("{", "{{").replace("}", "}}")


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
