"""Compares what real CUDA PyTorch launches and allocates for each op case with what Maya plans for it.

A figure is one launch: its case, place, kind (kernel, gemm, copy, memset), the kernel's name, threads, bytes, and m, n, k and batch of a product,
which are column-major as in the call of cuBLAS. The last figure of a case is its peak: the bytes that it allocates, with its results.

oracle/2.13.csv has the figures of all cases; the file of another version of torch has only the cases that are different there.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ops.op_cases import CASES, SIZED_BY_VALUES, make_workspaces, peak_bytes

from maya_core.device.emulated import EmulatedDevice
from maya_core.ops.kernel import Gemm, Kernel
from maya_core.ops.plan import kernels_of
from maya_core.torch_seam.version import COMPARED, Version, text
from maya_core.trace.call import Call
from maya_core.trace.schema import EVENT, EventKind

FOLDER = Path(__file__).parent / "oracle"
PEAK = "peak"
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
    ("transpose_copy_tiled", {"transpose"}),
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
    ("tma_scatter", {"scatter"}),
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


def parse(lines: Iterable[str], peaks: dict[str, int]) -> dict[str, list[Figure]]:
    """Reads the figures of an oracle's trace, in which each case is between two device synchronizations, and adds the peaks."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("S,cudaDeviceSynchronize"):
            parts.append([])
        elif line[:2] in ("L,", "G,", "P,", "Z,"):
            parts[-1].append(line.strip())
    return {
        case: [
            *(_figure(case, place, line) for place, line in enumerate(part)),
            Figure(case, len(part), PEAK, nbytes=peaks[case]),
        ]
        for case, part in zip(peaks, parts[1::2], strict=False)
    }


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


def write(path: Path, figures: dict[str, list[Figure]]) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(Figure._fields)
        rows.writerows(
            [
                "" if value == 0 and name != "place" else value
                for name, value in zip(Figure._fields, figure, strict=True)
            ]
            for of_case in figures.values()
            for figure in of_case
        )


def _read(path: Path) -> dict[str, list[Figure]]:
    """The figures of each case, in order."""
    found: dict[str, list[Figure]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            numbers = {name: int(row[name] or 0) for name in Figure._fields if name not in ("case", "kind", "name")}
            figure = Figure(case=row["case"], kind=row["kind"], name=row["name"], **numbers)
            found.setdefault(figure.case, []).append(figure)
    return found


def path_of(torch: Version) -> Path:
    return FOLDER / f"{text(torch)}.csv"


def figures_of(torch: Version) -> dict[str, list[Figure]]:
    """The figures of each case with a version of torch."""
    all_cases = _read(path_of(COMPARED))
    return all_cases if torch == COMPARED else all_cases | _read(path_of(torch))


def emulated(device: EmulatedDevice, case: str) -> tuple[list[Kernel], int | None]:
    """The kernels of the case, from the trace of the emulated device, and the bytes that it allocates at its peak, if they can be compared."""
    make_workspaces()
    call, peaks = CASES[case](), []
    kernels = kernels_called(device, lambda: peaks.append(peak_bytes(call)))
    return kernels, None if case in SIZED_BY_VALUES else peaks[0]


def calls_made(device: EmulatedDevice, run: Callable[[], object]) -> list[Call]:
    """The calls that the program makes of ops, in order."""
    device.native.start_recording()
    run()
    device.native.stop_recording()
    events = np.frombuffer(device.native.take_events(), EVENT)
    subjects = events[events["kind"] == EventKind.OP]["subject"]
    return [device.planner.calls[number] for number in subjects]


def kernels_called(device: EmulatedDevice, run: Callable[[], object]) -> list[Kernel]:
    return [kernel for call in calls_made(device, run) for kernel in kernels_of(call, device.planner.platform)]


def disagreement(expected: list[Figure], found: list[Kernel], peak: int | None = None) -> str | None:
    """The first difference between what CUDA did and what is planned, or None. A `peak` of None is not compared."""
    *launched, real_peak = expected
    if len(launched) != len(found):
        return f"{len(launched)} launches, predicted {len(found)}: {[k.model for k in found]}"
    for figure, kernel in zip(launched, found, strict=True):
        if not _agree(figure, kernel):
            return f"launch {figure.place}: {figure} predicted as {kernel}"
    if peak is not None and peak != real_peak.nbytes:
        return f"peak of {real_peak.nbytes:,} bytes, predicted {peak:,} ({peak - real_peak.nbytes:+,})"
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
