"""Reads measurements from a PyTorch profiler trace (Kineto, Chrome's JSON format) of a real run.

    measurements = read_trace(Path("trace.json.gz"), find_gpu("h100"))

Each kernel is traced back to the op that launched it: by its correlation id to the launch on the host, and by time and thread to the
ops around it. The outermost of these with its own CUDA kernel is the op that Maya would record. Kernels that ran at the same time as
NCCL's were slowed down by it and are skipped, and so is the first run of each kernel.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.calibrate.recorded import NO_OVERLOAD, RecordedCall, Replay, UnknownCall, overload
from maya_core.errors import MayaError
from maya_core.hardware.catalog import Gpu, find_gpu, gpus
from maya_core.hardware.dtypes import item_bytes
from maya_core.ops.kernel import Gemm, Kernel
from maya_core.predictor.calibration import Collective, Measured

OPS, LAUNCHES = ("cpu_op", "operator"), ("cuda_runtime", "cuda_driver", "runtime")
KERNEL, MEMCPY, MEMSET = "kernel", "gpu_memcpy", "gpu_memset"
AGAIN = "Profile with torch.profiler.profile(activities=[CPU, CUDA], record_shapes=True) and export_chrome_trace(...)."
LOW_DECILE = 10  # percentile of a collective's runs, because longer ones waited for other ranks
BESIDE_PRODUCTS = ("splitKreduce", "epilogue::impl", "reduce_1Block_kernel")  # cuBLAS's second kernels
TF32 = ("tf32", "s1688gemm")  # in the names of kernels, because a trace does not show whether the program allows TF32
FEW = 2  # of so few runs, none is skipped as warm-up

# c10d's names of collectives, and Maya's.
COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "broadcast": "broadcast", "_broadcast_oop": "broadcast", "reduce": "reduce", "send": "send", "recv": "send",
}  # fmt: skip
ROUNDING_US = 5e-4  # adjacent ops may seem to overlap, because nanoseconds are rounded


@dataclass(eq=False)
class OnDevice:
    """A kernel, copy or memset that ran on a GPU."""

    kind: str
    name: str
    device: int
    start: float  # us
    end: float
    args: dict[str, Any]
    contended: bool = False

    @property
    def seconds(self) -> float:
        return (self.end - self.start) * 1e-6


@dataclass(eq=False)
class ProfiledCall:
    """A call on the host, and what it launched, in order."""

    name: str
    args: dict[str, Any]
    work: list[OnDevice] = field(default_factory=list)


Runs = dict[Kernel, list[tuple[float, float, int]]]  # when, seconds, launches


@dataclass
class Counts:
    """How many kernels of a trace were used, and why the others were not."""

    kernels: int = 0
    used: int = 0
    contended: int = 0
    warm_up: int = 0
    pageable: int = 0  # copies of memory that was not pinned
    without_op: int = 0  # CUDA graphs, Triton, other libraries
    nccl: int = 0
    nccl_untold: int = 0  # without sizes in the trace
    tf32: int = 0  # float32 products on tensor cores
    unpaired: Counter[str] = field(default_factory=Counter)  # kernels by op
    unknown: Counter[str] = field(default_factory=Counter)  # kernels by reason
    strides: bool = True
    shapes: bool = True

    def __add__(self, other: Counts) -> Counts:
        summed = Counts(strides=self.strides and other.strides, shapes=self.shapes and other.shapes)
        for name in (
            "kernels",
            "used",
            "contended",
            "warm_up",
            "pageable",
            "without_op",
            "nccl",
            "nccl_untold",
            "tf32",
        ):
            setattr(summed, name, getattr(self, name) + getattr(other, name))
        summed.unpaired, summed.unknown = self.unpaired + other.unpaired, self.unknown + other.unknown
        return summed


@dataclass
class Measurements:
    measured: list[Measured]
    collectives: list[Collective]
    counts: Counts


# Files


def load(path: Path) -> dict[str, Any]:
    """Reads a trace, compressed with gzip or not."""
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise MayaError(f"{path} is truncated and cannot be unpacked ({error}).", f"Copy it again. {AGAIN}") from error
    except OSError as error:
        raise MayaError(f"{path} cannot be read: {error.strerror}.", "Give a trace of torch.profiler.") from error
    if not text.strip():
        raise MayaError(f"{path} is empty.", AGAIN)
    try:
        trace = json.loads(text)
    except ValueError as error:
        where = " It is truncated: the run may have been killed while it was written." * (
            getattr(error, "pos", 0) >= len(text) - 200
        )
        raise MayaError(f"{path} is not complete JSON ({error}).{where}", f"Copy it again. {AGAIN}") from error
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise MayaError(f"{path} is not a profiler trace: it has no traceEvents.", AGAIN)
    if not events:
        raise MayaError(f"{path} has no events: nothing ran while it was recorded.", AGAIN)
    answer: dict[str, Any] = trace
    return answer


def refuse_predicted(path: Path, trace: dict[str, Any]) -> None:
    """A timeline of Maya's has the form of a profiler trace, but nobody has measured its times."""
    if "maya" in trace:
        raise MayaError(
            f"{path} is a timeline that Maya {trace['maya']} predicted: a calibration from it would only repeat the prediction.",
            f"Give a trace of a real run. {AGAIN}",
        )


