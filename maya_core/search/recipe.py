"""Reads recipes: jobs as YAML files, with a command that has placeholders, a cluster, knobs, and conditions on them.

Recipes are checked strictly: a mistake is reported with its file and line before anything runs. Choosing configurations is the
task of `study.py`, running them that of `trial.py`.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu, find_network, find_node
from maya_core.hardware.units import Share
from maya_core.installation import how_to_install, missing
from maya_core.request import ClusterOptions, PredictionOptions, Request
from maya_core.search.expression import Expression, Value

# Knobs with these names set the cluster. A program runs the same on other hardware, so that is predicted from its trace.
HARDWARE = ("gpu", "node", "network")
CLUSTER = (*HARDWARE, "nodes", "gpus_per_node")
MOST_POINTS = 1_000_000
PLACE = re.compile(r"\{(\w+)\}")
DESCRIBED = "`maya help recipes` describes every field."

Point = dict[str, Value]  # a configuration: the value of every knob, by name


class RecipePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# Options that a recipe may set. `samples_per_step` and `tokens_per_step` are fields of their own, because they are expressions.
RECIPE_OPTIONS = PredictionOptions.model_fields.keys() - {"samples_per_step", "tokens_per_step", "profile", "hardware"}


class ClusterSpec(ClusterOptions):
    """The hardware that the job runs on, unless a knob changes it."""

    @property
    def board(self) -> str | None:
        """The GPU's name in the catalog; None if neither a GPU nor a node is given."""
        return self.gpu_name if self.gpu is not None or self.node is not None else None


def _shorthand(value: object) -> object:
    return {"values": value} if isinstance(value, list) else value


class Knob(RecipePart):
    """A setting that may vary. Its value is put into the command; with values of the form `name: words`, the words are."""

    values: list[Value] | dict[str, str]
    when: str | None = None  # an expression; if it is false, the knob stays at its first value
    # What certainly happens from each value to the next, all else equal. The search skips configurations because of it.
    memory: Literal["rises", "falls"] | None = None
    time: Literal["rises", "falls"] | None = None
    about: str = ""

    @property
    def choices(self) -> list[Value]:
        return list(self.values)

    def words(self, value: Value) -> str:
        return self.values[str(value)] if isinstance(self.values, dict) else str(value)


class Constraints(RecipePart):
    """Limits that a configuration has to keep, besides fitting into memory."""

    memory_margin: Share = 0.0  # the share of a GPU's memory that must stay free
    max_step_time_s: PositiveFloat | None = None
    max_usd_per_1k_steps: PositiveFloat | None = None


class SizeChoices(RecipePart):
    """The clusters that `maya size` tries, unless its options name others."""

    gpus: list[str] = []
    nodes: list[PositiveInt] = []


class Published(RecipePart):
    """A figure that somebody measured with this job and published."""

    figure: str  # a field of the prediction: step_time_s, tokens_per_s_per_gpu, mfu, ...
    value: float
    at: Point = {}  # the values of the knobs
    source: str


Knobs = dict[str, Annotated[Knob, BeforeValidator(_shorthand)]]


class Recipe(RecipePart):
    """The content of the file. `docs/recipes.md` describes every field."""

    about: str
    command: str
    cluster: ClusterSpec
    steps: Annotated[int, Field(ge=2)] = 3
    space: Knobs = {}
    default: Point = {}  # the configuration that people would start with; other knobs are at their first value
    constants: dict[str, Value] = {}
    values: dict[str, str] = {}  # expressions of knobs, constants, the cluster and earlier values, by name
    require: list[str] = []
    samples_per_step: str | None = None
    tokens_per_step: str | None = None
    constraints: Constraints = Constraints()
    objective: Literal["step_time", "cost", "tokens_per_dollar", "samples_per_dollar"] = "step_time"
    sizes: SizeChoices = SizeChoices()
    published: list[Published] = []
    environment: dict[str, str] = {}
    packages: list[
        Annotated[str, Field(pattern=r"^[\w.-]+$")]
    ] = []  # Python packages that the program needs besides torch
    preload: list[str] | None = None  # modules; default: those that the script imports
    options: PredictionOptions = PredictionOptions()  # written as fields of the recipe: `attention: flash3`

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given = {name: value for name, value in raw.items() if name in RECIPE_OPTIONS}
        rest = {name: value for name, value in raw.items() if name not in RECIPE_OPTIONS}
        return {**rest, "options": {**dict(raw.get("options") or {}), **given}}


