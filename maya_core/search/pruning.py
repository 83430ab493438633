"""Configurations that need not be run: one that did not fit tells of others that will not, and one that did of others that are slower. Only what
the recipe declares is concluded from (`memory:` and `time:`, `rises` or `falls`), and only between configurations that differ in nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maya_core.search.recipe import CheckedRecipe, Point

Figure = Literal["memory", "time"]


@dataclass
class Pruner:
    """Knows the configurations that ran out of memory, and those that may be chosen."""

    job: CheckedRecipe
    _full: list[Point] = field(default_factory=list)
    _chosen: list[Point] = field(default_factory=list)

    def note_out_of_memory(self, point: Point) -> None:
        self._full.append(self.job.canonical(point))

    def note_chosen(self, point: Point) -> None:
        self._chosen.append(self.job.canonical(point))

    def out_of_memory(self, point: Point) -> Point | None:
        """A configuration that ran out of memory and surely needs no more than this one."""
        return self._below(point, self._full, "memory")

    def slower(self, point: Point, *, alike: bool) -> Point | None:
        """A configuration that may be chosen and surely takes no longer than this one; `alike`: for the same work, on the same cluster."""
        chosen = [one for one in self._chosen if self._alike(one, point)] if alike else self._chosen
        return self._below(point, chosen, "time")

    def _alike(self, one: Point, other: Point) -> bool:
        job = self.job
        return job.cluster_of(one) == job.cluster_of(other) and job.per_step(one) == job.per_step(other)

    def _below(self, point: Point, known: list[Point], figure: Figure) -> Point | None:
        mine = self.job.canonical(point)
        return next((other for other in known if self._at_least(mine, other, figure)), None)

    def _at_least(self, one: Point, other: Point, figure: Figure) -> bool:
        """Whether one has at least the other's memory, or time, by what is declared."""
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
        """Where a configuration comes in a grid, so that most need not be run: the fast ones first, of them those that need least memory."""
        places = {"memory": 0, "time": 0}
        for name, knob in self.job.knobs.items():
            place, last = knob.choices.index(point[name]), len(knob.choices) - 1
            for figure in places:
                places[figure] += {"rises": place, "falls": last - place, None: 0}[getattr(knob, figure)]
        return places["time"], places["memory"]
