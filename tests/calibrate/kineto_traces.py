"""Profiler traces as Kineto lays them out, for tests: ops on a thread, launches inside them, kernels on streams."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

H100 = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85028896768, "computeMajor": 9, "computeMinor": 0, "numSms": 132}  # fmt: skip


def packed(dims: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return strides[::-1]


class KinetoTrace:
    """Events in the order they happen; `now` is in microseconds."""

    def __init__(self, gpu: dict[str, Any] | None = H100, *, strides: bool = True, values: bool = True) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0.0, "args": {"name": "python"}}]  # fmt: skip
        self.gpu, self.strides, self.values = gpu, strides, values
        self.now, self.ids, self.free = 1000.0, 0, 0.0

    @contextmanager
    def op(self, name: str, *arguments: Any) -> Iterator[None]:
        """An argument is (type, dims), (type, dims, strides), or a number, list or None of the host's."""
        self.ids += 1
        start, args = self.now, {"External id": self.ids, "Record function id": 0, "Ev Idx": self.ids}
        if arguments:
            types, dims, strides, values = zip(*(self._described(each) for each in arguments), strict=True)
            args |= {"Input type": list(types), "Input Dims": list(dims)}
            if self.strides:
                args["Input Strides"] = list(strides)
            if self.values:
                args["Concrete Inputs"] = list(values)
        event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 77, "tid": 77, "ts": start, "dur": 0.0, "args": args}
        self.events.append(event)
        self.now += 1
        yield
        self.now += 1
        event["dur"] = self.now - start
        self.now += 1

    @staticmethod
    def _described(argument: Any) -> tuple[str, list[Any], list[Any], str]:
        if argument is None:
            return "", [], [], ""
        if isinstance(argument, tuple) and argument[0] == "TensorList":
            return "TensorList", argument[1], [packed(dims) for dims in argument[1]], ""
        if isinstance(argument, tuple):
            kind, dims, *strides = argument
            return kind, dims, strides[0] if strides else packed(dims), ""
        return ("ScalarList" if isinstance(argument, list) else "Scalar"), [], [], str(argument)

    def kernel(
        self, name: str, us: float, *, cat: str = "kernel", stream: int = 7, at: float | None = None, **args: Any
    ) -> None:
        """One launch here and now, run after what its stream has before it."""
        self.ids += 1
        api = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}[cat]
        launch = {"External id": self.ids, "cbid": 211, "correlation": self.ids}
        self.events.append({"ph": "X", "cat": "cuda_runtime", "name": api, "pid": 77, "tid": 77, "ts": self.now, "dur": 0.5, "args": launch})  # fmt: skip
        start = at if at is not None else max(self.now + 2, self.free)
        if at is None:
            self.free = start + us
        on = {"External id": self.ids, "device": 0, "context": 1, "stream": stream, "correlation": self.ids, **args}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": us, "args": on})  # fmt: skip
        self.events.append({"ph": "s", "id": self.ids, "pid": 77, "tid": 77, "ts": self.now, "cat": "ac2g", "name": "ac2g"})  # fmt: skip
        self.now += 1

    def linear(self, m: int, n: int, k: int, us: float, *extra: str) -> None:
        """A linear layer without bias, in bfloat16, as autograd and ATen nest it."""
        half = "c10::BFloat16"
        with self.op("aten::linear", (half, [m, k]), (half, [n, k]), None):
            with self.op("aten::t", (half, [n, k])):
                pass
            with self.op("aten::mm", (half, [m, k]), (half, [k, n], [1, k])):
                self.kernel("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", us)
                for name in extra:
                    self.kernel(name, 1.0)

    def add(self, rows: int, columns: int, us: float) -> None:
        both = ("float", [rows, columns])
        with self.op("aten::add", both, both, 1):
            self.kernel("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", us)

    def all_reduce(self, elements: int, us: float, ranks: list[int], at: float | None = None) -> None:
        told = {
            "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "Group size": len(ranks),
            "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", "Process Group Name": "0",
            "Process Group Description": "default_pg", "Process Group Ranks": str(ranks),
        }  # fmt: skip
        with self.op("record_param_comms"):
            self.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", us, stream=20, at=at, **told)  # fmt: skip

    @property
    def content(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1, "deviceProperties": [self.gpu] if self.gpu else [], "cuda_runtime_version": 12080,
            "record_shapes": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 1700000000000000000,
            "traceEvents": self.events, "traceName": "trace.json",
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path
