"""A user's own measurements of a GPU, and how they correct predictions.

A calibration is one JSON file in the user's profile folder. A kernel that was measured gets the measured duration; others of the same family
and model get the prediction of Maya's own profiles times a factor that the measurements support. `calibrate/` makes calibrations; this
module stores, finds and applies them.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu
from maya_core.hardware.cluster import Cluster
from maya_core.ops.kernel import KERNELS, Kernel
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.families import FAMILIES
from maya_core.predictor.placement import Placement, island_size
from maya_core.predictor.profile import SHIPPED, first_line, user_folder
from maya_core.version import __version__

# A factor may fall with the predicted time t, but t x factor(t) must not fall, so its exponent must be above -1. Only half of that is used.
STEEPEST = 0.5


NO_CALIBRATION = "none"


class CalibrationPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Origin(CalibrationPart):
    """Where measurements came from."""

    kind: str  # kineto, nccl-tests, measure, or a tracker's name
    name: str  # name of the file or of the device
    note: str = ""


class Measured(CalibrationPart):
    """A kernel that was timed."""

    family: str
    model: str
    sizes: tuple[float, ...]
    seconds: PositiveFloat  # under load, the median
    samples: PositiveInt
    spread: float = Field(0.0, ge=0)  # interquartile range divided by the median
    burst_seconds: PositiveFloat | None = None  # on a GPU that was idle before, if that was measured, too

    @property
    def kernel(self) -> Kernel:
        return KERNELS[self.family].of(self.model, self.sizes)

    @model_validator(mode="after")
    def _is_a_kernel(self) -> Measured:
        if self.family not in KERNELS:
            raise ValueError(f"unknown family '{self.family}'; there are {', '.join(KERNELS)}")
        try:
            _ = self.kernel
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self.family} {self.model} with {len(self.sizes)} sizes is not a kernel: {error}"
            ) from error
        return self


class Factor(CalibrationPart):
    """Measured divided by predicted time: one value for short kernels, one for long ones, interpolated in between."""

    family: str
    model: str
    rows: PositiveInt  # distinct shapes that it is based on
    short: PositiveFloat  # at `short_s` of predicted time and below
    long: PositiveFloat  # at `long_s` and above
    short_s: PositiveFloat
    long_s: PositiveFloat
    spread: float = Field(ge=0)  # of the measurements around the factor: 0.1 is 10 %
    smallest: tuple[float, ...]  # of each size
    largest: tuple[float, ...]

    @model_validator(mode="after")
    def _keeps_order(self) -> Factor:
        if self.long_s < self.short_s:
            raise ValueError("long_s is below short_s")
        # Checks the fall itself and not the slope, which is only rounding errors if short_s and long_s are nearly equal.
        if math.log(self.long / self.short) < -STEEPEST * math.log(self.long_s / self.short_s) - 1e-6:
            raise ValueError("the factor falls so steeply that longer kernels would become shorter")
        return self

    @property
    def slope(self) -> float:
        span = math.log(self.long_s / self.short_s)
        return math.log(self.long / self.short) / span if span > 0 else 0.0

    def at(self, predicted: np.ndarray) -> np.ndarray:
        """The factor for these predicted seconds. It depends on time alone, and predicted time x factor never falls as predicted time grows,
        so a larger size never becomes cheaper."""
        place = np.log(np.clip(predicted, self.short_s, self.long_s) / self.short_s)
        answer: np.ndarray = self.short * np.exp(self.slope * place)
        return answer

    def covers(self, sizes: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Whether every size and the predicted time are within the measured ranges."""
        inside = (sizes >= np.array(self.smallest)) & (sizes <= np.array(self.largest))
        return inside.all(axis=1) & (predicted >= self.short_s) & (predicted <= self.long_s)


class FitCheck(CalibrationPart):
    """The median error on distinct shapes that the factor was not fitted to, in percent of the measured time."""

    family: str
    model: str
    rows: int
    before_pct: float
    after_pct: float


class Unused(CalibrationPart):
    """Measurements that gave no factor. Each still applies to its own shape."""

    family: str
    model: str
    rows: int
    reason: str


class Collective(CalibrationPart):
    """A collective that was timed. Bytes are those of the whole buffer, as in nccl-tests."""

    op: str
    bytes: float = Field(ge=0)
    ranks_per_node: PositiveInt
    nodes: PositiveInt
    network: str = ""  # "" within a node
    seconds: PositiveFloat
    samples: PositiveInt


