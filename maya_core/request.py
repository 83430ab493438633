"""Every option a user can give, once: its type, its default, its help and its limits.

The options of the commands (`command_options.py`), the arguments of plugins and callbacks, the `--emulate-...` flags of launchers, the
variables `MAYA_...`, what emulated processes receive, and the fields of recipes and trials are all made from these classes. To
add an option, add a field here and use it where it matters. Options that a tracker brings along (an experiment's name, say) are declared
by the tracker's package: see `tracking.py`.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from annotated_types import Ge, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu, find_node
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.hardware.host_costs import Host
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION, SLOWER_THAN_FLASH2, check_attention
from maya_core.trace.run_folder import check_name
from maya_core.tracking import tracker_options

MOST_GPUS_PER_NODE = 64


@dataclass(frozen=True)
class Option:
    """How an option is shown to people. Its type, default and limits are the field's own."""

    help: str
    metavar: str | None = None
    text: str | None = None  # the default as people write it, for options whose value is parsed from text
    default: str | None = None  # a default in words, where it depends on other things
    in_plugins: bool = True  # whether plugins and callbacks take it, too


def _steps(value: object) -> object:
    """A number of steps; None lets the program run to its end, which people write as 'all'."""
    if value in (None, "all"):
        return None
    if isinstance(value, bool) or not str(value).isdigit() or int(str(value)) < 1:
        raise ValueError("not a number of steps. Give a number from 1, or 'all' to let the program run to its end")
    return int(str(value))


def _ranks(value: object) -> object:
    """Ranks by number; () for those that are needed ('auto'), None for all of them."""
    if value in ("auto", "all"):
        return () if value == "auto" else None
    if isinstance(value, str):
        if not re.fullmatch(r"\d+(,\d+)*", value):
            raise ValueError("not ranks. Give 'auto', 'all', or numbers separated by commas: 0,5,7")
        return tuple(sorted({int(rank) for rank in value.split(",")}))
    return value


def _assumed(value: object) -> object:
    """Values by the line that reads them: 'train.py:88=0.25,model.py:12=3'."""
    if not isinstance(value, str):
        return value
    found = {}
    for part in value.split(",") if value else []:
        place, _, number = part.strip().rpartition("=")
        if not re.fullmatch(r".+:\d+", place) or not _is_number(number):
            raise ValueError("not FILE:LINE=VALUE. Give the line that reads the value, and the value: train.py:88=0.25")
        found[place] = float(number)
    return found


def _place(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r".+:\d+", value):
        raise ValueError("not FILE:LINE. Give a line of the program at which a step ends: train.py:120")
    return value


def _run_name(value: object) -> object:
    if isinstance(value, str):
        check_name(value)
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


class Options(BaseModel):
    """A group of options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterOptions(Options):
    """The hardware that the job will run on."""

    gpu: Annotated[
        str | None,
        Option("The GPU to emulate. `maya gpus` lists them.", default=f"{DEFAULT_GPU}, or the GPU of --node"),
    ] = None
    nodes: Annotated[
        int | None,
        Field(ge=1),
        Option("The number of nodes. torchrun's --nnodes sets it as well."),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        Field(ge=1, le=MOST_GPUS_PER_NODE),
        Option("GPUs of each node, all of them visible to the program.", default="what the launcher asks for, or 1"),
    ] = None
    node: Annotated[
        str | None, Option("A kind of node, such as a cloud's instance type. `maya gpus --nodes` lists them.")
    ] = None
    network: Annotated[
        str | None,
        Option("The network between nodes. `maya gpus --networks` lists them.", default="the node's own"),
    ] = None
    price_per_gpu_hour: Annotated[
        float | None,
        Field(ge=0.0001),
        Option("What one GPU costs you per hour, in US dollars.", default="list prices"),
    ] = None

    @property
    def gpu_name(self) -> str:
        """The GPU by the catalog's name."""
        if self.gpu is not None:
            return find_gpu(self.gpu).name
        return find_node(self.node).gpu if self.node is not None else DEFAULT_GPU


