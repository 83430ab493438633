"""Adds tags to the runs that a user's program logs to MLflow, through MLflow's `run_context_provider` entry point. If the program is
launched with the variables that `maya run --mlflow` prints, its run is paired with the prediction."""

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
    """Checks that a pair id is valid in a tag and in a search."""
    if pair is not None and not re.fullmatch(r"[\w.:-]{1,100}", pair):
        raise MayaError(f"'{pair}' cannot be a pair id.", "Use letters, digits, '-', '_', '.' and ':'.")
    return pair


def tags() -> dict[str, str]:
    """The tags of runs that start in this process. There are none under emulation, because such runs are not actual runs."""
    pair, fingerprint = os.environ.get(PAIR_VARIABLE), os.environ.get(FINGERPRINT_VARIABLE)
    if not (pair or fingerprint) or emulated():
        return {}
    found = {keys.KIND: "actual", keys.PAIR: pair or "", keys.FINGERPRINT: fingerprint or ""}
    return {name: value for name, value in found.items() if value}


def emulated() -> bool:
    """Whether this process is being emulated."""
    device: Any = sys.modules.get("maya_core.device.emulated")
    return device is not None and device.EmulatedDevice.current is not None


class RunContext:
    """The interface of a provider. (MLflow does not check the base class, and importing it would import MLflow.)"""

    def in_context(self) -> bool:
        return bool(tags())

    def tags(self) -> dict[str, str]:
        return tags()
