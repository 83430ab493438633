"""Selects the measurements for the collective profile of each GPU and network, fits it, and computes its errors on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.collective_structure import (
    OPS,
    Inside,
    InsideModel,
    InsideStructure,
    Outside,
    OutsideModel,
    OutsideStructure,
    link_work,
    wire_share,
)
from maya_core.predictor.fitting import collective_sources as sources
from maya_core.predictor.fitting.collective_models import (
    Crossings,
    crossings,
    fit_crossing,
    fit_inside,
    fit_outside,
    joined,
)
from maya_core.predictor.fitting.collective_sources import CollectiveRows
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.profile import Profile, ProfileSource

LARGE = 2**20
SIZES, GROUPS, CLUSTER, LARGEST = "unseen sizes", "unseen group sizes", "unseen cluster", "largest tenth"
ODD = ("l40s",)  # two of its GPUs share 20 GB/s, four share 5: neither predicts the other, so tables list it separately

GPUS = tuple(dict.fromkeys([*sources.INSIDE.values(), *sources.PAIRS.values()]))
# The GPU with whose structure a fit starts, so that what a GPU's rows do not determine is like its nearest relative.
RELATIVES = {"b200": "h100", "b300": "b200", "gb200": "b200", "gb300": "gb200"}

# Clusters whose rows determine one structure; each network has its own correction.
KINDS = {"infiniband": ("sophia", "oci", "h100", "nvl72", "vidur-h100"), "slingshot": ("polaris",)}
# The source of the correction, by profile and prefix of the model's name. `racks` are islands of several nodes.
CORRECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "infiniband-hdr": {"network": ("sophia",)},
    "infiniband-ndr": {"network": ("h100", "vidur-h100"), "racks": ("nvl72",)},
    "roce-200": {"network": ("oci",)},
    "slingshot-11": {"network": ("polaris",)},
}


def fit(data: Path, *, evaluate: bool = True) -> Iterator[tuple[Profile, list[Line]]]:
    """Yields a profile for every GPU and every network with measurements, with its held-out errors."""
    structures: dict[tuple[str, str, str], InsideStructure] = {}
    for gpu in GPUS:
        yield _gpu_profile(data, gpu, structures, evaluate)
    for network in CORRECTIONS:
        yield _network_profile(data, network, evaluate)


def _lines(
    where: str, what: str, name: str, model: str, rows: CollectiveRows, predicted: np.ndarray, bound: np.ndarray
) -> Iterator[Line]:
    """One line for large and one for small sizes, because their targets differ."""
    large = rows.nbytes >= LARGE
    small = f"{where} < 1 MB, {what}"
    for label, those in ((f"{where} >= 1 MB, {what}", large), (small, ~large)):
        if those.any():
            yield Line("collectives", label, name, model, rows.seconds[those], predicted[those], bound[those])


# Within islands


@dataclass(frozen=True)
class _Island:
    gpu: str
    link: str
    op: str
    rate: float
    nvls: bool
    relative: InsideStructure | None

    def model(self, rows: CollectiveRows) -> InsideModel:
        return fit_inside(self.op, self.rate, self.nvls, rows, self.relative)

    def lines(self, rows: CollectiveRows) -> Iterator[Line]:
        name = f"{self.link} {self.op}"
        folds = [(SIZES, by_key(np.round(np.log2(rows.nbytes))))]
        if len(set(rows.ranks)) > 1:
            groups = f"{GROUPS} of {self.gpu}" if self.gpu in ODD else GROUPS
            folds += [(groups, rows.ranks == ranks) for ranks in np.unique(rows.ranks)]
        for label, out in folds:
            yield from _lines("intra-node", label, self.gpu, name, rows[out], *self._predict(rows, out))
        out = largest_tenth(rows.nbytes)
        yield Line(
            "collectives", f"intra-node, {LARGEST}", self.gpu, name, rows[out].seconds, *self._predict(rows, out)
        )

    def _predict(self, rows: CollectiveRows, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        held = rows[out]
        predicted, _ = Inside(self.model(rows[~out])).seconds(self.op, self.rate, held.nbytes, held.ranks)
        return predicted, held.nbytes * wire_share(self.op, held.ranks) / self.rate


def _gpu_profile(
    data: Path, gpu: str, structures: dict[tuple[str, str, str], InsideStructure], evaluate: bool
) -> tuple[Profile, list[Line]]:
    machine, lines, used, models = cluster(gpu), list[Line](), list[ProfileSource](), {}
    for (link, op), rows in sources.inside(data, gpu).items():
        rate = machine.nvlink_bytes_per_s if link == "nvlink" else machine.pcie_bytes_per_s
        relative = structures.get((RELATIVES.get(gpu, ""), link, op))
        island = _Island(gpu, link, op, rate, machine.nvls, relative)
        model = island.model(rows)
        structures[gpu, link, op] = model.structure
        models[f"{link} {op}"] = model.model_dump(exclude_none=True)
        used.append(ProfileSource(name=sources.source_of(gpu, link, op), rows=len(rows), note=f"{link} {op}"))
        if evaluate:
            lines += island.lines(rows)
    return _profile(gpu, used, lines, models), lines


def _profile(name: str, used: list[ProfileSource], lines: list[Line], models: dict[str, dict[str, Any]]) -> Profile:
    return Profile(family="collectives", gpu=name, sources=used, held_out=summarize(lines), models=models)


# Across networks


def _kind_of(name: str) -> tuple[str, ...]:
    return next(names for names in KINDS.values() if name in names)


def _measured(data: Path, name: str) -> dict[str, Crossings]:
    machine = sources.clusters()[name].machine
    return {op: crossings(rows, machine) for op, rows in sources.outside(data, name).items()}


def _structure(data: Path, op: str, kind: tuple[str, ...], own: dict[str, Crossings]) -> OutsideStructure:
    """The structure of a kind of network, with `own` rows instead of those of a cluster."""
    parts = [own[name] if name in own else _measured(data, name).get(op) for name in kind]
    return fit_crossing(op, joined([part for part in parts if part is not None and len(part)]))


def _network_model(data: Path, op: str, own: dict[str, Crossings]) -> OutsideModel:
    structure = _structure(data, op, _kind_of(next(iter(own))), own)
    architectures = [sources.clusters()[name].machine.gpu.architecture for name in own]
    return fit_outside(op, structure, joined([part for part in own.values() if len(part)]), architectures)


def _network_profile(data: Path, network: str, evaluate: bool) -> tuple[Profile, list[Line]]:
    lines, used, models = list[Line](), list[ProfileSource](), {}
    for prefix, names in CORRECTIONS[network].items():
        measured = {name: _measured(data, name) for name in names}
        for op in OPS:
            own = {name: by_op[op] for name, by_op in measured.items() if op in by_op}
            if not own:
                continue
            model = f"{prefix} {op}"
            models[model] = _network_model(data, op, own).model_dump(exclude_none=True)
            for name, part in own.items():
                used.append(
                    ProfileSource(
                        name=f"{sources.log_of(name)}: {sources.clusters()[name].note}", rows=len(part), note=model
                    )
                )
                if evaluate:
                    lines += _seen_network_lines(data, network, op, model, name, own)
                    lines += _unseen_cluster_lines(data, network, op, model, name, part)
    return _profile(network, used, lines, models), lines


def _bound(op: str, part: Crossings, machine: Cluster) -> np.ndarray:
    _, _, within, across = link_work(op, "ring", part.route)
    ports = part.route.outside / machine.network.efficiency
    answer: np.ndarray = part.rows.nbytes * np.maximum(within / machine.nvlink_bytes_per_s, across / ports)
    return answer


def _seen_network_lines(
    data: Path, network: str, op: str, model: str, name: str, own: dict[str, Crossings]
) -> Iterator[Line]:
    """Errors on held-out sizes and groups of a cluster, of which other sizes and groups are seen."""
    part, machine = own[name], sources.clusters()[name].machine
    rows = part.rows
    groups = np.unique(np.stack([rows.ranks, rows.islands]), axis=1).T
    folds = [(f"inter-node, {LARGEST}", largest_tenth(rows.nbytes))]
    if len(rows) >= 10:
        folds.append((SIZES, by_key(np.round(np.log2(rows.nbytes)))))
    if len(groups) > 1:
        folds += [(GROUPS, (rows.ranks == ranks) & (rows.islands == islands)) for ranks, islands in groups]
    for label, out in folds:
        if not out.any() or out.all():
            continue
        fitted = Outside(_network_model(data, op, {**own, name: part[~out]}))
        held = part[out]
        predicted, _ = fitted.seconds(op, held.route, held.rows.nbytes)
        bound = _bound(op, held, machine)
        if LARGEST in label:
            yield Line("collectives", label, network, model, held.rows.seconds, predicted, bound)
        else:
            yield from _lines("inter-node", label, network, model, held.rows, predicted, bound)


def _unseen_cluster_lines(data: Path, network: str, op: str, model: str, name: str, part: Crossings) -> Iterator[Line]:
    """Errors on a whole held-out cluster, predicted from its catalog entry and the coefficients of the others on similar networks."""
    others = [other for other in KINDS["infiniband"] if other != name]
    lent = [found[told] for other in others for told in _stand_ins(op) if told in (found := _measured(data, other))]
    if lent:
        predicted = fit_crossing(op, joined(lent)).seconds(op, part.route, part.rows.nbytes)
        bound = _bound(op, part, sources.clusters()[name].machine)
        where = "inter-node" if network != "slingshot-11" else "inter-node (Slingshot)"
        yield from _lines(where, CLUSTER, network, model, part.rows, predicted, bound)


def _stand_ins(op: str) -> tuple[str, ...]:
    return ("reduce_scatter", "all_gather") if op == "reduce_scatter" else (op,)
