"""Options of the commands, made from the request.

    @app.command()
    @takes(ClusterOptions, PredictionOptions)
    def report(folder: FolderArgument, request: Request) -> None: ...

`takes` replaces the parameter `request` by one option for every field of these groups.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from maya_core.hardware.catalog import use_hardware_file
from maya_core.request import Option, Options, Request, from_options, limits_of, options_of, tracker_options_shown

Command = Callable[..., None]


def takes(
    *groups: type[Options],
    only: Collection[str] = (),
    but: Collection[str] = (),
    help: Mapping[str, str] | None = None,
    tracked: bool = False,
) -> Callable[[Command], Command]:
    """Gives a command the options of these groups, or only some of them. `help` replaces texts that mean something else for this command;
    `tracked` adds the options of installed trackers. The user's hardware file, if it is among them, is in use when the command runs."""

    def wrap(command: Command) -> Command:
        # Not get_type_hints: on Python 3.10 it wraps the annotations of parameters that are None by default in Optional.
        signature = inspect.signature(command, eval_str=True)
        parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "request"]
        names = []
        for group in groups:
            for name, field, option in options_of(group):
                if name in names or name in but or (only and name not in only):
                    continue
                names.append(name)
                text = (help or {}).get(name)
                parameters.append(_parameter(name, field, replace(option, help=text, default=None) if text else option))
        for name, field, option in tracker_options_shown() if tracked else ():
            names.append(name)
            parameters.append(_parameter(name, field, option))

        defaults = {parameter.name: parameter.default for parameter in parameters}

        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {name: value for name in names if (value := given.pop(name)) != defaults[name]}
            request = from_options(options, lambda name, value: f"{flag(name)} {value}")
            if "hardware" in names:
                use_hardware_file(request.hardware)
            command(**given, request=request)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del run.__wrapped__
        return run

    return wrap


def option(name: str, help: str | None = None) -> Any:
    """How one option of the request is declared, for commands that need it outside of a request: `Annotated[str | None, option("network")]`."""
    for each, field, shown in options_of(Request):
        if each == name:
            return _declared(name, field, replace(shown, help=help, default=None) if help else shown)
    raise LookupError(name)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, field: FieldInfo, shown: Option) -> inspect.Parameter:
    kind, default = _kind(field, shown), _default(field, shown)
    optional: Any = kind if default is not None else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[optional, _declared(name, field, shown)],
    )


def _declared(name: str, field: FieldInfo, shown: Option) -> Any:
    default = _default(field, shown)
    least, most = limits_of(field) if _kind(field, shown) in (int, float) else (None, None)
    return typer.Option(
        flag(name),
        help=f"{shown.help} Default: {shown.default}." if shown.default else shown.help,
        metavar=shown.metavar,
        min=least,
        max=most,
        show_default=default is not None and default is not False and shown.default is None,
    )


def _kind(field: FieldInfo, shown: Option) -> Any:
    return str if shown.text is not None else _typed(field.annotation)


def _default(field: FieldInfo, shown: Option) -> Any:
    return shown.text if shown.text is not None else field.default


def _typed(annotation: Any) -> Any:
    """The type of an option's value on the command line: of a choice of types the simplest, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return bool if bool in kinds else kinds[0]
    return annotation


HardwareOption = Annotated[Path | None, option("hardware")]
FolderArgument = Annotated[
    Path,
    typer.Argument(help="A run: its folder, its name, or a folder of runs, whose newest is meant.", metavar="[RUN]"),
]
