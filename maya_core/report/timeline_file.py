"""Writes the predicted steady steps as profiler traces: what torch.profiler (Kineto) would have exported, one file per rank.

    write_trace(analysis, Path("trace.json.gz"))

Perfetto, chrome://tracing and HolisticTraceAnalysis can read them. `maya calibrate kineto` refuses them, because nobody measured their
times. They differ from Kineto's in two ways:
kernels are named after their family and their op, because the real names depend on the GPU's libraries; and a launch whose time was
measured together with that of another has no duration of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.errors import MayaError
from maya_core.files import FileKind, rank_paths, write_file
from maya_core.hardware.dtypes import item_bytes
from maya_core.hardware.host_costs import KERNEL_GAP_S, LAUNCH_S
from maya_core.ops.kernel import Copy, Kernel
from maya_core.report.analysis import Analysis
from maya_core.simulator.clock import WorkKind
from maya_core.simulator.host import host_seconds
from maya_core.simulator.simulate import RankTimeline
from maya_core.trace.call import Call, Tensor, tensors_in
from maya_core.trace.communication import CollectiveCall, Communicator
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import REPLAYED, EventKind

DEFAULT_STREAM = 7  # CUPTI's number; torch uses 0
GPU_SORT = 5_000_000  # so that viewers show GPUs below the threads of the host
APART_S = 2e-9
FIRST_ID = 100_000  # HolisticTraceAnalysis would read columns of small ids as 16-bit numbers
PID = 1000  # the process of rank 0; it must differ from the numbers of GPUs
# Element types as C++ compilers name them.
CPP = {
    "Float": "float", "Double": "double", "Half": "c10::Half", "BFloat16": "c10::BFloat16", "Bool": "bool",
    "Byte": "unsigned char", "Char": "signed char", "Short": "short int", "Int": "int", "Long": "long int",
    "ComplexFloat": "c10::complex<float>", "ComplexDouble": "c10::complex<double>", "ComplexHalf": "c10::complex<c10::Half>",
    "UInt16": "unsigned short", "UInt32": "unsigned int", "UInt64": "unsigned long",
}  # fmt: skip
COPIES = {
    "h2d": "Memcpy HtoD (Pinned -> Device)",
    "d2h": "Memcpy DtoH (Device -> Pinned)",
    "d2d": "Memcpy DtoD (Device -> Device)",
}
# For each of Maya's collectives: the name of NCCL's kernel, and c10d's name.
COLLECTIVES = {
    "all_reduce": ("AllReduce", "allreduce"), "all_gather": ("AllGather", "allgather"),
    "all_gather_into_tensor": ("AllGather", "_allgather_base"), "reduce_scatter": ("ReduceScatter", "reduce_scatter"),
    "reduce_scatter_tensor": ("ReduceScatter", "_reduce_scatter_base"), "broadcast": ("Broadcast", "broadcast"),
    "reduce": ("Reduce", "reduce"), "all_to_all": ("SendRecv", "all_to_allv"), "send": ("SendRecv", "send"),
    "recv": ("SendRecv", "recv"), "gather": ("SendRecv", "gather"), "scatter": ("SendRecv", "scatter"),
    "barrier": ("AllReduce", "barrier"),
}  # fmt: skip
REDUCES = ("AllReduce", "ReduceScatter", "Reduce")
NCCL_TYPES = {"Float": "f32", "Half": "f16", "BFloat16": "bf16", "Double": "f64", "Int": "i32", "Long": "i64", "Char": "i8"}  # fmt: skip
SYNCS = {
    WorkKind.HOST_EVENT: "cudaEventSynchronize",
    WorkKind.HOST_LANE: "cudaStreamSynchronize",
    WorkKind.HOST_DEVICE: "cudaDeviceSynchronize",
}


def write_trace(analysis: Analysis, path: str | Path, rank: int | None = None) -> list[Path]:
    """Writes one rank to `path`, or every rank to a file of its own, such as trace-rank-00008.json.gz."""
    path = Path(path)
    if analysis.timeline is None or not analysis.steps:
        raise MayaError(
            "there is no step to write as a timeline: the job hangs, or it did not complete an optimizer step.",
            "The report page and the memory snapshot show the run up to that point.",
        )
    paths = rank_paths(path, list(analysis.timeline.ranks) if rank is None else [rank])
    for each, own in paths.items():
        write_file(own, "".join(_lines(_Rank(analysis, each))), FileKind.TIMELINE)
    return list(paths.values())


def _lines(rank: _Rank) -> Iterator[str]:
    """The file in Kineto's layout: a header, then one event per line."""
    head = json.dumps(rank.header(), indent=2)
    yield head.removesuffix("\n}") + ',\n  "traceEvents": [\n  '
    yield ",\n  ".join(json.dumps(event) for event in rank.events())
    yield "\n  ]\n}\n"