def gpu_by_driver_name(name: str) -> Gpu | None:
    """The GPU with this driver name. The catalog's own entry is preferred to one that a user derived from it."""
    wanted = name.removeprefix("NVIDIA ").casefold()
    found = [gpu for gpu in gpus().values() if gpu.driver_name.removeprefix("NVIDIA ").casefold() == wanted]
    return min(found, key=lambda gpu: gpu.base is not None, default=None)


def agreed_gpu(names: Iterable[str], requested: str | None, where: str) -> Gpu:
    """The GPU that was measured, according to the measurements and to the user. Raises an error if they disagree."""
    named = sorted({name for name in names if name})
    if len(named) > 1:
        raise MayaError(
            f"{where}: measured on GPUs of several kinds ({', '.join(named)}).", "Calibrate one kind at a time."
        )
    seen = gpu_by_driver_name(named[0]) if named else None
    if requested is None:
        if seen is not None:
            return seen
        what = f"its GPU, '{named[0]}', is not in the catalog" if named else "it does not name its GPU"
        raise MayaError(
            f"{where}: {what}.",
            "Name it with --gpu (`maya gpus` lists them), or describe it in your own file (`maya help hardware`).",
        )
    gpu = find_gpu(requested)
    if seen is not None and gpu.driver_name != seen.driver_name and seen.name not in (gpu.name, gpu.base):
        raise MayaError(
            f"{where} was measured on {named[0]} ({seen.name}), not on {gpu.name}.",
            f"Remove --gpu, or give {seen.name} or your own GPU that is based on it.",
        )
    return gpu


def device_names(trace: dict[str, Any]) -> list[str]:
    """The driver names of the GPUs that ran the work."""
    names = {each.get("id"): str(each.get("name", "")) for each in trace.get("deviceProperties") or []}
    used = {
        event.get("args", {}).get("device")
        for event in trace["traceEvents"]
        if str(event.get("cat", "")).lower() == KERNEL
    }
    return [name for device, name in names.items() if device in used] or list(names.values())


# Links


def read_trace(
    path: Path, gpu: Gpu, *, gpus_per_node: int = 8, network: str = "", trace: dict[str, Any] | None = None
) -> Measurements:
    return measure([path], gpu, gpus_per_node=gpus_per_node, network=network, loaded=[trace] if trace else None)


def measure(
    paths: Sequence[Path],
    gpu: Gpu,
    *,
    gpus_per_node: int = 8,
    network: str = "",
    loaded: Sequence[dict[str, Any]] | None = None,
) -> Measurements:
    """Combines the measurements in the traces of one or several ranks."""
    samples: dict[Kernel, list[float]] = defaultdict(list)
    messages: dict[tuple[str, float, int, int, str], list[float]] = defaultdict(list)
    counts = Counts()
    with Replay(gpu) as replay:
        for place, path in enumerate(paths):
            trace = loaded[place] if loaded is not None else load(path)
            part = _Reader(path, trace["traceEvents"]).read(replay, gpus_per_node, network)
            counts = counts + part.counts
            for kernel, seconds in part.samples.items():
                samples[kernel] += seconds
            for key, seconds in part.messages.items():
                messages[key] += seconds
    measured = [_row(kernel, np.array(seconds)) for kernel, seconds in samples.items()]
    collectives = [
        Collective(
            op=op,
            bytes=nbytes,
            ranks_per_node=each,
            nodes=nodes,
            network=over,
            samples=len(seconds),
            seconds=float(np.percentile(seconds, LOW_DECILE)),
        )
        for (op, nbytes, each, nodes, over), seconds in messages.items()
    ]
    return Measurements(measured, collectives, counts)


