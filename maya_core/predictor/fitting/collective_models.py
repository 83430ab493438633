"""Fits collectives to measurements: first the coefficients of the structure, then the correction of the residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from maya_core.hardware.cluster import Cluster
from maya_core.predictor.collective_structure import (
    Crossing,
    InsideModel,
    InsideStructure,
    OutsideModel,
    OutsideStructure,
    Regime,
    Route,
)
from maya_core.predictor.fitting.collective_sources import CollectiveRows
from maya_core.predictor.fitting.lattice_fit import fit_lattice
from maya_core.predictor.lattice import Axis, Lattice
from maya_core.predictor.placement import Link, Placement

ROBUST = 0.1  # of a natural logarithm: larger residuals count linearly, not squared
PRIOR = 0.15  # weight of the starting values, relative to the residual of one row
# From n to 2 n GPUs an all_reduce may become faster by up to a tenth, when switches replace rings.
NVLS_SLACK = 0.15

TREE_REACH = 0.7  # a tree's share of the ports is at least half, and at most twice, of what NCCL assumes
OWN = 0.35  # starting value for the cost of a rank's own part

# Starting values of fits: NCCL's LL, LL128 and Simple, roughly as in its own tuning table.
RINGS = [("ring", 4.0, 1.0, 0.03), ("ring", 6.0, 1.5, 0.3), ("ring", 15.0, 2.0, 0.75)]
SWITCHES = [("nvls", 15.0, 3.0, 0.55)]
MESSAGES = [("ring", 5.0, 0.5, 0.05), ("ring", 8.0, 0.5, 0.3), ("ring", 15.0, 1.0, 0.75)]
CROSSINGS = {
    "all_reduce": [
        ("tree", 14.0, 1.0, 0.8, 0.08),
        ("tree", 14.0, 1.7, 1.3, 0.2),
        ("tree", 20.0, 2.8, 4.0, 0.7),
        ("ring", 20.0, 2.8, 3.4, 1.0),
    ],
    "all_gather": [("ring", 14.0, 0.6, 0.8, 0.05), ("ring", 20.0, 2.8, 3.4, 1.0)],
    "reduce_scatter": [("ring", 14.0, 0.6, 0.8, 0.05), ("ring", 20.0, 2.8, 3.4, 1.0)],
    "all_to_all": [("messages", 20.0, 0.6, 0.8, 0.3), ("messages", 40.0, 0.8, 0.8, 1.0)],
    "send_recv": [("messages", 12.0, 1.0, 0.8, 0.4), ("messages", 15.0, 2.0, 0.8, 0.9)],
}


def _solve(
    guess: np.ndarray, error: Callable[[np.ndarray], np.ndarray], weight: np.ndarray, reach: np.ndarray | float = 4.0
) -> np.ndarray:
    """The logarithms of coefficients that minimize the weighted errors, held near the starting values and within their reach."""

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.concatenate([error(point) * weight, PRIOR * (point - guess) * ROBUST])

    best = None
    for shift in (0.0, 0.4, -0.4):  # several starts, because the fastest of several candidates is not smooth
        found = least_squares(
            residuals, guess + shift * np.minimum(reach, 1), loss="soft_l1", f_scale=ROBUST, diff_step=1e-3, max_nfev=200,
            bounds=(guess - reach, guess + reach),
        )  # fmt: skip
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    answer: np.ndarray = best.x
    return answer


# Within an island


def _inside(kinds: Sequence[str], point: np.ndarray) -> InsideStructure:
    values = np.exp(point[:-1]).reshape(-1, 3)
    return InsideStructure(
        own=round(min(float(np.exp(point[-1])), 1.0), 4),
        regimes=[
            Regime(kind=kind, base_us=round(base, 3), hop_us=round(hop, 4), share=round(min(share, 1.0), 5))  # type: ignore[arg-type]
            for kind, (base, hop, share) in zip(kinds, values.tolist(), strict=True)
        ],
    )


def fit_inside(
    op: str, rate: float, nvls: bool, rows: CollectiveRows, relative: InsideStructure | None = None
) -> InsideModel:
    """Fits the model within an island. `rate` is that of the link in bytes per second; `nvls`, whether switches reduce. What the rows do not
    determine stays like a relative, or like NCCL's own table."""
    start = MESSAGES if op in ("all_to_all", "send_recv") else RINGS + SWITCHES * (nvls and op == "all_reduce")
    own = OWN
    if relative is not None and len(relative.regimes) == len(start):
        start = [(regime.kind, regime.base_us, regime.hop_us, regime.share) for regime in relative.regimes]
        own = relative.own
    kinds = [kind for kind, *_ in start]
    guess = np.append(np.log([values for _, *values in start]).ravel(), np.log(max(own, 0.01)))
    measured = np.log(rows.seconds)

    def error(point: np.ndarray) -> np.ndarray:
        answer: np.ndarray = np.log(_inside(kinds, point).seconds(op, rate, rows.nbytes, rows.ranks)) - measured
        return answer

    structure = _inside(kinds, _solve(guess, error, rows.weight))
    slack = NVLS_SLACK if "nvls" in kinds else 0.0

    def grows(nbytes: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        return structure.seconds(op, rate, nbytes, ranks) * ranks**slack

    correction = fit_lattice(
        [_axis(rows.nbytes), _axis(rows.ranks)],
        [rows.nbytes, rows.ranks],
        measured - np.log(structure.seconds(op, rate, rows.nbytes, rows.ranks)),
        structure=grows,
        weights=rows.weight,
        smoothness=0.02,
    )
    return InsideModel(structure=structure, correction=_between(correction).store())


def _between(lattice: Lattice) -> Lattice:
    """Marks sizes between two measured ones of the same group as supported, because not every sweep contains all sizes."""
    support = lattice.support
    below = np.maximum.accumulate(support, axis=0)
    above = np.maximum.accumulate(support[::-1], axis=0)[::-1]
    return replace(lattice, support=below & above)


def _axis(sizes: np.ndarray, per_octave: int = 1) -> Axis:
    return Axis(float(np.floor(np.log2(sizes.min()))), float(np.floor(np.log2(sizes.max()) + 1e-9)), per_octave)


# Across the network


@dataclass(frozen=True)
class Crossings:
    """Rows of an op across networks, each with its route."""

    rows: CollectiveRows
    route: Route

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, mask: np.ndarray) -> Crossings:
        return Crossings(
            self.rows[mask], Route(*(getattr(self.route, name)[mask] for name in Route.__dataclass_fields__))
        )


