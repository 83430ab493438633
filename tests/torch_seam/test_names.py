"""The seam names what the installed torch has, and nothing else in Maya names anything private of torch."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from maya_core.patches import MissingName
from maya_core.torch_seam import compile as compiling
from maya_core.torch_seam import cuda, distributed, multiprocessing, names, native_kernels, torchscript, training
from maya_core.torch_seam.version import TRITON, installed
from maya_core.version import PACKAGE

MODULES = (cuda, compiling, distributed, multiprocessing, native_kernels, torchscript, training)
NAMES = {
    str(name): name
    for name in [*names.names_of(*MODULES).values(), *(one for m in MODULES for one in getattr(m, "NAMES", ()))]
}
NAMES |= {str(name): name for name in (*distributed.PROCESS_GROUP_NCCL, *distributed.PROCESS_GROUP_GLOO)}


def _can_be_checked(name: names.Name) -> bool:
    """A CPU build has no names of CUDA, and others appear later."""
    there = importlib.util.find_spec(name.module.partition(".")[0]) is not None
    return there and not name.late and not (name.cuda_build and installed().cuda is None)


@pytest.mark.parametrize("shown", sorted(shown for shown, name in NAMES.items() if _can_be_checked(name)))
def test_a_name_exists_in_the_versions_that_it_is_said_to(shown: str) -> None:
    name = NAMES[shown]
    if name.expected:
        name.get()
    else:
        with pytest.raises((MissingName, ImportError)):
            name.get()


@pytest.mark.skipif(installed().cuda is None, reason="a CPU build of torch requires no Triton")
def test_triton_is_the_one_that_torch_is_released_with() -> None:
    required = importlib.metadata.requires("torch") or []
    assert [each for each in required if re.match(rf"triton\W*[=~]={re.escape(TRITON[installed().version])}", each)]


# ---- nothing private of torch outside the seam ----
ROOTS = {"torch", "dist", "c10d", "nn", "F", "torch_mp", "dynamo", "inductor"}  # names that stand for a module of torch
PRIVATE_ATTRIBUTES = {  # of torch's own objects
    "_cdata", "_local_tensor", "_orig_mod", "_untyped_storage", "_torchdynamo_orig_callable", "_shared_params", "_index_sampler", "_schema",
    "_overloadpacket",
}  # fmt: skip
MODULE = re.compile(r"torch(\.\w+)*\._\w+(\.\w+)*")


def _is_private_name(text: str) -> bool:
    return MODULE.fullmatch(text) is not None or text in PRIVATE_ATTRIBUTES


def _private(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            private = [part for part in parts[1:] if part.startswith("_") and not part.startswith("__")]
            if (parts[0] in ROOTS and private and parts[1] != "ops") or node.attr in PRIVATE_ATTRIBUTES:
                yield f"{path.name}:{node.lineno}: {'.'.join(parts)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                if MODULE.fullmatch(f"{node.module}.{alias.name}"):
                    yield f"{path.name}:{node.lineno}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private_name(node.value):
            yield f"{path.name}:{node.lineno}: {node.value!r}"


def _sources() -> list[Path]:
    integrations = PACKAGE.parent / "integrations"
    return [
        path
        for folder in (PACKAGE, integrations)
        for path in sorted(folder.rglob("*.py"))
        if "torch_seam" not in path.parts
    ]


def test_only_the_seam_names_what_is_private_to_torch() -> None:
    found = [where for path in _sources() for where in _private(path)]
    assert not found, "\n".join(["name these in maya_core/torch_seam:", *found])


def test_two_headers_ask_for_torchs_version() -> None:
    native = PACKAGE / "device" / "native"
    asking = {
        path.name
        for path in native.glob("*.[ch]*")
        if "TORCH_VERSION" in path.read_text() or "MAYA_TORCH_SINCE(" in path.read_text()
    }
    assert asking == {"torch_abi.h", "torch_version.h"}
