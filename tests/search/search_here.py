"""Recipes and searches for the tests."""

from __future__ import annotations

import textwrap
from pathlib import Path

from maya_core.search.recipe import CheckedRecipe, read_recipe
from maya_core.search.study import Goal, Plan, Search
from maya_core.search.trial import task_of

PROGRAM = Path(__file__).parent / "mlp.py"

# Millions of rows, so that some do not fit on 22 GiB: 4 GiB an activation of the largest.
MLP = """
    about: A small network.
    command: python {program} --batch {{micro}} --accumulate {{accumulate}} --width {{width}} {{recompute}}
    cluster: {{gpu: l4, gpus_per_node: 1}}
    steps: 2
    constants: {{rows: 16777216}}
    space:
      width: [64, 128]
      micro: {{values: [1048576, 2097152, 4194304, 8388608, 16777216], memory: rises}}
      recompute: {{values: {{"no": "", "yes": --recompute}}, memory: falls}}
    values: {{accumulate: rows // micro}}
    require: [rows % micro == 0]
    samples_per_step: rows
    default: {{micro: 4194304}}
"""


def write(folder: Path, text: str = MLP, name: str = "mlp") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(textwrap.dedent(text).format(program=PROGRAM))
    return path


def job(folder: Path, text: str = MLP) -> CheckedRecipe:
    return read_recipe(write(folder, text))


def search(job: CheckedRecipe, folder: Path, goal: Goal | None = None, **plan: object) -> Search:
    return Search(job, goal or Goal(), Plan(**plan), folder, lambda point: task_of(job, point, folder))  # type: ignore[arg-type]
