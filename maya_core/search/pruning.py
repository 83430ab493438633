"""Decides which configurations need not run, because their outcome is certain from one that did.

A configuration that does not fit shows that others will not fit; one that fits shows that others are slower. The only basis is
what the recipe declares about its knobs (`memory:` and `time:`, `rises` or `falls`); knobs without a declaration must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maya_core.search.recipe import CheckedRecipe, Point

Figure = Literal["memory", "time"]


@dataclass
class Pruner:
    """Remembers the configurations that ran out of memory, and those that meet all conditions."""

    job: CheckedRecipe
    _full: list[Point] = field(default_factory=list)
    _usable: list[Point] = field(default_factory=list)

    def note_out_of_memory(self, point: Point) -> None:
        self._full.append(self.job.canonical(point))

    def note_usable(self, point: Point) -> None:
        self._usable.append(self.job.canonical(point))

    def out_of_memory(self, point: Point) -> Point | None:
        """A configuration that ran out of memory and certainly needs no more of it than this one."""
        return self._below(point, self._full, "memory")

    def slower(self, point: Point, *, alike: bool) -> Point | None:
        """A usable configuration that certainly takes no longer than this one. `alike`: it must do the same work on the same cluster."""
        usable = [one for one in self._usable if self._alike(one, point)] if alike else self._usable
        return self._below(point, usable, "time")

    def _alike(self, one: Point, other: Point) -> bool:
        job = self.job
        return job.cluster_of(one) == job.cluster_of(other) and job.per_step(one) == job.per_step(other)

    def _below(self, point: Point, known: list[Point], figure: Figure) -> Point | None:
        mine = self.job.canonical(point)
        return next((other for other in known if self._at_least(mine, other, figure)), None)

    def _at_least(self, one: Point, other: Point, figure: Figure) -> bool:
        """Whether the declarations imply that one needs at least as much memory, or time, as the other."""
        for name, knob in self.job.knobs.items():
            if one[name] == other[name]:
                continue
            declared = getattr(knob, figure)
            if declared is None:
                return False
            later = knob.choices.index(one[name]) > knob.choices.index(other[name])
            if later != (declared == "rises"):
                return False
        return True

    def order(self, point: Point) -> tuple[int, int]:
        """The place of a configuration in a grid: fast ones first, then those that need little memory, so that many can be skipped."""
        places = {"memory": 0, "time": 0}
        for name, knob in self.job.knobs.items():
            place, last = knob.choices.index(point[name]), len(knob.choices) - 1
            for figure in places:
                places[figure] += {"rises": place, "falls": last - place, None: 0}[getattr(knob, figure)]
        return places["time"], places["memory"]
