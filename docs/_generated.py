"""Fills the pages of the site with what the code itself declares: tables that `maya help` has, too (maya_core/documentation.py), and
the Python interface. MkDocs calls `on_page_markdown` for every page (mkdocs.yml, `hooks`)."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from maya_core import api
from maya_core.cli import app
from maya_core.documentation import MARK, add_integrations, filled
from maya_core.report.prediction import Prediction
from maya_core.request import Request, options_of
from maya_core.session.block import EmulatedBlock
from maya_core.trace.job import JobTrace

# What users import, by package.
PYTHON_INTERFACE = {
    "maya_core": sorted(api.__all__, key=lambda name: (inspect.isclass(getattr(api, name)), name)),  # functions first
    "maya_lightning": ["MayaEmulator"],
    "maya_huggingface": ["MayaCallback"],
    "maya_mlflow": ["record_actual"],
}
NOT_CREATED_BY_USERS = (EmulatedBlock, JobTrace, Prediction)
INTERNAL = {"emulation"}  # members that the integrations use
IN_PLUGINS = frozenset(name for name, _, option in options_of(Request) if option.in_plugins)
TAKEN_BY = {
    "plugins": IN_PLUGINS,
    "`emulate`": IN_PLUGINS - {"json", "html"},
    "`predict`": api.REPORT,
    "`what_if`": api.WHAT_IF,
}
add_integrations(app)
DEFAULTS = {"steps": "`3`; for `emulate`, the whole block"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARK.sub(lambda found: GENERATED[found[1]](), filled(markdown, app))


# ---- the Python interface ----


def python_interface() -> str:
    """Signature, docstring and members of every public name."""
    lines: list[str] = []
    for package, names in PYTHON_INTERFACE.items():
        for name in names:
            thing = getattr(importlib.import_module(package), name)
            lines += [f"### {package}.{name}", "", _fence(f"{package}.{name}{_signature(thing)}"), "", _text(thing), ""]
            if inspect.isclass(thing) and thing is not Prediction:
                lines += [_member(name, member) for name, member in _members(thing)] + [""]
    return "\n".join(lines)


def options_in_python() -> str:
    """The options of functions and plugins, and who takes which."""
    lines = ["| option | type | meaning | taken by |", "|---|---|---|---|"]
    for name, field, option in options_of(Request):
        taken = [who for who, names in TAKEN_BY.items() if name in names]
        if taken:
            default = (
                DEFAULTS.get(name)
                or option.default
                or (None if field.default is None else f"`{_value(field.default)}`")
            )
            meaning = _cell(option.help) + (f" Default: {default}." if default else "")
            by = "all" if len(taken) == len(TAKEN_BY) else ", ".join(taken)
            lines.append(f"| `{name}` | {_type(field.annotation)} | {meaning} | {by} |")
    return "\n".join(lines)


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    """The documented methods, properties and attributes that a class itself defines."""
    yield from _attributes(thing)
    for name, member in vars(thing).items():
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if not name.startswith("_") and name not in INTERNAL and callable(function) and inspect.getdoc(function):
            yield name, member


def _attributes(thing: type) -> Iterator[tuple[str, str]]:
    """Attributes of a dataclass with the text under them, which Python itself does not keep."""
    if hasattr(thing, "__dataclass_fields__"):
        body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                yield ast.unparse(field.target), ast.literal_eval(text.value)


def _member(name: str, member: Any) -> str:
    function = getattr(member, "__func__", member)
    call = _signature(function, drop=1) if inspect.isfunction(function) else ""
    return f"- **`{name}{call}`**: {_cell(_text(member))}"


def _text(thing: Any) -> str:
    text = thing if isinstance(thing, str) else inspect.getdoc(getattr(thing, "func", thing))
    assert text, f"{thing} has no docstring"
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", inspect.cleandoc(text))


def _signature(thing: Any, drop: int = 0) -> str:
    """The arguments as they are written in the source; those of a plugin that are options are only named together."""
    if thing in NOT_CREATED_BY_USERS:
        return ""
    # inspect.signature shows the options of a plugin one by one (request.plugin_signature).
    initializer = getattr(thing, "__init__", None) if inspect.isclass(thing) else None
    collapsed = hasattr(initializer, "__signature__")
    parameters = list(inspect.signature(thing).parameters.values())[drop:]
    kept = [each for each in parameters if not (collapsed and each.kind is each.KEYWORD_ONLY)]
    words: list[str] = []
    for parameter in kept:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(_parameter(parameter))
    words += ["**options"] * collapsed
    flat = f"({', '.join(words)})"
    return flat if len(flat) <= 88 else "(\n" + "".join(f"    {word},\n" for word in words) + ")"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = parameter.annotation
    stated = "" if stars or kind is parameter.empty else f": {getattr(kind, '__name__', kind)}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{stated}{default}"


def _type(annotation: Any) -> str:
    """A type as people write it in a call."""
    kinds = [
        str if inspect.isclass(kind) and issubclass(kind, str) else kind
        for kind in get_args(annotation) or (annotation,)
    ]
    if annotation in (tuple[int, ...] | None, tuple[int, ...]):
        return "tuple of int"
    return " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not type(None))


def _value(default: Any) -> str:
    return repr(getattr(default, "value", default))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


GENERATED = {"python interface": python_interface, "options in python": options_in_python}  # what only the site has
