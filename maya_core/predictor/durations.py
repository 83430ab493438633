"""The result of a prediction: seconds, and how they are known."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class Provenance(enum.IntEnum):
    """How a duration is known, from the most to the least certain."""

    MEASURED = 0  # exactly this work was timed on this GPU
    INTERPOLATED = 1  # between measurements of this GPU
    EXTRAPOLATED = 2  # outside of them, by structure alone, or from another GPU
    BOUND = 3  # nothing similar was measured: a lower bound from the data sheet


@dataclass(frozen=True)
class Durations:
    """The seconds of a batch of work, with the provenance and the profile of each."""

    seconds: np.ndarray  # float64
    provenance: np.ndarray  # uint8, of Provenance
    profile: np.ndarray  # index into `profiles`
    profiles: tuple[str, ...]

    @staticmethod
    def of(seconds: np.ndarray, provenance: np.ndarray | Provenance, profile: str) -> Durations:
        seconds = np.asarray(seconds, np.float64)
        known = np.broadcast_to(np.asarray(provenance, np.uint8), seconds.shape)
        return Durations(seconds, known, np.zeros(seconds.shape, np.int32), (profile,))

    def taken(self, places: np.ndarray) -> Durations:
        return Durations(self.seconds[places], self.provenance[places], self.profile[places], self.profiles)

    def slowed(self, factor: np.ndarray | float, least: Provenance = Provenance.MEASURED) -> Durations:
        """These durations times a factor; their provenance is at best `least`."""
        return Durations(self.seconds * factor, np.maximum(self.provenance, least), self.profile, self.profiles)

    @staticmethod
    def joined(parts: Sequence[Durations]) -> Durations:
        """Concatenates several results."""
        names: dict[str, int] = {}
        profile = [
            np.array([names.setdefault(name, len(names)) for name in part.profiles], np.int32)[part.profile]
            for part in parts
        ]
        none = np.zeros(0)
        return Durations(
            np.concatenate([part.seconds for part in parts] or [none]),
            np.concatenate([part.provenance for part in parts] or [none.astype(np.uint8)]),
            np.concatenate(profile or [none.astype(np.int32)]),
            tuple(names),
        )

    def __len__(self) -> int:
        return len(self.seconds)
