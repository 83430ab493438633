"""Answers the native device's question: this call is new, what does it do?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from maya_core.device.kernels import (  # noqa: F401  they register their rules
    attention,
    convolution,
    indexing,
    losses,
    matmul,
    normalization,
    reductions,
    shards,
    sorting,
    table,
)
from maya_core.device.kernels.call import RULES, Call, Signature, Tensor, Work, as_tensors
from maya_core.device.kernels.flops import flops
from maya_core.device.kernels.iterator import pointwise_launches
from maya_core.device.kernels.multi_tensor import foreach
from maya_core.device.kernels.triton import NAMESPACE, TritonKernel
from maya_core.hardware.catalog import Gpu

# Ops that answer from metadata: nothing reaches the device.
NO_KERNEL = {
    "empty",
    "resize_",
    "set_",
    "_use_cudnn_ctc_loss",
    "_cudnn_init_dropout_state",
    "is_set_to",
    "_has_same_storage_numel",
}
PEAK_DTYPE = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Char": "int8",
    "Float8_e4m3fn": "float8",
    "Float8_e5m2": "float8",
}


@dataclass
class Planner:
    """Plans calls for one kind of GPU and numbers their signatures."""

    gpu: Gpu
    signatures: list[Signature] = field(default_factory=list)
    triton: list[TritonKernel] = field(default_factory=list)  # by the number that their calls carry as last argument

    def number_of(self, kernel: TritonKernel) -> int:
        """The number of a Triton kernel, a new one if it was not met before."""
        if kernel not in self.triton:
            self.triton.append(kernel)
        return self.triton.index(kernel)

    def plan(
        self, op: str, names: list[str], arguments: list[Any], outputs: list[Any]
    ) -> tuple[int, float, list[tuple[int, int]] | None]:
        """Number of the signature, a lower bound of its time in ns, and its allocations if they are not just the outputs."""
        major, minor = self.gpu.compute_capability
        call = Call(
            op, list(names), [as_tensors(a) for a in arguments], [as_tensors(o) for o in outputs],
            self.gpu.sms, self.gpu.max_threads_per_sm, major * 10 + minor,
        )  # fmt: skip
        kernel = self.triton[call.arguments[-1]] if op.startswith(NAMESPACE) else None
        work = Work() if kernel else self.work(call)
        operations = kernel.flops if kernel else flops(call)
        self.signatures.append(
            Signature(op, call.names, call.arguments, call.outputs, work.launches, operations, kernel)
        )
        return len(self.signatures) - 1, self.lower_bound_ns(call), work.program or None

    def work(self, call: Call) -> Work:
        if call.name in NO_KERNEL or (call.results and not any(t.numel for t in call.results)):
            return Work(launches=0)
        if call.name.startswith("_foreach_"):
            return foreach(call)
        rule = RULES.get(call.name)
        if rule is not None:
            try:
                return rule(call)
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                # a call of a kind the rule's author did not think of must not stop the user's program
                warnings.warn(
                    f"maya: what {call.op} launches is not known for this call ({error}); counted as one kernel.",
                    stacklevel=2,
                )
                return Work()
        tensors: list[Tensor] = call.results or call.inputs[:1]
        return Work(launches=pointwise_launches(tensors[0], call.inputs) if tensors else 1)

    def lower_bound_ns(self, call: Call) -> float:
        """Roofline: neither memory nor arithmetic can be faster than the data sheet."""
        touched = sum(t.nbytes for t in call.inputs if t.device == "cuda") + sum(t.nbytes for t in call.results)
        seconds = touched / self.gpu.memory_bandwidth_bytes_per_s
        operations = flops(call)
        if operations and call.inputs:
            peak = (
                self.gpu.peak_flops.get(PEAK_DTYPE.get(call.inputs[-1].dtype, "float32"))
                or self.gpu.peak_flops["float32"]
            )
            seconds = max(seconds, operations / peak)
        return seconds * 1e9
