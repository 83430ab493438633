"""Compares what real CUDA PyTorch launches for each op case with what Maya plans for it.

A figure is one launch: its case, place, kind (kernel, gemm, copy, memset), the kernel's name, threads, bytes, and m, n, k and batch of a product,
which are column-major as in the call of cuBLAS.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ops.op_cases import CASES

from maya_core.device.emulated import EmulatedDevice
from maya_core.ops.kernel import Gemm, Kernel
from maya_core.ops.plan import kernels_of
from maya_core.trace.schema import EVENT, EventKind

DIRECTIONS = {"1": "h2d", "2": "d2h", "3": "d2d"}  # cudaMemcpyKind


class Figure(NamedTuple):
    case: str
    place: int
    kind: str
    name: str = ""
    threads: int = 0
    nbytes: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 0


# A part of a kernel's name, and the patterns that it may have.
PATTERNS: list[tuple[str, set[str]]] = [
    ("elementwise_kernel_with_index", {"fill"}),
    ("distribution_elementwise", {"random"}),
    ("fused_dropout", {"dropout"}),
    ("scatter_gather_elementwise", {"gather", "scatter"}),
    ("index_elementwise", {"gather", "scatter", "elementwise"}),
    ("vectorized_elementwise_kernel", {"elementwise", "fill"}),
    ("unrolled_elementwise_kernel_for_multi", {"fill"}),
    ("unrolled_elementwise_kernel", {"cast"}),
    ("elementwise_kernel", {"strided", "transpose", "scatter", "fill"}),
    ("triu_tril", {"elementwise"}),
    ("glu_backward", {"elementwise"}),
    ("Randperm", {"elementwise"}),
    ("randperm", {"elementwise"}),
    ("flip_kernel", {"elementwise"}),
    ("roll_cuda", {"elementwise"}),
    ("CatArrayBatchedCopy", {"cat"}),
    ("reduce_kernel", {"reduction", "column_reduction"}),
    ("DeviceReduce", {"reduction", "fill"}),
    ("SoftMaxBackward", {"softmax_backward"}),
    ("softmax_warp_backward", {"softmax_backward"}),
    ("SpatialSoftMaxBackward", {"softmax_backward"}),
    ("softmax_warp_forward", {"warp_softmax"}),
    ("SoftMaxForward", {"softmax"}),
    ("RowwiseMoments", {"moments"}),
    ("LayerNormForward", {"norm"}),
    ("vectorized_layer_norm", {"norm"}),
    ("layer_norm_grad_input", {"norm_backward"}),
    ("GammaBetaBackward", {"column_reduction", "fill"}),
    ("FusedParams", {"fill"}),
    ("ComputeInternalGradients", {"moments"}),
    ("batch_norm_collect_statistics", {"channel_reduction", "column_reduction"}),
    ("batch_norm_transform", {"elementwise"}),
    ("batch_norm_backward_elemt", {"elementwise"}),
    ("batch_norm_backward", {"channel_reduction", "column_reduction"}),
    ("nll_loss_", {"loss", "gather", "scatter", "fill"}),
    ("nll_loss2d", {"loss", "gather", "scatter", "fill"}),
    ("vectorized_gather", {"gather"}),
    ("indexFunc", {"scatter"}),
    ("indexing_backward", {"scatter"}),
    ("embedding_backward_feature", {"scatter"}),
    ("compute_grad_weight", {"gather"}),
    ("sum_and_scatter", {"scatter"}),
    ("krn_partial", {"elementwise"}),
    ("compute_num_of_partial", {"fill"}),
    ("RadixSortHistogram", {"reduction"}),
    ("RadixSortExclusiveSum", {"fill"}),
    ("RadixSort", {"sort"}),
    ("radixSortKV", {"sort"}),
    ("bitonicSort", {"sort"}),
    ("fill_reverse_indices", {"fill"}),
    ("InitKernel", {"fill"}),
    ("ScanByKey", {"fill"}),
    ("kernel_scan", {"scan"}),
    ("DeviceScan", {"scan"}),
    ("UniqueByKey", {"scan"}),
    ("SelectSweep", {"scan"}),
    ("computeBlockDigitCounts", {"reduction"}),
    ("compute", {"fill"}),
    ("gatherTopK", {"select"}),
    ("multi_tensor_apply", {"multi_tensor"}),
    ("lpnorm_cleanup", {"fill"}),
    ("assert_async", {"fill"}),
    ("range", {"fill"}),
    ("flash_fwd", {"flash_forward"}),
    ("flash_bwd", {"flash_backward", ""}),
    ("fmha_cutlassF", {"efficient_forward"}),
    ("fmha_cutlassB", {"efficient_backward"}),
    ("pool", {"pool"}),
    ("adaptive_average_gradinput", {"scatter"}),
    ("adaptive", {"pool", "scatter"}),
    ("upsample_bilinear2d_backward", {"scatter"}),
    ("upsample", {"pool"}),
    ("fill", {"fill"}),
]


def short_name(mangled: str) -> str:
    """The name of the function in a mangled name."""
    if not mangled.startswith("_Z"):
        return mangled
    at, names = 2 + (mangled[2] == "N"), []
    while found := re.match(r"[KL]*(\d+)", mangled[at:]):
        at += found.end()
        names.append(mangled[at : at + int(found[1])])
        at += int(found[1])
    return names[-1] if names else mangled[:60]


def parse(lines: Iterable[str], cases: list[str]) -> list[Figure]:
    """Reads the figures of an oracle's trace, in which each case is between two device synchronizations."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("S,cudaDeviceSynchronize"):
            parts.append([])
        elif line[:2] in ("L,", "G,", "P,", "Z,"):
            parts[-1].append(line.strip())
    return [
        _figure(case, place, line)
        for case, part in zip(cases, parts[1::2], strict=False)
        for place, line in enumerate(part)
    ]