class RunFactors(CalibrationPart):
    """Factors on whole classes of work, with which predictions of whole steps agree with actual runs. They are applied after everything else."""

    compute: PositiveFloat = 1.0  # on kernels that multiply: products, attention, convolutions, recurrent layers
    memory: PositiveFloat = 1.0  # on all others, and copies
    network: PositiveFloat = 1.0  # on collectives, of clusters with that network
    network_name: str = ""
    host: PositiveFloat = 1.0  # on the host's time
    fitted: list[str]  # the factors that the runs support; the others are 1, or equal to one of these
    runs: PositiveInt  # distinct jobs
    experiment: str
    before_pct: float  # median error of step time without them
    after_pct: float  # and with them, where each run is predicted from the others
    shipped: str  # the predictions that they are ratios to

    def of_family(self, family: str) -> float:
        return self.compute if FAMILIES[family].compute_bound else self.memory

    def __str__(self) -> str:
        factors = ", ".join(f"{name} x{getattr(self, name):.3g}" for name in CLASSES if getattr(self, name) != 1.0)
        return f"{self.runs} runs of '{self.experiment}' ({factors or 'no factors'})"


CLASSES = ("compute", "memory", "network", "host")


class Calibration(CalibrationPart):
    format: Literal["maya-calibration"] = "maya-calibration"
    version: Literal[1] = 1
    name: str
    gpu: str
    created: datetime.datetime
    shipped: str  # the predictions that the factors are ratios to: see `shipped_digest`
    sources: list[Origin]
    measured: list[Measured] = []
    factors: list[Factor] = []
    unused: list[Unused] = []
    checks: list[FitCheck] = []
    collectives: list[Collective] = []
    runs: RunFactors | None = None

    @functools.cached_property
    def seconds_of(self) -> dict[Kernel, float]:
        return {row.kernel: row.seconds for row in self.measured}

    @functools.cached_property
    def factor_of(self) -> dict[tuple[str, str], Factor]:
        return {(factor.family, factor.model): factor for factor in self.factors}

    @functools.cached_property
    def curves(self) -> dict[tuple[str, int, int, str], tuple[np.ndarray, np.ndarray]]:
        """Bytes and seconds, both increasing, by op, ranks per node, nodes and network."""
        groups: dict[tuple[str, int, int, str], dict[float, float]] = {}
        for row in self.collectives:
            if row.bytes > 0:
                where = (row.op, row.ranks_per_node, row.nodes, row.network)
                groups.setdefault(where, {})[row.bytes] = row.seconds
        curves = {}
        for where, rows in groups.items():
            sizes = np.array(sorted(rows))
            curves[where] = sizes, np.maximum.accumulate(np.array([rows[size] for size in sizes]))
        return curves


def apply(calibration: Calibration, kernels: Sequence[Kernel], durations: Durations) -> Durations:
    """Corrects durations with the calibration.

    A kernel that was measured gets the measured duration. Others of a (family, model) with a factor get their predicted duration times the
    factor; within the measured sizes their provenance is interpolated, outside it stays the same.
    """
    if not len(durations):
        return durations
    if calibration.runs is not None:
        return _scaled(_corrected(calibration, kernels, durations), kernels, calibration.runs)
    return _corrected(calibration, kernels, durations)


def _scaled(durations: Durations, kernels: Sequence[Kernel], runs: RunFactors) -> Durations:
    """Applies the factors of whole runs. The provenance of a duration stays the same, because these factors come from whole steps."""
    factors = np.array([runs.of_family(kernel.family) for kernel in kernels])
    return replace(durations, seconds=durations.seconds * factors)


def _corrected(calibration: Calibration, kernels: Sequence[Kernel], durations: Durations) -> Durations:
    seconds, provenance = durations.seconds.copy(), durations.provenance.copy()
    profile, own = durations.profile.copy(), len(durations.profiles)
    groups: dict[tuple[str, str], list[int]] = {}
    for place, kernel in enumerate(kernels):
        if (exact := calibration.seconds_of.get(kernel)) is not None:
            seconds[place], provenance[place], profile[place] = exact, Provenance.MEASURED, own
        elif (kernel.family, kernel.model) in calibration.factor_of:
            groups.setdefault((kernel.family, kernel.model), []).append(place)
    for key, places in groups.items():
        factor, predicted = calibration.factor_of[key], durations.seconds[places]
        sizes = np.array([kernels[place].sizes for place in places], float)
        covered = factor.covers(sizes, predicted)
        seconds[places] = predicted * factor.at(np.maximum(predicted, 1e-12))
        provenance[places] = np.where(covered, np.uint8(Provenance.INTERPOLATED), durations.provenance[places])
        profile[places] = own
    return Durations(seconds, provenance, profile, (*durations.profiles, f"calibration/{calibration.name}"))


# Ops of a trace that are the same op in NCCL.
NCCL_OPS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "recv": "send"}


def apply_collectives(
    calibration: Calibration,
    op: str,
    nbytes: Sequence[float] | np.ndarray,
    placement: Placement,
    cluster: Cluster,
    durations: Durations,
) -> Durations:
    """Corrects the durations of calls of one op on one group, if that op was measured on groups with the same placement.

    Within the measured sizes, measurements are interpolated; below and above them, the prediction is scaled so that it continues them.
    """
    found = _measured_collectives(calibration, op, nbytes, placement, cluster, durations)
    runs = calibration.runs
    if runs is None or runs.network_name != cluster.network.name:
        return found
    return replace(found, seconds=found.seconds * runs.network)