def crossings(rows: CollectiveRows, machine: Cluster, link: Link = "nvlink") -> Crossings:
    """The rows of a cluster, whose groups ran alone."""
    routes = []
    for ranks, islands in zip(rows.ranks, rows.islands, strict=True):
        each = int(ranks // islands)
        routes.append(Route.of(Placement(int(ranks), int(islands), each, each, link), machine, siblings=False))
    columns = (np.array([getattr(route, name) for route in routes]) for name in Route.__dataclass_fields__)
    return Crossings(rows, Route(*columns))


def joined(parts: Sequence[Crossings]) -> Crossings:
    """Joins the rows of several clusters. Each cluster has about the same weight, however many rows it has."""
    rows, routes = [], []
    for part in parts:
        scale = (50 / len(part)) ** 0.5
        rows.append((part.rows.nbytes, part.rows.ranks, part.rows.islands, part.rows.seconds, part.rows.weight * scale))
        routes.append(part.route)
    route = Route(*(np.concatenate([getattr(route, name) for route in routes]) for name in Route.__dataclass_fields__))
    return Crossings(CollectiveRows(*(np.concatenate(column) for column in zip(*rows, strict=True))), route)


def _outside(kinds: Sequence[str], point: np.ndarray) -> OutsideStructure:
    values = np.exp(point[:-1]).reshape(-1, 4)
    return OutsideStructure(
        crossings=[
            Crossing(
                kind=kind,  # type: ignore[arg-type]
                base_us=round(base, 3),
                hop=round(hop, 4),
                inside_us=round(inside, 4),
                share=round(share, 5),
            )
            for kind, (base, hop, inside, share) in zip(kinds, values.tolist(), strict=True)
        ],
        congestion=round(float(np.exp(point[-1])), 4),
    )


def fit_crossing(op: str, measured: Crossings) -> OutsideStructure:
    start = CROSSINGS[op]
    kinds = [kind for kind, *_ in start]
    guess = np.append(np.log([values for _, *values in start]).ravel(), np.log(0.02))
    reach = np.full(len(guess), 4.0)
    for index, (kind, *_, share) in enumerate(start):
        if kind == "tree" and share >= 0.5:  # few islands do not determine it, and many depend on it
            reach[4 * index + 3] = TREE_REACH
    wanted = np.log(measured.rows.seconds)

    def error(point: np.ndarray) -> np.ndarray:
        answer: np.ndarray = np.log(_outside(kinds, point).seconds(op, measured.route, measured.rows.nbytes)) - wanted
        return answer

    return _outside(kinds, _solve(guess, error, measured.rows.weight, reach))


def fit_outside(
    op: str, structure: OutsideStructure, measured: Crossings, architectures: Sequence[str]
) -> OutsideModel:
    """A network's own correction of a structure. How far it may fall is determined at the measured placements."""
    rows, route = measured.rows, measured.route
    shapes = np.unique(np.stack([route.largest, route.inside, route.outside, route.latency]), axis=1).T

    def grows(nbytes: np.ndarray, islands: np.ndarray) -> np.ndarray:
        """The slowest growth among the shapes would be exact; the mean of the logarithms is close to it and smooth."""
        total = np.zeros(np.broadcast(nbytes, islands).shape)
        for each, inside, outside, latency in shapes:
            k = np.maximum(islands, 1.01)
            total += np.log(structure.seconds(op, Route(k * each, k, each, each, inside, outside, latency), nbytes))
        return np.exp(total / len(shapes))

    left = np.log(rows.seconds) - np.log(structure.seconds(op, route, rows.nbytes))
    correction = fit_lattice(
        [_axis(rows.nbytes), _axis(rows.islands)], [rows.nbytes, rows.islands], left,
        structure=grows, weights=rows.weight, smoothness=0.02,
    )  # fmt: skip
    return OutsideModel(
        structure=structure,
        correction=_between(correction).store(),
        architectures=sorted(set(architectures)),
        islands={
            int(each): (int(min(those)), int(max(those)))
            for each in np.unique(route.largest)
            for those in [route.islands[route.largest == each]]
        },
    )
