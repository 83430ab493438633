"""Fits factors for compute, memory traffic, network and host to actual runs, as far as the runs support them.

A step time is not the sum of its parts: kernels hide the host, and communication hides behind kernels. The step of each run is
therefore simulated again from its trace with factors on its parts, and the fit finds the factors that reproduce the real step
times. Which factors are free depends on how well each run is predicted from the others. Traces are priced without the factors of
earlier fits, so a fit never builds on another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from maya_core.errors import MayaError
from maya_core.hardware.cluster import Cluster
from maya_core.predictor.calibration import CLASSES, Calibration, RunFactors, shipped_digest
from maya_core.predictor.pricing import Predictor, TraceDurations, durations_of
from maya_core.report.analysis import Analysis
from maya_core.request import PredictionOptions
from maya_core.simulator.simulate import simulate
from maya_core.trace.job import JobTrace

FEWEST = 3  # distinct jobs for one factor; each further factor needs PER_FACTOR more
PER_FACTOR = 2
FELT = 0.05  # a run is sensitive to a factor if 1 % of the factor changes its step by 0.05 %,
FELT_BY = 2  # and this many runs must be: a single one could not be checked by the others
WORTH_IT = (
    0.9  # the share of the error that may remain, each run predicted from the others; otherwise there is no calibration
)
SIMPLER = 0.95  # a further factor must reduce the error to at most this share
STEP = 0.05  # of the logarithm, for numerical slopes
PULL = 1e-4  # pulls factors towards each other if no runs distinguish them
ROBUST = 0.1  # of the logarithm: runs with larger errors have less weight
ROUNDS = 12
FARTHEST = np.log(1e5)

# Which classes share a factor; the factor of the others is 1. The simplest come first.
Grouping = tuple[tuple[str, ...], ...]
GROUPINGS: tuple[Grouping, ...] = (
    (("compute", "memory", "network", "host"),),
    (("compute", "memory"),),
    (("compute", "memory"), ("host",)),
    (("compute", "memory"), ("network",)),
    (("compute",), ("memory",)),
    (("compute", "memory"), ("network",), ("host",)),
    (("compute",), ("memory",), ("host",)),
    (("compute",), ("memory",), ("network",)),
    (("compute",), ("memory",), ("network",), ("host",)),
)


@dataclass
class FactorCase:
    """A recorded job, and its real step time."""

    name: str
    job: JobTrace
    cluster: Cluster
    options: PredictionOptions
    actual_s: float
    _parts: dict[int, tuple[TraceDurations, np.ndarray]] = field(default_factory=dict)
    _known: dict[tuple[float, ...], float] = field(default_factory=dict)

    def prepare(self, base: Calibration | None) -> None:
        """Prices the trace once, and determines which part of each time is memory traffic."""
        own = _without_runs(base, self.cluster)
        twice = own.model_copy(update={"runs": own.runs.model_copy(update={"memory": 2.0}) if own.runs else None})
        plain, doubled = (
            Predictor(self.cluster.gpu, attention=self.options.attention, calibration=each) for each in (own, twice)
        )
        for rank, trace in self.job.ranks.items():
            priced = durations_of(trace, self.cluster, plain)
            memory = durations_of(trace, self.cluster, doubled).ops.seconds - priced.ops.seconds
            self._parts[rank] = priced, memory

    def step_s(self, logs: np.ndarray) -> float:
        """The step time of the job with factors exp(logs) on its classes."""
        key = tuple(np.round(logs, 9).tolist())
        if key not in self._known:
            self._known[key] = self._simulated(*np.exp(logs))
        return self._known[key]

    def _simulated(self, compute: float, memory: float, network: float, host: float) -> float:
        durations = {}
        for rank, (priced, of_memory) in self._parts.items():
            ops = compute * (priced.ops.seconds - of_memory) + memory * of_memory
            durations[rank] = replace(
                priced,
                ops=replace(priced.ops, seconds=ops),
                collectives=replace(priced.collectives, seconds=priced.collectives.seconds * network),
            )
        timeline = simulate(self.job, durations, self.cluster, host=self.options.host, host_factor=host)
        step = Analysis(self.job, self.cluster, self.options, durations, timeline).step_time_s
        if not step:
            raise MayaError(f"the prediction of {self.name} has no step time.", "Remove its pair from the experiment.")
        return step


def _without_runs(base: Calibration | None, cluster: Cluster) -> Calibration:
    import datetime

    neutral = RunFactors(
        fitted=[], runs=1, experiment="", before_pct=0.0, after_pct=0.0, shipped="", network_name=cluster.network.name
    )
    if base is not None:
        return base.model_copy(update={"runs": neutral})
    return Calibration(
        name="none", gpu=cluster.gpu.name, created=datetime.datetime.now(datetime.timezone.utc), shipped=shipped_digest(),
        sources=[], runs=neutral,
    )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    grouping: Grouping
    logs: np.ndarray  # by class
    expected: float  # the error of each run predicted from the others: root mean square of the logarithm, estimated with slopes

    @property
    def free(self) -> list[str]:
        return ["+".join(group) for group in self.grouping]


def fit(cases: Sequence[FactorCase], experiment: str, base: Calibration | None = None) -> RunFactors:
    """The factors that these runs support; a MayaError with the reason if they support none."""
    if len(cases) < FEWEST:
        raise MayaError(
            f"{len(cases)} job{'s' * (len(cases) != 1)} with a prediction and an actual run: this is too few to distinguish a factor from chance.",
            f"Record actual runs of at least {FEWEST} different jobs (other sizes, batches or clusters); repeated runs of a job count once.",
        )
    for case in cases:
        case.prepare(base)
    networks = {case.cluster.network.name for case in cases}
    before = _percent(_residuals(cases, np.zeros(len(CLASSES))))
    best: Fit | None = None
    for grouping in _allowed(cases, one_network=len(networks) == 1):
        found = _fit(cases, grouping)
        if best is None or found.expected < SIMPLER * best.expected:
            best = found
    assert best is not None  # a common factor for all is always allowed
    after = _percent(_held_out_errors(cases, best))
    if after > WORTH_IT * before:
        raise MayaError(
            f"factors would not help: the median error of step time is {before:.1f} %, and {after:.1f} % with factors fitted to the other runs.",
            "The runs do not share a common error; `maya calibrate kineto` corrects single kernels.",
        )
    values = {name: float(f"{np.exp(log):.4g}") for name, log in zip(CLASSES, best.logs, strict=True)}
    return RunFactors(
        **values,
        network_name=networks.pop() if len(networks) == 1 else "",
        fitted=best.free,
        runs=len(cases),
        experiment=experiment,
        before_pct=round(before, 1),
        after_pct=round(after, 1),
        shipped=shipped_digest(),
    )


def _allowed(cases: Sequence[FactorCase], one_network: bool) -> list[Grouping]:
    """The groupings whose factors the runs support, both by their number and by their sensitivity.

    Sensitivity is measured after a common factor has been fitted to everything: work that is hidden on a much slower GPU could
    not be seen otherwise.
    """
    start = _fit(cases, GROUPINGS[0]).logs
    slopes = np.abs(_slopes(cases, start, tuple((name,) for name in CLASSES)))
    from_one = np.abs(_slopes(cases, np.zeros(len(CLASSES)), tuple((name,) for name in CLASSES)))
    by = np.sum(np.maximum(slopes, from_one) > FELT, axis=0)
    felt = dict(zip(CLASSES, (by >= FELT_BY).tolist(), strict=True))
    felt["network"] &= one_network
    found = []
    for grouping in GROUPINGS:
        enough = len(cases) >= FEWEST + PER_FACTOR * (len(grouping) - 1)
        if enough and all(any(felt[name] for name in group) for group in grouping):
            found.append(grouping)
    return found


def _residuals(cases: Sequence[FactorCase], logs: np.ndarray) -> np.ndarray:
    """The logarithm of predicted time divided by actual time."""
    return np.log([case.step_s(logs) / case.actual_s for case in cases])


def _percent(residuals: np.ndarray) -> float:
    return 100 * float(np.median(np.abs(np.expm1(residuals))))


def _spread(grouping: Grouping, values: np.ndarray) -> np.ndarray:
    """Values by class, from values by group."""
    logs = np.zeros(len(CLASSES))
    for group, value in zip(grouping, values, strict=True):
        logs[[CLASSES.index(name) for name in group]] = value
    return logs


def _slopes(cases: Sequence[FactorCase], logs: np.ndarray, grouping: Grouping) -> np.ndarray:
    """By run and group: the slope of log step time with respect to the log factor."""
    columns = []
    for place in range(len(grouping)):
        nudge = _spread(grouping, np.eye(len(grouping))[place] * STEP)
        columns.append((_residuals(cases, logs + nudge) - _residuals(cases, logs - nudge)) / (2 * STEP))
    return np.stack(columns, axis=1)


def _fit(cases: Sequence[FactorCase], grouping: Grouping, start: np.ndarray | None = None) -> Fit:
    """Damped Gauss-Newton on logarithms, with less weight on runs with large errors."""
    values = start
    if values is None:
        values = np.full(len(grouping), -float(np.median(_residuals(cases, np.zeros(len(CLASSES))))))
    damping = 1e-3
    residuals = _residuals(cases, _spread(grouping, values))
    for _ in range(ROUNDS):
        slopes = _slopes(cases, _spread(grouping, values), grouping)
        move = _solve(slopes, residuals, values, damping)
        tried = np.clip(values + move, -FARTHEST, FARTHEST)
        after = _residuals(cases, _spread(grouping, tried))
        if _loss(after, tried) < _loss(residuals, values):
            small = np.abs(tried - values).max() < 1e-4
            values, residuals, damping = tried, after, damping / 5
            if small:
                break
        elif damping > 1e3:
            break
        else:
            damping *= 10
    slopes = _slopes(cases, _spread(grouping, values), grouping)
    return Fit(grouping, _spread(grouping, values), _expected(slopes, residuals, values))


def _loss(residuals: np.ndarray, values: np.ndarray) -> float:
    """Quadratic for small residuals and linear for large ones, plus the pull of factors towards each other."""
    each = ROBUST**2 * (np.sqrt(1 + (residuals / ROBUST) ** 2) - 1)
    return float(each.sum() + PULL * len(residuals) * np.square(values - values.mean()).sum() / 2)


def _solve(slopes: np.ndarray, residuals: np.ndarray, values: np.ndarray, damping: float) -> np.ndarray:
    """The step of a Gauss-Newton iteration."""
    weights = 1 / np.sqrt(1 + (residuals / ROBUST) ** 2)
    groups = len(values)
    apart = PULL * len(residuals) * (np.eye(groups) - 1 / groups)
    square = slopes.T @ (weights[:, None] * slopes) + apart
    square += damping * max(1e-6, np.trace(square) / groups) * np.eye(groups)
    return np.asarray(np.linalg.solve(square, -(slopes.T @ (weights * residuals) + apart @ values)))


def _expected(slopes: np.ndarray, residuals: np.ndarray, values: np.ndarray) -> float:
    """The error of the runs, each predicted from the others, estimated with the slopes. Groupings are chosen by it."""
    each = []
    for place in range(len(residuals)):
        others = np.arange(len(residuals)) != place
        move = _solve(slopes[others], residuals[others], values, 1e-6)
        each.append(residuals[place] + slopes[place] @ move)
    return float(np.sqrt(np.mean(np.square(each))))


def _held_out_errors(cases: Sequence[FactorCase], chosen: Fit) -> np.ndarray:
    """The error of each run with factors that were fitted to the others, by simulation instead of slopes."""
    start = np.array([chosen.logs[CLASSES.index(group[0])] for group in chosen.grouping])
    found = []
    for place, case in enumerate(cases):
        others = list(itertools.chain(cases[:place], cases[place + 1 :]))
        logs = _fit(others, chosen.grouping, start).logs
        found.append(float(_residuals([case], logs)[0]))
    return np.array(found)