class Program(BaseModel):
    """What one configuration runs. Equal programs have equal traces."""

    model_config = ConfigDict(frozen=True)

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    gpus_per_node: int
    nodes: int
    steps: int

    @property
    def typed(self) -> str:
        """The command as one would type it on the cluster."""
        environment = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*environment, shlex.join(self.words)])


class CheckedRecipe:
    """A recipe that has been checked, with its file."""

    def __init__(self, recipe: Recipe, path: Path, lines: dict[tuple[Any, ...], int], *, checked: bool = True) -> None:
        self.recipe, self.path, self._lines = recipe, path, lines
        self.name = path.stem
        self.knobs = recipe.space
        self._values = {name: self._expression(text, "values", name) for name, text in recipe.values.items()}
        self._require = [self._expression(text, "require", at) for at, text in enumerate(recipe.require)]
        self._when = {
            name: self._expression(knob.when, "space", name, "when") for name, knob in self.knobs.items() if knob.when
        }
        self._per_step = {
            name: self._expression(text, name)
            for name in ("samples_per_step", "tokens_per_step")
            if (text := getattr(recipe, name)) is not None
        }
        if checked:
            self._check()

    def on(self, recipe: Recipe) -> CheckedRecipe:
        """The same file with another recipe in it, such as one for another cluster."""
        return CheckedRecipe(recipe, self.path, self._lines, checked=False)

    # ---- points ----

    @cached_property
    def default(self) -> Point:
        return {name: self.recipe.default.get(name, knob.choices[0]) for name, knob in self.knobs.items()}

    @property
    def size(self) -> int:
        return math.prod(len(knob.choices) for knob in self.knobs.values())

    def points(self) -> Iterator[Point]:
        """All configurations; the last knob changes fastest."""
        for choice in itertools.product(*(knob.choices for knob in self.knobs.values())):
            yield dict(zip(self.knobs, choice, strict=True))

    def canonical(self, point: Mapping[str, Value]) -> Point:
        """The same configuration, with every knob that has no effect in it at its first value."""
        found = dict(point)
        for name, when in self._when.items():
            if not when(self._known(found, only_knobs=True)):
                found[name] = self.knobs[name].choices[0]
        return found

    def values_of(self, point: Mapping[str, Value]) -> dict[str, Any]:
        """Everything that a placeholder in the command or an expression may name."""
        return self._known(self.canonical(point))

    def violated(self, point: Mapping[str, Value]) -> str | None:
        """The condition of `require` that is not met; None if the configuration is possible."""
        try:
            values = self.values_of(point)
            return next((one.text for one in self._require if not one(values)), None)
        except ValueError as error:
            return str(error)

    def cluster_of(self, point: Mapping[str, Value]) -> ClusterSpec:
        """The cluster of a configuration. If a knob chooses the GPU or the node, the recipe's own node, network and price do not apply."""
        chosen = {name: value for name, value in self.canonical(point).items() if name in CLUSTER}
        own = self.recipe.cluster
        if not {"gpu", "node"} & chosen.keys():
            return own.model_copy(update=chosen)
        other = own.model_copy(update=dict.fromkeys(HARDWARE) | chosen)
        return other if own.board in (None, other.board) else other.model_copy(update={"price_per_gpu_hour": None})

    def program(self, point: Mapping[str, Value]) -> Program:
        values = self.values_of(point)
        shown = {name: str(value) for name, value in values.items()}
        for name, knob in self.knobs.items():
            shown[name] = knob.words(values[name])
        words = shlex.split(PLACE.sub(lambda found: shown[found[1]], self.recipe.command))
        return Program(
            words=tuple(words),
            environment=tuple(sorted(self.recipe.environment.items())),
            gpus_per_node=int(values["gpus_per_node"]),
            nodes=int(values["nodes"]),
            steps=self.recipe.steps,
        )

    def per_step(self, point: Mapping[str, Value]) -> dict[str, float]:
        """Samples and tokens per step, if the recipe defines them."""
        values = self.values_of(point)
        return {name: float(expression(values)) for name, expression in self._per_step.items()}

    def request(self, point: Mapping[str, Value]) -> Request:
        """The request that emulates and predicts a configuration."""
        cluster = self.cluster_of(point).model_dump(exclude_none=True)
        options = self.recipe.options.model_dump(exclude_unset=True)
        return Request.of(**{**cluster, **options, **self.per_step(point), "steps": self.recipe.steps})

    # ---- checking ----

    def _known(self, point: Mapping[str, Value], only_knobs: bool = False) -> dict[str, Any]:
        spec = self.recipe.cluster.model_dump(exclude_none=True) | {k: v for k, v in point.items() if k in CLUSTER}
        node = spec.get("node") or None
        per_node = spec.get("gpus_per_node") or (find_node(str(node)).gpus_per_node if node else 1)
        known: dict[str, Any] = {
            "here": str(self.path.resolve().parent),
            **self.recipe.constants,
            "nodes": spec.get("nodes") or 1,
            "gpus_per_node": per_node,
            "gpus": int(spec.get("nodes") or 1) * int(per_node),
            **point,
        }
        if not only_knobs:
            for name, expression in self._values.items():
                known[name] = expression(known)
        return known

    def _expression(self, text: str, *where: Any) -> Expression:
        try:
            return Expression(text)
        except ValueError as error:
            raise self._wrong(str(error), *where) from error

    def _wrong(self, problem: str, *where: Any, advice: str = "") -> MayaError:
        return MayaError(
            f"{self.path}, line {line_of(self._lines, where)}: {problem}.",
            advice or DESCRIBED,
        )

    def _check(self) -> None:
        self._check_space()
        self._check_names()
        self._check_hardware()
        self._check_default()
        self._check_script()

    def _check_space(self) -> None:
        for name, knob in self.knobs.items():
            where = ("space", name)
            if (
                not name.isidentifier()
                or name in ("here", "gpus")
                or name in self.recipe.values
                or name in self.recipe.constants
            ):
                raise self._wrong(f"'{name}' cannot be the name of a knob", *where)
            if not knob.choices:
                raise self._wrong(f"the knob '{name}' has no values", *where)
            if len({str(one) for one in knob.choices}) < len(knob.choices):
                raise self._wrong(f"a value of the knob '{name}' occurs twice", *where)
        if self.size > MOST_POINTS:
            raise self._wrong(f"the space has {self.size:,} points; the maximum is {MOST_POINTS:,}", "space")

    def _check_names(self) -> None:
        """Checks that every name is defined before it is used."""
        base = {"here", "nodes", "gpus_per_node", "gpus", *self.knobs, *self.recipe.constants}
        for name, when in self._when.items():
            self._check_known(when.names, base, "space", name, "when")
        known = set(base)
        for name, expression in self._values.items():
            self._check_known(expression.names, known, "values", name)
            known.add(name)
        for at, expression in enumerate(self._require):
            self._check_known(expression.names, known, "require", at)
        for name, expression in self._per_step.items():
            self._check_known(expression.names, known, name)
        self._check_known(set(PLACE.findall(self.recipe.command)), known, "command")
        used = set(PLACE.findall(self.recipe.command)).union(
            *(each.names for each in (*self._values.values(), *self._when.values())), CLUSTER
        )
        for name in self.knobs:
            if name not in used:
                raise self._wrong(
                    f"the knob '{name}' changes nothing", "space", name, advice=f"Put {{{name}}} into the command."
                )
        for name in self.recipe.default:
            if name not in self.knobs:
                raise self._wrong(
                    f"there is no knob '{name}'",
                    "default",
                    name,
                    advice=f"The knobs are: {', '.join(self.knobs) or 'none'}.",
                )
            if self.recipe.default[name] not in self.knobs[name].choices:
                raise self._wrong(
                    f"{self.recipe.default[name]} is not a value of the knob '{name}'", "default", name,
                    advice=f"Its values are: {', '.join(map(str, self.knobs[name].choices))}.",
                )  # fmt: skip

    def _check_known(self, names: set[str], known: set[str], *where: Any) -> None:
        if unknown := sorted(names - known):
            raise self._wrong(
                f"there is no '{unknown[0]}'",
                *where,
                advice=f"The defined names are: {', '.join(sorted(known - {'here'}))}.",
            )

    def _check_hardware(self) -> None:
        finders = {"gpu": find_gpu, "node": find_node, "network": find_network}
        for name, find in finders.items():
            if (given := getattr(self.recipe.cluster, name)) is not None:
                self._found(find, given, "cluster", name)
            for value in self.knobs[name].choices if name in self.knobs else ():
                self._found(find, str(value), "space", name)
        if (
            self.recipe.cluster.gpu is None
            and self.recipe.cluster.node is None
            and not {"gpu", "node"} & self.knobs.keys()
        ):
            raise self._wrong("the cluster has no GPU", "cluster", advice="Give gpu: h100, or node: p5.48xlarge.")

    def _found(self, find: Any, name: str, *where: Any) -> None:
        try:
            find(name)
        except MayaError as error:
            raise self._wrong(error.problem.rstrip("."), *where, advice=error.advice) from error

    def _check_default(self) -> None:
        problem = self.violated(self.default)
        if problem is None:
            return
        if all(self.violated(point) is not None for point in itertools.islice(self.points(), 20_000)):
            raise self._wrong(
                f"no configuration of the space is possible: '{problem}' never holds together with the other conditions",
                "require",
            )
        raise self._wrong(
            f"the default configuration is not possible: '{problem}' does not hold", "default" if self.recipe.default else "space",
            advice="Give a `default` that meets all conditions in `require`.",
        )  # fmt: skip

    def _check_script(self) -> None:
        for word in self.program(self.default).words:
            if word.endswith(".py") and not Path(word).exists():
                raise self._wrong(
                    f"the script {word} does not exist", "command",
                    advice="Paths are relative to the current folder; {here} stands for the folder of the recipe.",
                )  # fmt: skip

    # ---- whether it can run here; a recipe that cannot is still a correct one ----

    @property
    def missing_packages(self) -> list[str]:
        """Packages that its program needs and that are not installed."""
        return missing(self.recipe.packages)

    def check_can_run(self) -> None:
        """Raises if a package or the command of its program is missing."""
        if absent := self.missing_packages:
            names = " and ".join(filter(None, (", ".join(absent[:-1]), absent[-1])))
            are = f"{names}, which {'is' if len(absent) == 1 else 'are'} not installed"
            raise MayaError(f"the recipe {self.name} needs {are}.", f"Run: {how_to_install(packages=absent)}")
        program = self.program(self.default).words[0]
        if Path(program).exists() or program in ("torchrun", "python"):
            return
        from maya_core.launch.run import command_not_found, find_program

        if find_program(program) is None:
            error = command_not_found(program)
            raise self._wrong(error.problem.rstrip("."), "command", advice=error.advice)


