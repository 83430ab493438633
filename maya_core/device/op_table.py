"""Lists the ATen ops that have a CUDA kernel in a CUDA build of torch. The source is native_functions.yaml, which torch ships."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml

from maya_core.cpp_build import cache_folder

# The device runs each of these as one op; torch's own decomposition depends on cuDNN being present when torch is compiled.
_WHOLE = ["convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable"]

# On a GPU, these are a product of all sequences in one kernel, if their sizes allow it, and a softmax of all of them.
_MADE_OF_OTHERS = ["bmm", "_nested_tensor_softmax_with_shape"]


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    """Maps each op to its dispatch entries. Parsing the YAML takes half a second, so the needed part is cached as JSON."""
    kept = cache_folder() / f"ops-torch{torch.__version__}.json"
    if kept.exists():
        cached: dict[str, dict[str, Any]] = json.loads(kept.read_text())
        return cached
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    functions = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    wanted = ("dispatch", "structured_delegate", "ufunc_inner_loop")
    table = {
        function["func"].split("(")[0].strip(): {key: function[key] for key in wanted if key in function}
        for function in functions
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(table))
    part.rename(kept)
    return table


def _kernels(function: dict[str, Any]) -> dict[str, str]:
    """Maps each dispatch key to its kernel; an entry such as `CPU, CUDA` becomes two."""
    return {key.strip(): kernel for keys, kernel in (function.get("dispatch") or {}).items() for key in keys.split(",")}


def _on_cuda(function: dict[str, Any]) -> bool:
    if "CUDA" in _kernels(function) or "ufunc_inner_loop" in function:
        return True
    delegate = function.get("structured_delegate")
    return delegate is not None and _on_cuda(_table()[delegate])


def cuda_ops() -> list[str]:
    """Every ATen op for which a CUDA build of torch has a CUDA kernel."""
    return [name for name, function in _table().items() if _on_cuda(function)] + _WHOLE


def _written_once(layout: str) -> list[str]:
    """Ops of another layout that have one implementation for CPU and CUDA."""
    names = []
    for name, function in _table().items():
        kernels = _kernels(function)
        if f"{layout}CUDA" in kernels and kernels.get(f"{layout}CPU") == kernels[f"{layout}CUDA"]:
            names.append(name)
    return names


def sparse_ops() -> list[str]:
    """Sparse (COO) ops with one implementation for CPU and CUDA: on the device they run through the dense ops that they call."""
    return _written_once("Sparse")


def nested_ops() -> list[str]:
    """Ops of strided nested tensors with one implementation for CPU and CUDA, and some whose implementation for the CPU consists of other ops."""
    return [*_written_once("NestedTensor"), *_MADE_OF_OTHERS]


def compressed_ops() -> list[str]:
    """Ops of the compressed sparse layouts (CSR, CSC, BSR, BSC) with one implementation for CPU and CUDA."""
    return _written_once("SparseCsr")
