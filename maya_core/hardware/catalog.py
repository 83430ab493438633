"""The hardware catalog: which GPUs can be emulated and what is known of each, read from gpus.toml."""

from __future__ import annotations

import difflib
import functools
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from maya_core.errors import MayaError

DEFAULT_GPU = "h100"


class Gpu(BaseModel):
    """One kind of GPU, as its data sheet and its driver describe it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    aliases: tuple[str, ...] = ()
    driver_name: str
    compute_capability: tuple[int, int]
    memory_bytes: PositiveInt
    outside_bytes: PositiveInt
    sms: PositiveInt
    l2_bytes: PositiveInt
    max_threads_per_sm: PositiveInt
    shared_memory_per_block_bytes: PositiveInt
    boost_clock_mhz: PositiveFloat
    memory_clock_mhz: PositiveFloat
    memory_bus_bits: PositiveInt
    memory_bandwidth_bytes_per_s: PositiveFloat
    peak_flops: dict[str, PositiveFloat]  # dense, by dtype
    sources: str


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Every GPU of the catalog by its name."""
    table = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text())
    return {name: Gpu(name=name, **entry) for name, entry in table.items()}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name or alias, however it is capitalised."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    names = {alias: gpu for gpu in gpus().values() for alias in (gpu.name, *gpu.aliases)}
    if wanted in names:
        return names[wanted]
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise MayaError(f"unknown GPU '{name}'.", f"{hint}Known: {', '.join(gpus())}. `maya gpus` says more of each.")