def _row(kernel: Kernel, seconds: np.ndarray) -> Measured:
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return Measured(
        family=kernel.family,
        model=kernel.model,
        sizes=kernel.sizes,
        seconds=float(middle),
        samples=len(seconds),
        spread=round(float((high - low) / middle), 4),
    )


@dataclass
class _Part:
    samples: dict[Kernel, list[float]]
    messages: dict[tuple[str, float, int, int, str], list[float]]
    counts: Counts


class _Reader:
    """Reads one trace."""

    def __init__(self, path: Path, events: list[dict[str, Any]]) -> None:
        self.path = path
        self.counts = Counts()
        self.ops: list[dict[str, Any]] = []
        self.launches: list[dict[str, Any]] = []
        self.work: list[OnDevice] = []
        for event in events:
            self._sort(event)
        self._check()
        self._find_contention()

    def _sort(self, event: dict[str, Any]) -> None:
        category = str(event.get("cat", "")).lower()
        if "ts" not in event or "dur" not in event:
            return
        if category in OPS:
            self.ops.append(event)
        elif category in LAUNCHES:
            if "correlation" in event.get("args", {}):
                self.launches.append(event)
        elif category in (KERNEL, MEMCPY, MEMSET):
            args, start = event.get("args", {}), float(event["ts"])
            device = int(args.get("device", 0))
            self.work.append(OnDevice(category, event["name"], device, start, start + float(event["dur"]), args))

    def _check(self) -> None:
        if not self.work:
            raise MayaError(
                f"{self.path} has no GPU activity: the run was on the CPU, or GPU activity was not recorded.",
                f"{AGAIN} The profiler needs CUPTI, which comes with torch's CUDA builds.",
            )
        arguments = [op.get("args", {}) for op in self.ops]
        described = any("Collective name" in args for args in [*arguments, *(work.args for work in self.work)])
        self.counts.shapes = any("Input type" in args for args in arguments)
        if not self.counts.shapes and not described:
            raise MayaError(
                f"{self.path} has no shapes, so kernels cannot be assigned to ops.",
                f"{AGAIN} Only record_shapes is missing.",
            )
        self.counts.kernels = sum(not is_nccl(work) for work in self.work)

    def _find_contention(self) -> None:
        """Marks the work that overlapped an NCCL kernel on the same GPU."""
        by_device: dict[int, list[OnDevice]] = defaultdict(list)
        for work in self.work:
            if is_nccl(work):
                by_device[work.device].append(work)
        for device, talk in by_device.items():
            talk.sort(key=lambda work: work.start)
            starts = np.array([work.start for work in talk])
            ends = np.maximum.accumulate(np.array([work.end for work in talk]))
            for work in self.work:
                if work.device == device and not is_nccl(work):
                    before = int(np.searchsorted(starts, work.end)) - 1  # the last that began before it ended
                    work.contended = before >= 0 and bool(ends[before] > work.start)

    def _calls(self) -> list[ProfiledCall]:
        """All calls that launched work."""
        by_correlation = {launch["args"]["correlation"]: launch for launch in self.launches}
        launched: dict[tuple[Any, Any], list[tuple[float, OnDevice]]] = defaultdict(list)
        for work in self.work:
            launch = by_correlation.get(work.args.get("correlation"))
            if launch is None:
                self._without_op(work)
            else:
                launched[launch["pid"], launch["tid"]].append((float(launch["ts"]), work))
        threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
        for op in self.ops:
            threads[op["pid"], op["tid"]].append(op)
        calls: list[ProfiledCall] = []
        for thread, started in launched.items():
            started.sort(key=lambda each: (each[0], each[1].args.get("correlation", 0)))
            calls += self._calls_of_thread(threads.get(thread, []), started)
        return calls

    def _calls_of_thread(self, ops: list[dict[str, Any]], work: list[tuple[float, OnDevice]]) -> list[ProfiledCall]:
        ops.sort(key=lambda op: (float(op["ts"]), -float(op["dur"])))
        made: dict[int, ProfiledCall] = {}
        around: list[dict[str, Any]] = []
        place = 0
        for moment, each in work:
            while place < len(ops) and float(ops[place]["ts"]) <= moment:
                start = float(ops[place]["ts"])
                while around and _end(around[-1]) <= start + ROUNDING_US:
                    around.pop()
                around.append(ops[place])
                place += 1
            while (
                around and _end(around[-1]) < moment
            ):  # old traces have whole microseconds, so an op that ends now still counts
                around.pop()
            if is_nccl(each):
                self._describe(each, around)
                continue
            op = _responsible(around)
            if op is None:
                self._without_op(each)
            else:
                made.setdefault(id(op), ProfiledCall(op["name"], op["args"])).work.append(each)
        return list(made.values())

    def _without_op(self, work: OnDevice) -> None:
        if not is_nccl(work):
            self.counts.without_op += 1

    @staticmethod
    def _describe(work: OnDevice, around: list[dict[str, Any]]) -> None:
        """Adds the arguments of a collective. Recent traces have them at the kernel, older ones at the op around it."""
        if "Collective name" not in work.args:
            for op in reversed(around):
                if "Collective name" in op.get("args", {}):
                    work.args = {**op["args"], **work.args}
                    return

    # Pairs

    def read(self, replay: Replay, gpus_per_node: int, network: str) -> _Part:
        runs: Runs = defaultdict(list)
        for call in self._calls():
            self._pair(call, replay, runs)
        samples = {}
        for kernel, found in runs.items():
            found.sort()
            kept = found if len(found) <= FEW else found[1:]
            launches = sum(number for _, _, number in kept)
            self.counts.used += launches
            self.counts.warm_up += sum(number for _, _, number in found) - launches
            samples[kernel] = [seconds for _, seconds, _ in kept]
        return _Part(samples, self._messages(gpus_per_node, network), self.counts)

    def _pair(self, call: ProfiledCall, replay: Replay, runs: Runs) -> None:
        copies = next((kind for work in call.work for kind in ("HtoD", "DtoH") if kind in work.name), "")
        names = tuple(dict.fromkeys(work.name for work in call.work))
        self.counts.strides &= "Input Strides" in call.args
        try:
            kernels = replay.kernels(RecordedCall.of(call.name, call.args, copies, names))
        except UnknownCall as reason:
            self.counts.unknown[str(reason)] += len(call.work)
            return
        pairs = pair(kernels, call.work)
        if pairs is None:
            self.counts.unpaired[call.name] += len(call.work)
            return
        for kernel, work in pairs:
            if any(each.contended for each in work):
                self.counts.contended += len(work)
            elif any("Pageable" in each.name for each in work):
                self.counts.pageable += len(work)
            elif (seconds := sum(each.seconds for each in work)) > 0:
                if isinstance(kernel, Gemm) and kernel.dtype == "float32" and _in_tf32(work):
                    kernel = replace(kernel, dtype="tf32")
                    self.counts.tf32 += 1
                runs[kernel].append((work[0].start, seconds, len(work)))

    def _messages(self, gpus_per_node: int, network: str) -> dict[tuple[str, float, int, int, str], list[float]]:
        found: dict[tuple[str, float, int, int, str], list[tuple[float, float]]] = defaultdict(list)
        for work in self.work:
            if not is_nccl(work):
                continue
            self.counts.nccl += 1
            described = message(work.args, gpus_per_node)
            if described is None:
                self.counts.nccl_untold += 1
                continue
            op, nbytes, each, nodes = described
            found[op, nbytes, each, nodes, network if nodes > 1 else ""].append((work.start, work.seconds))
        return {
            key: [seconds for _, seconds in (sorted(runs) if len(runs) <= FEW else sorted(runs)[1:])]
            for key, runs in found.items()
        }


