"""Profiles: the fitted coefficients of a family of work on a GPU, with their sources and their errors on unseen data.

Shipped profiles are in `profiles/FAMILY/GPU.json`; a user's own, from `maya calibrate`, take precedence. A GPU without a profile uses that of its
nearest relative: coefficients are shares of the data sheet's rates, so they apply to other GPUs, too.
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
NEAR = 1.2  # the distance up to which details apply: an H100 NVL and an H100, an A100 of 40 GB and one of 80 GB


class ProfileSource(BaseModel):
    """A set of measurements that a profile was fitted to."""

    model_config = ConfigDict(extra="forbid")

    name: str
    rows: int
    note: str = ""


class HeldOut(BaseModel):
    """The error of a fit on rows that it did not see, in percent of the measured time."""

    model_config = ConfigDict(extra="forbid")

    split: str  # what was held out: pairs of (n, k), models, the largest tenth ...
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
    models: dict[str, dict[str, Any]]  # by dtype or kernel; the family's module defines their fields


@dataclass(frozen=True)
class Found:
    """A profile that was found for a GPU. `gpu` is the measured GPU, which may be another one."""

    profile: Profile
    gpu: Gpu
    own: bool  # measured on the GPU itself

    @property
    def name(self) -> str:
        return f"{self.profile.family}/{self.profile.gpu}"

    def near(self, gpu: Gpu) -> bool:
        """Whether details fitted to one GPU apply to the other; for less similar ones, only structure does."""
        return distance(gpu, self.gpu) < NEAR


def user_folder() -> Path:
    """The folder of a user's own profiles."""
    if folder := os.environ.get("MAYA_PROFILES"):
        return Path(folder)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "maya" / "profiles"


def read_profile(path: Path) -> Profile:
    try:
        return Profile.model_validate_json(path.read_text())
    except (OSError, ValidationError, ValueError) as error:
        raise MayaError(
            f"{path} is not a profile that Maya can read ({first_line(error)}).",
            "Remove it, or create it again with `maya calibrate`.",
        ) from error


def first_line(error: Exception) -> str:
    """What is wrong with a file, in one line that names the field if there is one."""
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
    """The shipped profiles of a family, by GPU."""
    return {path.stem: read_profile(path) for path in sorted((SHIPPED / family).glob("*.json"))}


def find_profile(family: str, gpu: Gpu, model: str | None = None) -> Found | None:
    """The profile with which this family is predicted on this GPU (one that has `model`, if given), or None if none is near."""
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
    """The distance between two GPUs: first by architecture, then by size, the balance of arithmetic and memory, and power."""
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
