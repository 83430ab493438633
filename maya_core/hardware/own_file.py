"""Reads the user's own hardware file, whose entries are added to the catalog or change it.

    [gpus.my-h100]            # a new GPU, like the H100 except for ...
    base = "h100"
    power_limit_w = 500

    [gpus.a100]               # the catalog's A100, with another capacity
    memory_bytes = "79.32GiB"

    [[prices]]
    gpu = "h100"
    provider = "ours"
    usd_per_hour = 1.95

Error messages name the file, the entry and the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from maya_core.errors import MayaError
from maya_core.hardware import toml

SECTIONS = ("gpus", "nodes", "networks", "prices")
Table = dict[str, dict[str, Any]]  # entries of a section by name, as read from TOML
Model = TypeVar("Model", bound=BaseModel)


def key(name: str) -> str:
    """Normalizes a name to the catalog's spelling."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def shown(path: Path) -> str:
    """The path as the user would write it."""
    for root, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.is_relative_to(root):
            return prefix + str(path.relative_to(root))
    return str(path)


def read(path: Path) -> str:
    """The text of the file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        raise MayaError(
            f"the hardware file {shown(path)} does not exist.", "Correct --hardware or MAYA_HARDWARE, which names it."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MayaError(
            f"the hardware file {shown(path)} cannot be read: {error}.",
            "Correct --hardware or MAYA_HARDWARE, which names it.",
        ) from None


def parse(path: Path, text: str) -> dict[str, Any]:
    """The sections of the file. Their form is checked, but not yet their entries."""
    try:
        tables = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise MayaError(f"{shown(path)}: not valid TOML: {error}.", "`maya help hardware` has an example.") from None
    for name, content in tables.items():
        if name not in SECTIONS:
            _refuse(
                f"{shown(path)}: unknown section '{name}'.",
                name,
                SECTIONS,
                "Sections are [gpus.NAME], [nodes.NAME], [networks.NAME] and [[prices]].",
            )
        entries = content if name == "prices" else content.values() if isinstance(content, dict) else None
        if not isinstance(content, list if name == "prices" else dict) or not all(
            isinstance(entry, dict) for entry in entries or ()
        ):
            form = "[[prices]]" if name == "prices" else f"[{name}.NAME]"
            raise MayaError(f"{shown(path)}: '{name}' has entries of the wrong form.", f"Write each as {form}.")
    return tables


def merge(path: Path, section: str, shipped: Table, own: Table) -> Table:
    """The section with the user's entries. Each of them is completed from its base, and lists the fields that come from the user."""
    written = {key(name): entry for name, entry in own.items()}
    other_names = {alias: name for name, entry in shipped.items() for alias in entry.get("aliases", ())}
    merged: Table = dict(shipped)

    def complete(name: str, derived: tuple[str, ...]) -> dict[str, Any]:
        where = f"{shown(path)}: {section}.{name}"
        if name in derived:
            raise MayaError(f"{where}: derives from itself: {' -> '.join((*derived, name))}.")
        if name not in written:
            return shipped[name]
        if name in other_names:
            raise MayaError(
                f"{where}: '{name}' is another name of '{other_names[name]}'.",
                f"Write [{section}.{other_names[name]}] to change that entry, or choose another name.",
            )
        entry = {field: value for field, value in written[name].items() if field != "base"}
        base, inherited = written[name].get("base"), dict(shipped.get(name, {}))
        if base is not None:
            if not isinstance(base, str):
                raise MayaError(f"{where}: base must be the name of an entry, not {base!r}.")
            base = other_names.get(key(base), key(base))
            if base not in shipped and base not in written:
                _refuse(f"{where}: base = '{base}' is not known.", base, (*shipped, *written), "")
            inherited = complete(base, (*derived, name)) if base != name else inherited
            # It is another entry, so it does not inherit the aliases, nor being a default.
            inherited = {field: value for field, value in inherited.items() if field not in ("aliases", "default")}
        if isinstance(entry.get("peak_flops"), dict):
            entry["peak_flops"] = {**inherited.get("peak_flops", {}), **entry["peak_flops"]}
        root = inherited.get("base") or base
        fields = tuple(dict.fromkeys((*inherited.get("own", ()), *entry)))
        return {**inherited, **entry, "base": root, "own": fields}

    for name in written:
        merged[name] = complete(name, ())
    return merged


def validate(path: Path | None, where: str, model: type[Model], entry: Mapping[str, Any]) -> Model:
    """The entry as its model; raises an error in the user's terms. `path` is None for the files that Maya ships."""
    try:
        return model(**entry)
    except ValidationError as error:
        if path is None:
            raise
        _explain(f"{shown(path)}: {where}", model, error.errors())


def _explain(where: str, model: type[BaseModel], errors: list[ErrorDetails]) -> NoReturn:
    missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
    unknown = [str(error["loc"][0]) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        fields = [name for name in model.model_fields if name not in ("name", "own")]
        _refuse(f"{where}: unknown field '{unknown[0]}'.", unknown[0], fields, f"Fields are {', '.join(fields)}.")
    wrong = [error for error in errors if error["type"] not in ("missing", "extra_forbidden")]
    if wrong:
        raise MayaError(f"{where}: {_sentence(wrong[0])}.")
    derive = "base" in model.model_fields
    raise MayaError(
        f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.",
        'Add what is missing, or derive the entry from one of the catalog: base = "NAME".' if derive else "",
    )


_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list"}


def _sentence(error: ErrorDetails) -> str:
    """Says what is wrong with a field, and what it must be."""
    field = ".".join(str(part) for part in error["loc"] if part != "[key]")
    context, value = error.get("ctx", {}), error["input"]
    value = f"'{value}'" if isinstance(value, str) else value
    match error["type"]:
        case "greater_than":
            return f"{field} must be greater than {context['gt']:g}, not {value}"
        case "greater_than_equal":
            return f"{field} must be at least {context['ge']:g}, not {value}"
        case "less_than_equal":
            return f"{field} must be at most {context['le']:g}, not {value}"
        case "literal_error":
            return f"{field} must be {context['expected']}, not {value}"
        case "value_error" if field:
            return f"{field} {context['error']}, not {value}"
        case "value_error":
            return str(context["error"])
    expected = _EXPECTED.get(error["type"].split("_")[0])
    return f"{field} must be {expected}, not {value}" if expected else f"{field}: {error['msg']}"


def _refuse(problem: str, wanted: str, known: tuple[str, ...] | list[str], advice: str) -> NoReturn:
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    raise MayaError(problem, f"Did you mean '{close[0]}'?" if close else advice)