def is_nccl(work: OnDevice) -> bool:
    return work.kind == KERNEL and work.name.startswith(("ncclDevKernel", "ncclKernel", "ncclSymDevKernel"))


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _responsible(around: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The op that is responsible for a launch: the outermost one that is one op for the GPU, otherwise the innermost ATen op."""
    inner = None
    for op in around:
        if not op["name"].startswith("aten::") or "Input type" not in op.get("args", {}):
            continue
        inner = op
        found = overload(op["name"], tuple(str(each) for each in op["args"]["Input type"]))
        if found is not None and found[1]:
            return op
    return inner


def _in_tf32(work: list[OnDevice]) -> bool:
    return any(part in each.name for each in work for part in TF32)


def pair(kernels: list[Kernel], work: list[OnDevice]) -> list[tuple[Kernel, list[OnDevice]]] | None:
    """Assigns the launches to the kernels, in order; None if they do not match.

    Launches that are part of another kernel's time are added to it. So is what cuBLAS and cuDNN do besides the main kernel: zeroing
    a result, adding up the parts of a split inner dimension, and changing the layout of images.
    """
    groups = [[each] for each in work]
    if len(groups) != len(kernels):
        groups = _joined(groups, kernels)
    if len(groups) != len(kernels):
        return None
    if any(not _alike(kernel, group) for kernel, group in zip(kernels, groups, strict=True)):
        return None
    real = [place for place, kernel in enumerate(kernels) if kernel.family != "included"]
    if not real:
        return None
    main = max(real, key=lambda place: kernels[place].family not in ("memory", "copy"))
    for place, kernel in enumerate(kernels):
        if kernel.family == "included":
            groups[main] = groups[main] + groups[place]
    return [(kernels[place], groups[place]) for place in real]


def _joined(groups: list[list[OnDevice]], kernels: list[Kernel]) -> list[list[OnDevice]]:
    """Joins launches that are one kernel for the predictor."""
    others = len(kernels) - 1
    if [kernel.family == "convolution" for kernel in kernels] == [True] + [False] * others and len(groups) > others:
        first = groups[: len(groups) - others]  # cuDNN changes the layout of images, and changes it back
        return [[work for group in first for work in group], *groups[len(groups) - others :]]
    joined: list[list[OnDevice]] = []
    for group in groups:
        after_zeroing = joined and len(joined[-1]) == 1 and joined[-1][0].kind == MEMSET and is_product(group[0].name)
        if joined and (after_zeroing or any(part in group[0].name for part in BESIDE_PRODUCTS)):
            joined[-1] = joined[-1] + group
        else:
            joined.append(group)
    return joined


def is_product(name: str) -> bool:
    return re.search(r"gemm|nvjet|cutlass|xmma|cublas", name, re.IGNORECASE) is not None


def _alike(kernel: Kernel, group: list[OnDevice]) -> bool:
    kinds = {work.kind for work in group}
    if MEMCPY in kinds:
        return kernel.family == "copy"
    if kinds == {MEMSET}:
        return kernel.family in ("memory", "included") and kernel.model in ("fill", "")
    return kernel.family != "copy"


def message(args: dict[str, Any], gpus_per_node: int) -> tuple[str, float, int, int] | None:
    """The op, bytes of the whole buffer, ranks per node and nodes of a collective; None if they are unknown or uneven."""
    op = COLLECTIVES.get(str(args.get("Collective name", "")))
    size = int(args.get("Group size") or 0)
    elements = max(int(args.get("In msg nelems") or 0), int(args.get("Out msg nelems") or 0))
    if op is None or elements == 0 or size < 2:
        return None
    if op == "all_to_all" and any(len(set(_numbers(args.get(f"{way} split size")))) > 1 for way in ("In", "Out")):
        return None  # the links carried different amounts
    ranks = _numbers(args.get("Process Group Ranks"))
    if len(ranks) != size:
        first, stride = args.get("Global rank start"), args.get("Global rank stride")
        if first is None or not stride:
            return None
        ranks = [int(first) + int(stride) * place for place in range(size)]
    nodes = Counter(rank // gpus_per_node for rank in ranks)
    if len(set(nodes.values())) != 1 or op == "send":
        return None  # the peers of a message are not recorded
    return op, float(elements * item_bytes(str(args.get("dtype")))), size // len(nodes), len(nodes)


def _numbers(text: Any) -> list[int]:
    listed = text if isinstance(text, list) else re.findall(r"-?\d+", str(text or ""))
    return [int(each) for each in listed]


__all__ = [
    "NO_OVERLOAD",
    "Measurements",
    "agreed_gpu",
    "device_names",
    "gpu_by_driver_name",
    "load",
    "measure",
    "read_trace",
]