class _Rank:
    """The profiler trace of one rank."""

    def __init__(self, analysis: Analysis, rank: int) -> None:
        assert analysis.timeline is not None
        self.analysis = analysis
        self.rank = rank
        self.trace: RankTrace = analysis.job.ranks[rank]
        self.items: RankTimeline = analysis.timeline.ranks[rank]
        self.pid = PID + rank
        priced = analysis.durations[rank]
        self.calls, self.kernels = priced.calls, priced.kernels
        seconds = iter(priced.each.seconds.tolist())  # they add up to the op's time in the prediction
        self.seconds = [[next(seconds) for _ in kernels] for kernels in self.kernels]
        self.described = [_inputs(call) for call in self.calls]
        self.ids = FIRST_ID

    def header(self) -> dict[str, Any]:
        gpu, job = self.analysis.cluster.gpu, self.analysis.job
        major, minor = gpu.compute_capability
        groups = [group for group in self.trace.communicators if group.backend == "nccl"]
        return {
            "maya": self.trace.meta["maya"],
            "schemaVersion": 1,
            "deviceProperties": [
                {
                    "id": device, "name": gpu.driver_name, "totalGlobalMem": gpu.memory_bytes, "computeMajor": major,
                    "computeMinor": minor, "numSms": gpu.sms,
                }
                for device in sorted({device for device, _ in self.trace.streams})
            ],
            "distributedInfo": {
                "backend": "nccl", "rank": self.rank, "world_size": job.world_size, "pg_count": len(groups),
                "pg_config": [
                    {"pg_name": group.name, "backend_config": "cuda:nccl", "pg_size": len(group.ranks), "ranks": list(group.ranks)}
                    for group in groups
                ],
            },
            "record_shapes": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 0,
            "traceName": f"rank {self.rank}, predicted by Maya {self.trace.meta['maya']}",
        }  # fmt: skip

    def events(self) -> Iterator[dict[str, Any]]:
        where, _ = self.analysis.steady_events(self.rank)
        items = np.flatnonzero((self.items.event >= where.start) & (self.items.event < where.stop))
        self.begins = self._begins()
        yield from self._names(items)
        yield from self._steps(items)
        graph = 0
        for item in items.tolist():
            event = self.trace.events[self.items.event[item]]
            kind = WorkKind(int(self.items.kind[item]))
            if event["kind"] == EventKind.GRAPH_LAUNCH:
                graph = self._next()
                yield self._runtime("cudaGraphLaunch", item, self.begins[item], self.items.issued[item], graph)
            elif event["kind"] == EventKind.OP:
                yield from self._op(item, event, graph)
            elif kind == WorkKind.MEET:
                yield from self._collective(item, event)
            elif kind == WorkKind.HOST_MEET:
                call, group = self._call(event)
                start, end = self.items.issued[item], self.items.over[item]
                yield self._on_host(f"gloo:{call.op}", "cpu_op", event, start, end, _collective_details(call, group))
            elif kind in SYNCS and item + 1 < len(self.begins):
                yield self._runtime(SYNCS[kind], item, self.items.issued[item], self.begins[item + 1], self._next())

    def _begins(self) -> np.ndarray:
        """When the host began each item: after the previous one, with a small gap so that readers can tell them apart."""
        spent = host_seconds(
            self.trace, self.analysis.durations[self.rank], self.items.event, self.analysis.options.host
        )
        before = np.concatenate([[0.0], self.items.issued[:-1] + APART_S])
        begins: np.ndarray = np.maximum(self.items.issued - np.maximum(spent, 0.0), before)
        return begins

    def _next(self) -> int:
        self.ids += 1
        return self.ids

    def _names(self, items: np.ndarray) -> Iterator[dict[str, Any]]:
        rows = self.trace.events[self.items.event[items]]
        yield from _process(self.pid, "python", "CPU", self.pid)
        for thread in np.unique(rows["thread"]).tolist():
            yield _meta("thread_name", self.pid, self._thread(thread), name=f"thread {self._thread(thread)} (python)")
        used = np.unique(self.items.lane[items][self.items.kind[items] <= WorkKind.MEET]).tolist()
        for device in sorted({self.trace.streams[lane][0] for lane in used}):
            yield from _process(device, "python", f"GPU {device}", GPU_SORT + device)
        for lane in used:
            device, stream = self._stream(lane)
            yield _meta("thread_name", device, stream, name=f"stream {stream}")

    def _thread(self, thread: int) -> int:
        return self.pid + thread

    def _stream(self, lane: int) -> tuple[int, int]:
        device, stream = self.trace.streams[lane]
        return device, stream or DEFAULT_STREAM

    def _steps(self, items: np.ndarray) -> Iterator[dict[str, Any]]:
        """Each step, once on the host and once on the GPU."""
        marks = [
            item
            for item in items.tolist()
            if self.items.kind[item] == WorkKind.MARK
            and self.trace.events["kind"][self.items.event[item]] == EventKind.STEP_END
        ]
        first = int(items[0])
        for mark in marks:
            number = int(self.trace.events["a"][self.items.event[mark]])
            name, identity = f"ProfilerStep#{number}", self._next()
            end = max(self.items.issued[mark], self.items.issued[first : mark + 1].max())
            yield _span(name, "user_annotation", self.pid, self.pid, self.begins[first], end, {"External id": identity})
            ran = np.arange(first, mark + 1)
            ran = ran[(self.items.kind[ran] <= WorkKind.MEET) & (self.items.over[ran] > self.items.began[ran])]
            if len(ran):
                device, stream = self._stream(int(self.items.lane[ran[0]]))
                start, end = self.items.began[ran].min(), self.items.over[ran].max()
                yield _span(name, "gpu_user_annotation", device, stream, start, end, {"External id": identity})
            first = mark + 1

    def _op(self, item: int, event: np.void, graph: int) -> Iterator[dict[str, Any]]:
        number = int(event["subject"])
        call = self.calls[number]
        replayed = bool(event["flags"] & REPLAYED)
        identity = self._next()
        if not replayed:
            name = call.name
            args = {"External id": identity, **self._module(event), **self.described[number]}
            yield self._on_host(name, "cpu_op", event, self.begins[item], self.items.issued[item], args)
        kernels = self.kernels[number]
        if not kernels:
            return
        start, over = float(self.items.met[item]), float(self.items.over[item])
        alone = sum(self.seconds[number]) + KERNEL_GAP_S * len(kernels)
        stretch = (over - start) / alone  # compute takes longer while communication runs
        launch = max(float(self.begins[item]), float(self.items.issued[item]) - LAUNCH_S * len(kernels))
        each = (float(self.items.issued[item]) - launch) / len(kernels)
        for kernel, seconds in zip(kernels, self.seconds[number], strict=True):
            correlation = graph
            copies = kernel.direction if isinstance(kernel, Copy) else ""
            if not replayed:
                correlation = self._next()
                api = "cudaMemcpyAsync" if copies else "cudaLaunchKernel"
                yield self._runtime(api, item, launch, launch + each, correlation, identity)
                yield self._flow("s", self.pid, self._thread(int(event["thread"])), launch, correlation)
            name = COPIES.get(copies) or _kernel_name(kernel, call)
            more: dict[str, Any] = {"bytes": int(kernel.bytes)} if isinstance(kernel, Copy) else {}
            yield from self._on_device(
                name, "gpu_memcpy" if copies else "kernel", item, start, start + seconds * stretch, correlation, identity,
                {**more, **self._module(event)}, flow=not replayed,
            )  # fmt: skip
            start += (seconds + KERNEL_GAP_S) * stretch
            launch += each

    def _collective(self, item: int, event: np.void) -> Iterator[dict[str, Any]]:
        """A collective. NCCL's kernel runs as soon as its stream reaches it, and waits inside for the other ranks."""
        call, group = self._call(event)
        details = _collective_details(call, group)
        identity, correlation = self._next(), self._next()
        issued = float(self.items.issued[item])
        yield self._on_host(
            "record_param_comms", "cpu_op", event, self.begins[item], issued, {"External id": identity, **details}
        )
        launch = max(float(self.begins[item]), issued - LAUNCH_S)
        yield self._runtime("cudaLaunchKernelExC", item, launch, issued, correlation, identity)
        yield self._flow("s", self.pid, self._thread(int(event["thread"])), launch, correlation)
        kernel, _ = COLLECTIVES[call.op]
        kind = f"_{(call.reduction or 'sum').capitalize()}_{NCCL_TYPES.get(call.dtype, 'u8')}" * (kernel in REDUCES)
        way = "" if kernel == "SendRecv" else "_RING_LL"
        name = f"ncclDevKernel_{kernel}{kind}{way}(ncclDevKernelArgsStorage<4096ul>)"
        start, over = float(self.items.began[item]), float(self.items.over[item])
        waits = {"Waiting for ranks (us)": _us(float(self.items.met[item]) - start)}
        yield from self._on_device(name, "kernel", item, start, over, correlation, identity, {**details, **waits})

    def _call(self, event: np.void) -> tuple[CollectiveCall, Communicator]:
        call = self.trace.collectives[int(event["subject"])]
        return call, self.trace.communicators[call.communicator]

    def _module(self, event: np.void) -> dict[str, Any]:
        module = self.trace.modules[int(event["module"])]
        return {"Module Hierarchy": module} if module else {}

    def _on_host(
        self, name: str, category: str, event: np.void, start: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        return _span(name, category, self.pid, self._thread(int(event["thread"])), start, end, args)

    def _runtime(
        self, name: str, item: int, start: float, end: float, correlation: int, identity: int | None = None
    ) -> dict[str, Any]:
        args = {"External id": identity if identity is not None else correlation, "correlation": correlation}
        event = self.trace.events[self.items.event[item]]
        return self._on_host(name, "cuda_runtime", event, float(start), float(end), args)

    def _on_device(
        self,
        name: str,
        category: str,
        item: int,
        start: float,
        end: float,
        correlation: int,
        identity: int,
        more: dict[str, Any],
        flow: bool = True,
    ) -> Iterator[dict[str, Any]]:
        device, stream = self._stream(int(self.items.lane[item]))
        args = {
            "External id": identity, "device": device, "context": 1, "stream": stream, "correlation": correlation, **more
        }  # fmt: skip
        yield _span(name, category, device, stream, start, end, args)
        if flow:
            yield self._flow("f", device, stream, start, correlation)

    def _flow(self, phase: str, pid: int, tid: int, at: float, correlation: int) -> dict[str, Any]:
        end = {"bp": "e"} if phase == "f" else {}
        return {
            "ph": phase, "id": correlation, "pid": pid, "tid": tid, "ts": _us(at), "cat": "ac2g", "name": "ac2g", **end
        }  # fmt: skip


def _span(
    name: str, category: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    at = _us(start)
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": at, "dur": round(max(0.0, _us(end) - at), 3),
        "args": args,
    }  # fmt: skip


def _us(seconds: float) -> float:
    """Microseconds, rounded to nanoseconds as in Kineto's files."""
    return round(float(seconds) * 1e6, 3)


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": args}


def _process(pid: int, name: str, label: str, place: int) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name=name)
    yield _meta("process_labels", pid, 0, labels=label)
    yield _meta("process_sort_index", pid, 0, sort_index=place)


