"""From actual runs to the few factors they support: on compute, memory traffic, network and host.

A prediction is not a sum of its parts: kernels hide the host, communication hides behind kernels. So the step of each run is simulated
again from its recorded trace, with factors on its parts, and those factors are looked for that make all steps as long as they
were. Which factors are free is decided by how well each run is predicted by the others. Traces are priced without factors of earlier
fits, so a fit never builds on another.
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

FEWEST = 3  # distinct jobs, for one factor; each further one wants two more
PER_FACTOR = 2
FELT = 0.05  # a run tells something of a factor if 1 % of that makes 0.05 % of its step,
FELT_BY = 2  # and there must be so many: one alone could not be checked by the others
WORTH_IT = 0.9  # what is left of the error, each run predicted by the others; else there is no calibration
SIMPLER = 0.95  # a further factor must leave at most so much of the error
STEP = 0.05  # of the logarithm, for slopes
PULL = 1e-4  # of factors towards each other, in place of runs that would tell them apart
ROBUST = 0.1  # of the logarithm: runs that are further off have less weight
ROUNDS = 12
FARTHEST = np.log(1e5)

# Which classes share a factor; those not named keep theirs at 1. Simplest first.
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
    """A recorded job, and how long its step really took."""

    name: str
    job: JobTrace
    cluster: Cluster
    options: PredictionOptions
    actual_s: float
    _parts: dict[int, tuple[TraceDurations, np.ndarray]] = field(default_factory=dict)
    _known: dict[tuple[float, ...], float] = field(default_factory=dict)

    def prepare(self, base: Calibration | None) -> None:
        """Prices the trace once: all of it, and apart from that what is memory's."""
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
        """Of the job, with the exponentials of these on its classes."""
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
            raise MayaError(f"the prediction of {self.name} has no step.", "Leave its pair out.")
        return step


def _without_runs(base: Calibration | None, cluster: Cluster) -> Calibration:
    import datetime

    neutral = RunFactors(
        fitted=[], runs=1, experiment="", before_pct=0.0, after_pct=0.0, shipped="", network_name=cluster.network.name
    )
    if base is not None:
        return base.model_copy(update={"runs": neutral})
    return Calibration(
        name="none", gpu=cluster.gpu.name, created=datetime.datetime.now(datetime.UTC), shipped=shipped_digest(),
        sources=[], runs=neutral,
    )  # fmt: skip


@dataclass(frozen=True)
class Fit:
    grouping: Grouping
    logs: np.ndarray  # by class
    expected: float  # error, each run predicted by the others: root mean square of the logarithm, by slopes

    @property
    def free(self) -> list[str]:
        return ["+".join(group) for group in self.grouping]


def fit(cases: Sequence[FactorCase], experiment: str, base: Calibration | None = None) -> RunFactors:
    """The factors that these runs support; a MayaError with the reason if they support none."""
    if len(cases) < FEWEST:
        raise MayaError(
            f"{len(cases)} job{'s' * (len(cases) != 1)} with a prediction and an actual run: too few to tell a factor from chance.",
            f"Record actual runs of at least {FEWEST} different jobs (other sizes, batches or clusters); repeated runs of one count once.",
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
    after = _percent(_skipped(cases, best))
    if after > WORTH_IT * before:
        raise MayaError(
            f"no factors would help: step times are {before:.1f} % off in the median, and with factors fitted to the other runs {after:.1f} %.",
            "What is wrong is not the same in all runs; `maya calibrate kineto` corrects single kernels.",
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
    """Groupings with no more factors than so many runs support, each of which runs feel. It is asked where the runs are: a
    common factor is put on everything first, for work that a hundred times slower GPU hides is not to be seen from here."""
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
    """The logarithm of predicted by actual time."""
    return np.log([case.step_s(logs) / case.actual_s for case in cases])


def _percent(residuals: np.ndarray) -> float:
    return 100 * float(np.median(np.abs(np.expm1(residuals))))


def _spread(grouping: Grouping, values: np.ndarray) -> np.ndarray:
    """By class, from values by group."""
    logs = np.zeros(len(CLASSES))
    for group, value in zip(grouping, values, strict=True):
        logs[[CLASSES.index(name) for name in group]] = value
    return logs


def _slopes(cases: Sequence[FactorCase], logs: np.ndarray, grouping: Grouping) -> np.ndarray:
    """By run and group: what the logarithm of step time gains with that of the factor."""
    columns = []
    for place in range(len(grouping)):
        nudge = _spread(grouping, np.eye(len(grouping))[place] * STEP)
        columns.append((_residuals(cases, logs + nudge) - _residuals(cases, logs - nudge)) / (2 * STEP))
    return np.stack(columns, axis=1)


def _fit(cases: Sequence[FactorCase], grouping: Grouping, start: np.ndarray | None = None) -> Fit:
    """Gauss-Newton on logarithms, damped, with less weight on runs that are far off."""
    values = start
    if values is None:
        values = np.full(len(grouping), -float(np.median(_residuals(cases, np.zeros(len(CLASSES))))))
    damping = 1e-3
    residuals = _residuals(cases, _spread(grouping, values))
    for _ in range(ROUNDS):
        slopes = _slopes(cases, _spread(grouping, values), grouping)
        move = _solve(slopes, residuals, values, damping)
        tried = np.clip(values + move, -FARTHEST, FARTHEST)
        there = _residuals(cases, _spread(grouping, tried))
        if _loss(there, tried) < _loss(residuals, values):
            small = np.abs(tried - values).max() < 1e-4
            values, residuals, damping = tried, there, damping / 5
            if small:
                break
        elif damping > 1e3:
            break
        else:
            damping *= 10
    slopes = _slopes(cases, _spread(grouping, values), grouping)
    return Fit(grouping, _spread(grouping, values), _expected(slopes, residuals, values))


def _loss(residuals: np.ndarray, values: np.ndarray) -> float:
    """Square for small residuals, straight for large ones; and the pull of factors towards each other."""
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
    """Error of each run under factors of the others, by the slopes here: by this groupings are chosen."""
    each = []
    for place in range(len(residuals)):
        others = np.arange(len(residuals)) != place
        move = _solve(slopes[others], residuals[others], values, 1e-6)
        each.append(residuals[place] + slopes[place] @ move)
    return float(np.sqrt(np.mean(np.square(each))))


def _skipped(cases: Sequence[FactorCase], chosen: Fit) -> np.ndarray:
    """The error of each run under factors that were fitted to the others: by simulation, nothing taken for straight."""
    start = np.array([chosen.logs[CLASSES.index(group[0])] for group in chosen.grouping])
    found = []
    for place, case in enumerate(cases):
        others = list(itertools.chain(cases[:place], cases[place + 1 :]))
        logs = _fit(others, chosen.grouping, start).logs
        found.append(float(_residuals([case], logs)[0]))
    return np.array(found)
