"""The recipes that are included with Maya, and the draft of a new recipe for a command.

Reading and checking a recipe is the task of `recipe.py`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from maya_core.errors import MayaError
from maya_core.search.recipe import CheckedRecipe, read_recipe
from maya_core.version import PACKAGE

# Options that people usually tune, recognized by their names.
TUNED = re.compile(
    r"(batch|micro|accum|parallel|tensor|pipeline|expert|shard|recompute|checkpoint|zero|stage|bucket)", re.IGNORECASE
)


NODES = ("--nnodes", "--standalone")  # options of torchrun that set the number of nodes


def folder() -> Path:
    """The folder of the recipes: next to the package in a checkout, inside it in an installation."""
    package = PACKAGE
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def shipped() -> list[Path]:
    return sorted(folder().glob("*.yaml"))


def find_recipe(name: str) -> CheckedRecipe:
    """Reads a recipe, given by its path or by the name of an included one."""
    path = Path(name)
    if path.is_file():
        return read_recipe(path)
    if path.suffix or "/" in name:
        raise MayaError(
            f"no recipe at {name}.", "`maya recipes` lists the included ones; `maya recipes new` writes a new one."
        )
    found = folder() / f"{name}.yaml"
    if found.is_file():
        return read_recipe(found)
    raise MayaError(
        f"there is no recipe '{name}'.",
        f"The included recipes are: {', '.join(one.stem for one in shipped())}. Or give the path of a file.",
    )


def new_recipe(command: list[str], gpu: str, nodes: int, gpus_per_node: int) -> str:
    """The draft of a recipe for a command. Numbers that people usually tune become knobs with half, the same and twice the value."""
    from maya_core.launch.run import without_secrets  # imports torch

    words, knobs, defaults = [], {}, {}
    shown = list(without_secrets(command))
    if Path(shown[0]).name == "torchrun" and not any(word.partition("=")[0] in NODES for word in shown):
        shown[1:1] = ["--nnodes", str(nodes)]
    for place, given in enumerate(shown):
        word = shlex.quote(given)
        name, equals, value = given.partition("=")
        if not equals and place and shown[place - 1].startswith("--") and "=" not in shown[place - 1]:
            name, value = shown[place - 1], given
        knob = re.sub(r"\W", "_", name.lstrip("-"))
        if value.isdigit() and int(value) > 0 and name.startswith("--"):
            if name.lstrip("-") in ("nnodes", "nproc-per-node", "nproc_per_node", "num_nodes", "num_gpus"):
                place_holder = "{nodes}" if name.lstrip("-") in ("nnodes", "num_nodes") else "{gpus_per_node}"
                word = f"{name}={place_holder}" if equals else place_holder
            elif TUNED.search(name) and knob not in knobs:
                knobs[knob] = sorted({max(1, int(value) // 2), int(value), int(value) * 2})
                defaults[knob] = int(value)
                word = f"{name}={{{knob}}}" if equals else f"{{{knob}}}"
        words.append(word)
    lines = [
        yaml.safe_dump({"about": shlex.join(shown)[:100]}, width=1000).strip(),
        "",
        "command: >",
        "  " + " ".join(words),
        "",
        f"cluster: {{gpu: {gpu}, nodes: {nodes}, gpus_per_node: {gpus_per_node}}}",
        "",
        "# The knobs. Add `memory: rises` or `falls` if memory certainly does so from each value to the next: a configuration",
        "# that does not fit then rules out others, which need not run. `maya help recipes` describes every field.",
        "space:" if knobs else "space: {}",
        *(f"  {knob}: {yaml.safe_dump(values, default_flow_style=True).strip()}" for knob, values in knobs.items()),
    ]
    if defaults:
        lines += ["", f"default: {yaml.safe_dump(defaults, default_flow_style=True).strip()}"]
    if batches := [knob for knob in knobs if "batch" in knob]:
        lines += ["", "# A guess: the samples of all GPUs per step.", f"samples_per_step: gpus * {batches[0]}"]
        lines += [
            "",
            "# The batch size varies, so step times are not comparable. The search maximizes samples per dollar instead.",
        ]
        lines += ["objective: samples_per_dollar"]
    else:
        lines += ["", "objective: step_time"]
    lines += ["constraints: {memory_margin: 3%}", "", "# The clusters that `maya size` tries."]
    lines += [f"sizes: {{gpus: [{gpu}], nodes: [{nodes}, {2 * nodes}, {4 * nodes}]}}"]
    return "\n".join(lines) + "\n"
