"""Tags for the runs that a program of the user's own logs to MLflow, by MLflow's `run_context_provider` entry point: launched with the
variables that `maya run --mlflow` prints, a real run pairs with its prediction by itself."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from maya_core.errors import MayaError
from maya_mlflow import keys

PAIR_VARIABLE = "MAYA_PAIR_ID"
FINGERPRINT_VARIABLE = "MAYA_FINGERPRINT"


def checked_pair(pair: str | None) -> str | None:
    """A pair's name as it may stand in a tag and in a search for it."""
    if pair is not None and not re.fullmatch(r"[\w.:-]{1,100}", pair):
        raise MayaError(f"'{pair}' cannot be the name of a pair.", "Use letters, digits, '-', '_', '.' and ':'.")
    return pair


def tags() -> dict[str, str]:
    """Of runs that begin in this process; none of them while it is emulated, for then they are no actual runs."""
    pair, fingerprint = os.environ.get(PAIR_VARIABLE), os.environ.get(FINGERPRINT_VARIABLE)
    if not (pair or fingerprint) or emulated():
        return {}
    found = {keys.KIND: "actual", keys.PAIR: pair or "", keys.FINGERPRINT: fingerprint or ""}
    return {name: value for name, value in found.items() if value}


def emulated() -> bool:
    """Is this process, now?"""
    device: Any = sys.modules.get("maya_core.device.emulated")
    return device is not None and device.EmulatedDevice.current is not None


class RunContext:
    """What MLflow asks of a provider. (It checks no base class, and importing one would import MLflow.)"""

    def in_context(self) -> bool:
        return bool(tags())

    def tags(self) -> dict[str, str]:
        return tags()