class EmulationOptions(Options):
    """What is run, and how far."""

    steps: Annotated[
        int | None,
        BeforeValidator(_steps),
        Option(
            "Stop after this many optimizer steps; 'all' lets the program run to its end.", text="3", metavar="N|all"
        ),
    ] = 3
    ranks: Annotated[
        tuple[int, ...] | None,
        BeforeValidator(_ranks),
        Option(
            "Which ranks to emulate: 'auto' (rank 0, ranks that it exchanges messages with, and one of each kind that the program treats differently), 'all', or numbers such as 0,5,7.",
            text="auto",
            metavar="RANKS",
            in_plugins=False,
        ),
    ] = ()
    step_at: Annotated[
        str | None,
        BeforeValidator(_place),
        Option(
            "A training step ends whenever the program comes to this line.",
            metavar="FILE:LINE",
            default="when the optimizers have stepped",
        ),
    ] = None
    assume: Annotated[
        dict[str, float],
        BeforeValidator(_assumed),
        Option(
            "What an unknown value is that the program reads: the share that a mask keeps, or a number. Several are separated by commas.",
            text="",
            metavar="FILE:LINE=VALUE",
        ),
    ] = {}
    out: Annotated[
        Path | None,
        Option("The folder for runs: every run gets a folder of its own in it.", metavar="DIR", default="maya-out"),
    ] = None
    name: Annotated[
        str | None,
        BeforeValidator(_run_name),
        Option("The name of the run's folder.", default="the time and the program's name"),
    ] = None
    keep_files: Annotated[
        bool,
        Option(
            "Keep what the program writes, in the folder of the run: files/PATH for PATH. Without, it is gone when the run ends."
        ),
    ] = False


class PredictionOptions(Options):
    """How a recorded job is priced."""

    samples_per_step: Annotated[
        float | None, Field(ge=1), Option("Samples in one step of the whole job, where Maya cannot tell.")
    ] = None
    tokens_per_step: Annotated[
        float | None, Field(ge=1), Option("Tokens in one step of the whole job, where Maya cannot tell.")
    ] = None
    attention: Annotated[
        str, Option(f"The generation of flash attention that the job will run: {', '.join(SLOWER_THAN_FLASH2)}.")
    ] = DEFAULT_ATTENTION
    host: Annotated[
        Host,
        Option("The host's time: 'modelled' per call, the same on every machine, or as 'measured' while emulating."),
    ] = Host.MODELLED
    burst: Annotated[bool, Option("Price kernels at the clocks of short bursts, not of sustained load.")] = False
    profile: Annotated[
        str | None,
        Option(
            "One of your calibrations by name (`maya calibrate list`), or 'none'.",
            metavar="NAME",
            default="the GPU's newest",
        ),
    ] = None
    hardware: Annotated[
        Path | None,
        Option(
            "A TOML file with your own GPUs, nodes, networks and prices.",
            metavar="FILE",
            default="$MAYA_HARDWARE, or maya/hardware.toml in your configuration folder",
        ),
    ] = None


class FileOptions(Options):
    """Files to write."""

    json_file: Annotated[
        Path | None, Field(alias="json"), Option("Write the prediction to this file, as JSON.", metavar="FILE")
    ] = None
    html: Annotated[
        Path | None,
        Option("Write a page with the prediction, the timeline and the memory to this file.", metavar="FILE"),
    ] = None

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Request(ClusterOptions, EmulationOptions, PredictionOptions, FileOptions):
    """Everything that a user may ask of an emulation and its prediction."""

    tracking: dict[str, Any] = {}  # the options of installed trackers, by name

    @classmethod
    def of(cls, **options: Any) -> Request:
        """A request from arguments as people write them. A mistake is reported with the option's name."""
        return from_options(options)

    def check(self) -> None:
        """Looks every name up, so that a mistake is reported before anything runs."""
        check_attention(self.attention, find_gpu(self.gpu_name))
        if self.node is not None or self.network is not None:
            self.cluster(self.gpus_per_node or 1, self.nodes or 1)

    def cluster(self, gpus_per_node: int, nodes: int) -> Cluster:
        """The requested hardware, for a job of this size."""
        return cluster(
            self.gpu_name,
            gpus_per_node,
            nodes,
            node=self.node,
            network=self.network,
            price_per_gpu_hour=self.price_per_gpu_hour,
        )


