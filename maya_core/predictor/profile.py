"""Profiles: what was learned of a family of work on a GPU, with where it came from and how far off it was on unseen data.

Shipped profiles lie in `profiles/FAMILY/GPU.json`; a user's own, from `maya calibrate`, take precedence. A GPU without one
borrows that of its nearest relative: coefficients are shares of what the data sheet promises, so they carry over.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu, find_gpu, gpus

SHIPPED = Path(__file__).parent / "profiles"
NEAR = 1.2  # an H100 NVL to an H100, an A100 of 40 GB to one of 80


class ProfileSource(BaseModel):
    """A set of measurements that a profile was fitted to."""

    model_config = ConfigDict(extra="forbid")

    name: str
    rows: int
    note: str = ""


class HeldOut(BaseModel):
    """Error of a fit on rows it did not see, in percent of the measured time."""

    model_config = ConfigDict(extra="forbid")

    split: str  # what was left out: pairs of (n, k), models, the largest tenth ...
    rows: int
    median_pct: float
    p90_pct: float


class Profile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["maya-profile"] = "maya-profile"
    version: Literal[1] = 1
    family: str
    gpu: str
    sources: list[ProfileSource]
    held_out: dict[str, list[HeldOut]]  # by model
    models: dict[str, dict[str, Any]]  # by dtype or kernel; the family's module knows their fields


@dataclass(frozen=True)
class Found:
    """A profile to predict with. `gpu` is whose measurements it holds, which may not be the one asked about."""

    profile: Profile
    gpu: Gpu
    own: bool  # measured on the GPU asked about

    @property
    def name(self) -> str:
        return f"{self.profile.family}/{self.profile.gpu}"

    def near(self, gpu: Gpu) -> bool:
        """Whether details learned of the one hold of the other; further away only structure carries over."""
        return distance(gpu, self.gpu) < NEAR


def user_folder() -> Path:
    """Where a user's own profiles are kept."""
    if folder := os.environ.get("MAYA_PROFILES"):
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "maya" / "profiles"


def read_profile(path: Path) -> Profile:
    try:
        return Profile.model_validate_json(path.read_text())
    except (OSError, ValidationError, ValueError) as error:
        raise MayaError(
            f"{path} is not a profile Maya can read ({first_line(error)}).",
            "Remove it, or make it anew with `maya calibrate`.",
        ) from error


def first_line(error: Exception) -> str:
    """What is wrong with a file, in a line: the field, where there is one."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).splitlines()[0]


def write_profile(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(profile.model_dump(), separators=(",", ":"), sort_keys=True) + "\n")
    part.replace(path)


@functools.cache
def shipped(family: str) -> dict[str, Profile]:
    """By GPU, the profiles of a family that come with Maya."""
    return {path.stem: read_profile(path) for path in sorted((SHIPPED / family).glob("*.json"))}


def find_profile(family: str, gpu: Gpu, model: str | None = None) -> Found | None:
    """The profile to predict this family on this GPU with (one that has `model`, if given), or None if nothing is near."""
    known = {
        name: profile
        for name, profile in shipped(family).items()
        if (model is None or model in profile.models) and name in gpus()
    }
    if gpu.name in known:
        return Found(known[gpu.name], gpu, True)
    if not known:
        return None
    nearest = min(known, key=lambda name: (distance(gpu, find_gpu(name)), name))
    return Found(known[nearest], find_gpu(nearest), False)


def distance(one: Gpu, other: Gpu) -> float:
    """How unlike two GPUs are: first in architecture, then in size, in the balance of arithmetic and memory, and in power."""
    generations = abs(one.compute_capability[0] - other.compute_capability[0]) + 0.5 * (
        one.compute_capability != other.compute_capability
    )

    def peak(gpu: Gpu) -> float:
        return gpu.peak_flops.get("float16", gpu.peak_flops["float32"])

    return (
        4 * generations
        + abs(math.log2(one.sms / other.sms))
        + abs(math.log2(peak(one) / peak(other)))
        + abs(math.log2(one.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s))
        + abs(math.log2(one.tdp_w / other.tdp_w))
    )
