"""Numbers that exist both in Python and in the native device are the same."""

from __future__ import annotations

import enum
import re
from dataclasses import fields
from pathlib import Path

import pytest

import maya_core
from maya_core.device import build
from maya_core.ops.registry import Assume, Sample
from maya_core.ops.work import Step
from maya_core.trace import schema
from maya_core.trace.call import TorchSettings
from maya_core.trace.schema import EVENT, Category, EventKind, Phase

HEADER = (Path(maya_core.__file__).parent / "device/native/trace.h").read_text()
CODE = re.sub(r"//.*", "", HEADER)
SINGULAR = {"Parameters": "Parameter", "Gradients": "Gradient", "Buffers": "Buffer", "Workspaces": "Workspace"}
NUMPY = {"int64_t": "<i8", "uint32_t": "<u4", "uint16_t": "<u2", "uint8_t": "|u1"}


def numbers(python: type[enum.IntEnum] | type[enum.Enum]) -> dict[str, int]:
    return {name: int(member) for name, member in python.__members__.items()}


def native_enum(name: str) -> dict[str, int]:
    """An enum of trace.h, by name in CamelCase."""
    [body] = re.findall(rf"enum class {name} : uint8_t {{(.*?)}};", CODE, re.DOTALL)
    return {each: int(number) for each, number in re.findall(r"(\w+) = (\d+)", body)}


def camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def test_steps_of_a_plan() -> None:
    assert numbers(Step) == build.native().PLAN_STEPS


def test_assumptions() -> None:
    assert numbers(Assume) == build.native().ASSUMPTIONS
    assert numbers(Sample) == build.native().SAMPLES


def test_settings() -> None:
    names = build.native().setting_names()
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in fields(TorchSettings)}


@pytest.mark.parametrize(("native", "python"), [("EventKind", EventKind), ("Phase", Phase), ("Category", Category)])
def test_kinds_phases_and_categories(native: str, python: type[enum.IntEnum]) -> None:
    found = {camel(name): number for name, number in numbers(python).items()}
    assert native_enum(native) == {SINGULAR.get(name, name): number for name, number in found.items()}


def test_flags() -> None:
    native = {name: int(number) for name, number in re.findall(r"constexpr uint16_t k(\w+) = (\d+);", CODE)}
    flags = {camel(name): value for name, value in vars(schema).items() if name.isupper() and type(value) is int}
    del flags["Version"]
    assert native == flags


def test_the_layout_of_an_event() -> None:
    [body] = re.findall(r"struct TraceEvent {(.*?)};", CODE, re.DOTALL)
    native = [
        (name.strip(), NUMPY[kind])
        for kind, names in re.findall(r"(u?int\d+_t) ([^;]+);", body)
        for name in names.split(",")
    ]
    assert native == [(name, EVENT[name].str) for name in EVENT.names or ()]