GROUPS = (ClusterOptions, EmulationOptions, PredictionOptions, FileOptions)  # in the order in which people read them


def variables() -> dict[str, str]:
    """The options that are set by environment variables, one for each option of plugins: MAYA_GPU, MAYA_NODES, MAYA_STEPS and so on."""
    names = {name for name, _, shown in options_of(Request) if shown.in_plugins} | set(tracker_options())
    return {name: value for name in sorted(names) if (value := os.environ.get(f"MAYA_{name.upper()}"))}


def check_variables() -> None:
    """Reports a mistake in one of these variables, with the variable's name."""
    from_options(variables(), lambda name, value: f"MAYA_{name.upper()}={value}")


def from_options(
    options: Mapping[str, Any], shown: Callable[[str, Any], str] = lambda name, value: f"{name}={value!r}"
) -> Request:
    """A request from options by name. `shown` writes an option as the user has given it, for what is wrong with it."""
    fields = {public_name(name, field) for name, field in Request.model_fields.items()} - {"tracking"}
    trackers = tracker_options()
    for name in options:
        if name not in fields and name not in trackers:
            raise unknown_option(name, {*fields, *trackers})
    own = {name: value for name, value in options.items() if name in fields}
    tracking = {name: value for name, value in options.items() if name in trackers}
    try:
        return Request(**own, tracking=tracking)
    except ValidationError as error:
        raise _wrong_option(error, own, shown) from None


def public_name(name: str, field: FieldInfo) -> str:
    """The name of an option in Python, and with dashes on the command line."""
    return field.alias or name


def options_of(group: type[Options]) -> Iterator[tuple[str, FieldInfo, Option]]:
    """The options of a group: the name, the field and how it is shown."""
    parts = GROUPS if group is Request else (group,)
    for name, field in (each for part in parts for each in part.model_fields.items()):
        option = next((each for each in field.metadata if isinstance(each, Option)), None)
        if option is not None:
            yield public_name(name, field), field, option


def tracker_options_shown() -> Iterator[tuple[str, FieldInfo, Option]]:
    """The options of installed trackers, in the same form."""
    for name, field in tracker_options().items():
        yield name, field, next(each for each in field.metadata if isinstance(each, Option))


def is_switch(field: FieldInfo) -> bool:
    """Whether the command line has the option without a value."""
    return bool in (field.annotation, *get_args(field.annotation))


def limits_of(field: FieldInfo) -> tuple[float | None, float | None]:
    """The least and the largest value of a numeric option."""
    least = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)
    most = next((each.le for each in field.metadata if isinstance(each, Le)), None)
    return least, most  # type: ignore[return-value]


def unknown_option(name: str, known: Collection[str]) -> MayaError:
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"Did you mean '{near[0]}'? " if near else ""
    return MayaError(f"there is no option '{name}'.", f"{meant}The options are: {', '.join(sorted(known))}.")


def _wrong_option(error: ValidationError, given: Mapping[str, Any], shown: Callable[[str, Any], str]) -> MayaError:
    """The first mistake in words."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    option = shown(name, given[name])
    if ". " in problem:
        problem, advice = problem.split(". ", 1)
        return MayaError(f"{option}: {problem}.", f"{advice}.")
    return MayaError(f"{option} is not valid.", f"It should be {problem}.")


def plugin_signature(leading: str = "gpu") -> inspect.Signature:
    """The arguments of a plugin's constructor, for `help()` and editors: one option by position, the others by keyword."""
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    every = [
        (name, field.annotation, field.default) for name, field, option in options_of(Request) if option.in_plugins
    ]
    every += [(name, field.annotation, field.default) for name, field in tracker_options().items()]
    for name, annotation, default in sorted(every, key=lambda each: each[0] != leading):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if name == leading else inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
    return inspect.Signature(parameters)