def _measured_collectives(
    calibration: Calibration,
    op: str,
    nbytes: Sequence[float] | np.ndarray,
    placement: Placement,
    cluster: Cluster,
    durations: Durations,
) -> Durations:
    if not placement.even or island_size(cluster) != cluster.gpus_per_node:
        return durations
    network = cluster.network.name if placement.islands > 1 else ""
    curve = calibration.curves.get((NCCL_OPS.get(op, op), placement.largest, placement.islands, network))
    sizes = np.asarray(nbytes, np.float64)
    if curve is None or not len(sizes):
        return durations
    known, times = curve
    within = np.exp(np.interp(np.log(np.maximum(sizes, 1)), np.log(known), np.log(times)))
    inside = (sizes >= known[0]) & (sizes <= known[-1])
    seconds = np.where(inside, within, durations.seconds)
    for outside, border in ((sizes < known[0], known[0]), (sizes > known[-1], known[-1])):
        if outside.any():
            from maya_core.predictor import collective_time

            expected = float(collective_time.predict(op, [border], placement, cluster).seconds[0])
            at_border = times[0] if border == known[0] else times[-1]
            seconds = np.where(outside & (sizes > 0), durations.seconds * at_border / max(expected, 1e-12), seconds)
    provenance = np.where(inside, np.uint8(Provenance.INTERPOLATED), durations.provenance)
    provenance = np.where(np.isin(sizes, known), np.uint8(Provenance.MEASURED), provenance)
    profile = np.full(len(sizes), len(durations.profiles), np.int32)
    return Durations(seconds, provenance, profile, (*durations.profiles, f"calibration/{calibration.name}"))


# Files


@functools.cache
def shipped_digest() -> str:
    """Identifies the predictions that a calibration is relative to: Maya's version and its shipped profiles."""
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(SHIPPED.rglob("*.json")):
        digest.update(path.relative_to(SHIPPED).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise MayaError(f"'{name}' cannot be the name of a calibration.", "Use letters, digits, '-', '_' and '.'.")
    return user_folder() / f"{name}.json"


def read_calibration(path: Path) -> Calibration | None:
    """The calibration in a file; None if the file is of another kind."""
    try:
        text = path.read_text()
        if "maya-calibration" not in text:
            return None
        return Calibration.model_validate_json(text)
    except (OSError, ValidationError, ValueError) as error:
        raise MayaError(
            f"{path} is not a calibration that this version of Maya can read ({first_line(error)}).",
            f"Remove it with `maya calibrate remove {path.stem}`, or create it again with --replace.",
        ) from error


def calibrations(gpu: Gpu | str | None = None) -> list[Calibration]:
    """The user's calibrations (of one GPU, if it is given), newest first. The newest is used."""
    wanted = gpu if isinstance(gpu, str) or gpu is None else gpu.name
    found = [read_calibration(path) for path in sorted(user_folder().glob("*.json"))]
    mine = [each for each in found if each is not None and wanted in (None, each.gpu)]
    return sorted(mine, key=lambda each: each.created, reverse=True)


def load_calibration(gpu: Gpu | str, name: str | None = None) -> Calibration | None:
    """The user's newest calibration of this GPU, or None; with a name, that one ('none' for no calibration). Factors are fitted again if Maya's
    own predictions have changed."""
    if name == NO_CALIBRATION:
        return None
    found = calibrations(gpu)
    if name is not None:
        named = [each for each in found if each.name == name]
        if not named:
            known = ", ".join(each.name for each in found) or "none"
            raise MayaError(
                f"there is no calibration '{name}' of {gpu if isinstance(gpu, str) else gpu.name} in {user_folder()}.",
                f"There are: {known}.",
            )
        found = named
    if not found:
        return None
    newest = found[0]
    if newest.shipped != shipped_digest():
        from maya_core.predictor.calibration_factors import refit

        newest = refit(newest)
    return newest


def write_calibration(calibration: Calibration, *, replace: bool = False) -> Path:
    path = path_of(calibration.name)
    if path.exists() and not replace:
        raise MayaError(
            f"there is a calibration '{calibration.name}' already ({path}).",
            "Give --add to add these measurements to it, --replace to overwrite it, or --name for a new one.",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(calibration.model_dump_json(indent=1) + "\n")
    part.replace(path)
    return path


def remove_calibration(name: str) -> Path:
    path = path_of(name)
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in user_folder().glob("*.json"))) or "none"
        raise MayaError(f"there is no calibration '{name}' in {user_folder()}.", f"There are: {known}.")
    if "maya-calibration" not in path.read_text(errors="replace"):
        raise MayaError(f"{path} is not a calibration.", "Remove it yourself if you do not need it.")
    path.unlink()
    return path