def read_recipe(path: Path) -> CheckedRecipe:
    """Reads a recipe. A mistake raises a MayaError that names the line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise MayaError(f"no recipe at {path}: {error.strerror}.", "`maya recipes` lists the included ones.") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        raise MayaError(
            f"{path}{at}: this is not YAML ({getattr(error, 'problem', error)}).", "Correct that line."
        ) from error
    if not isinstance(raw, dict):
        raise MayaError(f"{path}, line 1: a recipe consists of fields.", DESCRIBED)
    lines = _lines_of(node)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = tuple(first["loc"])
        where = where[1:] if where[:1] == ("options",) else where
        field = ".".join(str(part) for part in where if not str(part).startswith(("function-", "list[", "dict[")))
        raise MayaError(f"{path}, line {line_of(lines, where)}: {field}: {first['msg']}.", DESCRIBED) from error
    return CheckedRecipe(recipe, path, lines)


def _lines_of(node: Any, where: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], int]:
    """The line of every field, by its path."""
    found = {where: node.start_mark.line + 1} if node is not None else {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*where, key.value)
            found |= _lines_of(value, place)
            found[place] = key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            found |= _lines_of(value, (*where, at))
    return found


def line_of(lines: dict[tuple[Any, ...], int], where: tuple[Any, ...]) -> int:
    """The line of a field, or of the nearest field that contains it."""
    while where and where not in lines:
        where = where[:-1]
    return lines.get(where, 1)