def _figure(case: str, place: int, line: str) -> Figure:
    kind, _, rest = line.partition(",")
    if kind == "L":
        name, *numbers = rest.rsplit(",", 8)
        threads = int(np.prod([int(number) for number in numbers[:6]]))
        return Figure(case, place, "kernel", short_name(name), threads)
    fields = rest.split(",")
    if kind == "G":
        m, n, k, batch = (int(number) for number in fields[1:5]) if len(fields) >= 5 else (0, 0, 0, 0)
        return Figure(case, place, "gemm", fields[0], m=m, n=n, k=k, batch=batch)
    if kind == "P":
        return Figure(case, place, "copy", DIRECTIONS.get(fields[0], fields[0]), nbytes=int(fields[1]))
    return Figure(case, place, "memset", nbytes=int(fields[0]))


def write(path: Path, figures: list[Figure]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(Figure._fields)
        rows.writerows(
            [
                "" if value == 0 and name != "place" else value
                for name, value in zip(Figure._fields, figure, strict=True)
            ]
            for figure in figures
        )


def read(path: Path) -> dict[str, list[Figure]]:
    """The figures of each case, in order."""
    found: dict[str, list[Figure]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            numbers = {name: int(row[name] or 0) for name in Figure._fields if name not in ("case", "kind", "name")}
            figure = Figure(case=row["case"], kind=row["kind"], name=row["name"], **numbers)
            found.setdefault(figure.case, []).append(figure)
    return found


def emulated_kernels(device: EmulatedDevice, case: str) -> list[Kernel]:
    """The kernels of the case, from the trace of the emulated device."""
    return kernels_called(device, CASES[case]())


def kernels_called(device: EmulatedDevice, call: Callable[[], object]) -> list[Kernel]:
    device.native.start_recording()
    call()
    device.native.stop_recording()
    events = np.frombuffer(device.native.take_events(), EVENT)
    subjects = events[events["kind"] == EventKind.OP]["subject"]
    return [
        kernel for number in subjects for kernel in kernels_of(device.planner.calls[number], device.planner.platform)
    ]


def disagreement(expected: list[Figure], found: list[Kernel]) -> str | None:
    """The first difference between what was launched and what is planned, or None."""
    if len(expected) != len(found):
        return f"{len(expected)} launches, predicted {len(found)}: {[k.model for k in found]}"
    for figure, kernel in zip(expected, found, strict=True):
        if not _agree(figure, kernel):
            return f"launch {figure.place}: {figure} predicted as {kernel}"
    return None


def _agree(figure: Figure, kernel: Kernel) -> bool:
    if figure.kind == "memset":
        return kernel.model == "fill"
    if figure.kind == "copy":
        return (kernel.family, kernel.model) == ("copy", figure.name) and kernel.sizes[0] == figure.nbytes
    if figure.kind == "gemm":
        if not figure.m:  # of matrix and vector
            return kernel.family == "gemm" or kernel.model == "reduction"
        asked = (figure.batch, {figure.m, figure.n}, figure.k)
        return isinstance(kernel, Gemm) and (kernel.batch, {kernel.m, kernel.n}, kernel.k) == asked
    patterns = next((allowed for part, allowed in PATTERNS if part in figure.name), None)
    if patterns is None or kernel.model not in patterns:
        return False
    covers = kernel.model in ("elementwise", "strided", "transpose", "cast") and "elementwise_kernel" in figure.name
    if covers and kernel.sizes[2] > 1024:  # a thread has 1 to 16 elements
        return figure.threads <= kernel.sizes[2] + 2048 and kernel.sizes[2] <= 16 * figure.threads
    return True
