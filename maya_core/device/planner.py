"""Plans the calls that the native device meets for the first time: which kernels a call launches, and what it allocates. How long
kernels take is the predictor's business: whoever creates the device hands in a function that knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from maya_core.errors import MayaError
from maya_core.hardware.host_costs import KERNEL_GAP_S, LAUNCH_S, TRITON_S
from maya_core.hardware.models import Gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.attention_choice import backend_of, settled
from maya_core.ops.kernel import Kernel, to_json
from maya_core.ops.plan import find, flops_of, kernels_of, plan
from maya_core.ops.work import Work
from maya_core.torch_seam.version import installed
from maya_core.trace.call import Call, Tensor, TorchSettings, as_tensors
from maya_core.trace.triton_kernel import NAMESPACE, TritonKernel

KernelSeconds = Callable[[Sequence[Kernel]], np.ndarray]  # the duration of each kernel on the emulated GPU


def no_durations(kernels: Sequence[Kernel]) -> np.ndarray:
    """For devices that only record: no program may time its GPU on them."""
    raise MayaError(
        "the program times its GPU, and this device was created without durations.",
        "Use `maya run` or `maya_core.emulate`.",
    )


@dataclass
class Planner:
    """Plans calls for one kind of GPU and numbers them."""

    gpu: Gpu
    kernel_seconds: KernelSeconds = no_durations
    settings: list[str] = field(default_factory=list)  # names of the bits that calls carry
    calls: list[Call] = field(default_factory=list)
    _chosen: dict[tuple[Tensor, Tensor, Tensor], TorchSettings] = field(default_factory=dict)  # by query, key and value
    triton: list[TritonKernel] = field(default_factory=list)  # by the number that their calls carry as last argument

    @cached_property
    def platform(self) -> Platform:
        return Platform(self.gpu, installed().version)

    def number_of(self, kernel: TritonKernel) -> int:
        """The number of a Triton kernel, a new one if it was not met before."""
        if kernel not in self.triton:
            self.triton.append(kernel)
        return self.triton.index(kernel)

    def plan(
        self, op: str, names: list[str], arguments: list[Any], outputs: list[Any], settings: int = 0
    ) -> tuple[int, list[tuple[int, int]] | None]:
        """The call's number, and its allocations if they are not just the outputs."""
        given = [as_tensors(argument) for argument in arguments]
        made = [as_tensors(output) for output in outputs]
        kernel = self.triton[given[-1]] if op.startswith(NAMESPACE) else None
        call = self._settled(
            Call(op, list(names), given, made, TorchSettings.from_bits(settings, self.settings), kernel)
        )
        work = plan(call, self.platform)
        if kernel is None and described_by_program(call):
            self._check(call, work)
            call = replace(call, kernels=[to_json(each) for each in work.kernels], flops=flops_of(call))
        self.calls.append(call)
        return len(self.calls) - 1, work.program or None

    def _check(self, call: Call, work: Work) -> None:
        """Refuses kernels that the program describes and nobody can price: now, not when the emulation is over."""
        if self.kernel_seconds is no_durations:
            return
        try:
            self.kernel_seconds(work.kernels)
        except (LookupError, TypeError, ValueError) as error:
            raise MayaError(
                f"the kernels described for {call.op} cannot be priced: {type(error).__name__}: {error}.",
                "`maya help extending` lists the kernels, patterns and dtypes.",
            ) from error

    def _settled(self, call: Call) -> Call:
        """Attention with the switches that it was chosen by: those of a backward pass are its forward's."""
        if backend_of(call) is None:
            return call
        where = (call["query"], call["key"], call["value"])
        if call.name.endswith("_backward") and where in self._chosen:
            call = replace(call, settings=self._chosen[where])
        call = settled(call, self.platform)
        self._chosen[where] = call.settings
        return call

    def cost(self, number: int) -> tuple[float, float, bool]:
        """A call's nanoseconds on the device and on the host beyond its dispatch, and whether it is dispatched at all. Asked where the
        program times its GPU."""
        call = self.calls[number]
        kernels = kernels_of(call, self.platform)
        device = float(self.kernel_seconds(kernels).sum()) + KERNEL_GAP_S * len(kernels)
        host = LAUNCH_S * len(kernels) + (TRITON_S if call.triton is not None else 0.0)
        return device * 1e9, host * 1e9, call.triton is None


def described_by_program(call: Call) -> bool:
    """Whether the op's rule is not Maya's own: who prices the trace later does not have it."""
    rule = find(call)
    return rule is not None and not rule.__module__.startswith("maya_core.")
