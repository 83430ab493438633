"""Finds the cheapest cluster that finishes a training by a deadline and within a budget.

For every number of nodes the recipe's program is emulated once; other GPUs are predicted from its trace where that is possible.
Executors run the emulations; `launch_files.py` writes the files that start the job on the chosen cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.cluster import cluster
from maya_core.request import Request
from maya_core.search.executors import Executor
from maya_core.search.recipe import CLUSTER, CheckedRecipe, Point, Recipe
from maya_core.search.study import Goal
from maya_core.search.trial import Outcome, task_of


@dataclass(frozen=True)
class Size:
    """A cluster, and how long the training takes and what it costs there."""

    gpu: str
    nodes: int
    gpus_per_node: int
    point: Point
    outcome: Outcome
    broken: str | None
    seconds: float | None
    usd: float | None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu}"


def sized(job: CheckedRecipe, gpu: str, nodes: int) -> CheckedRecipe:
    """The recipe on another cluster: with the usual node of that GPU, and at most as many GPUs per node as the recipe uses."""
    spec = job.cluster_of(job.default)
    board = find_gpu(gpu).name
    kept = spec.model_dump() if board == spec.board else {}  # node, network and price belong to the recipe's own GPU
    machine = cluster(board, node=kept.get("node"), network=kept.get("network"))
    per_node = min(int(job.values_of(job.default)["gpus_per_node"]), machine.node.gpus_per_node)
    options = kept | {"gpu": board, "nodes": nodes, "gpus_per_node": per_node}
    settled = options | {"node": machine.node.name, "network": machine.network.name}
    raw = job.recipe.model_dump()
    for name in CLUSTER:  # a knob that varies the cluster gets one value
        if name in job.knobs:
            raw["space"][name] |= {"values": [settled[name]], "memory": None, "time": None, "when": None}
            raw["default"].pop(name, None)
    return job.on(Recipe.model_validate(raw | {"cluster": options}))


def walk(
    job: CheckedRecipe,
    gpus: list[str],
    nodes: list[int],
    goal: Goal,
    folder: Path,
    executor: Executor,
    *,
    point: Point | None = None,
    given: Request | None = None,
    on_size: Callable[[Size], None] = lambda _: None,
) -> list[Size]:
    """Predicts the training on all clusters and returns them, the cheapest one that works first.

    Combinations that the recipe's `require` excludes are included as impossible.
    """
    if not gpus or not nodes:
        raise MayaError(
            f"{job.name} does not define which clusters to try.",
            "Give --gpu h100 --gpu h200 and --nodes 1,2,4, or `sizes` in the recipe.",
        )
    found: list[Size] = []
    for count in nodes:
        waves = [gpus[:1], gpus[1:]]  # the others are predicted from the trace of the first
        for wave in waves:
            tasks, jobs = {}, {}
            for number, gpu in enumerate(wave):
                recipe = sized(job, gpu, count)
                chosen = recipe.canonical(point or recipe.default)
                if (problem := recipe.violated(chosen)) is not None:
                    found.append(_impossible(recipe, gpu, count, chosen, problem))
                    on_size(found[-1])
                    continue
                jobs[number] = (recipe, chosen)
                task = task_of(recipe, chosen, folder, given)
                tasks[number] = task.model_copy(update={"keep_traces": True})
            for number, outcome in executor.outcomes(tasks) if tasks else ():
                recipe, chosen = jobs[number]
                spec = recipe.recipe.cluster
                found.append(
                    Size(
                        wave[number], count, spec.gpus_per_node or 1, chosen, outcome, goal.broken(outcome),
                        goal.training_s(outcome), goal.training_usd(outcome),
                    )
                )  # fmt: skip
                on_size(found[-1])
    return sorted(found, key=_order)


def _order(size: Size) -> tuple[bool, float, float, str]:
    never = float("inf")
    return size.broken is not None, size.usd or never, size.seconds or never, size.name


def _impossible(job: CheckedRecipe, gpu: str, nodes: int, point: Point, problem: str) -> Size:
    outcome = Outcome(status="failed", why=problem)
    per_node = job.recipe.cluster.gpus_per_node or 1
    return Size(gpu, nodes, per_node, point, outcome, f"cannot run: {problem}", None, None)