def _kernel_name(kernel: Kernel, call: Call) -> str:
    """The name of a kernel: its family, dtype and op, such as gemm<c10::BFloat16> aten::mm"""
    given = [t for argument in call.arguments for t in tensors_in(argument)]
    dtype = next((t.dtype for t in [*given, *call.results] if t.device != "cpu"), "")
    what = kernel.family if kernel.named in ((), ("dtype",), ("op",)) else kernel.model
    return f"{what}<{_cpp(dtype)}> {call.name}"


def _cpp(dtype: str) -> str:
    return CPP.get(dtype, f"c10::{dtype}" if dtype else "")


def _inputs(call: Call) -> dict[str, Any]:
    arguments = list(call.arguments)
    if call.op == "aten::copy_" and len(arguments) == 2:
        arguments.append(False)  # non_blocking, which the trace does not contain
    rows = [_input(argument) for argument in arguments]
    types, dims, strides, values = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return {"Concrete Inputs": values, "Input type": types, "Input Strides": strides, "Input Dims": dims}


def _input(argument: Any) -> tuple[str, list[Any], list[Any], str]:
    """Type, dims, strides and value of an argument, as the profiler records them."""
    if argument is None or isinstance(argument, str):  # which the profiler omits
        return "", [], [], ""
    if isinstance(argument, Tensor):
        return _cpp(argument.dtype), list(argument.sizes), list(argument.strides), ""
    if isinstance(argument, list):
        if argument and all(isinstance(each, Tensor) for each in argument):
            return "TensorList", [list(each.sizes) for each in argument], [list(each.strides) for each in argument], ""
        if any(isinstance(each, Tensor) for each in argument):  # indices, some of them None
            return "", [], [], ""
        return "ScalarList", [], [], str(argument)
    return "Scalar", [], [], str(argument)


def _collective_details(call: CollectiveCall, group: Communicator) -> dict[str, Any]:
    """The arguments that recent profilers record for a collective's kernel and for its op."""
    ranks = list(group.ranks)
    return {
        "Collective name": COLLECTIVES[call.op][1], "In msg nelems": call.elements_in, "Out msg nelems": call.elements_out,
        "Group size": len(ranks), "dtype": call.dtype, "In split size": str(list(call.splits_in)),
        "Out split size": str(list(call.splits_out)), "Process Group Name": group.name,
        "Process Group Description": "default_pg" if group.name == "0" else "undefined", "Process Group Ranks": str(ranks),
        "Bytes": max(call.elements_in, call.elements_out) * item_bytes(call.dtype),
    }  # fmt: skip
