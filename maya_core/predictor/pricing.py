"""Predicts the durations of a trace: plans every call for the GPU, and predicts its kernels family by family, in batches."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from maya_core.errors import MayaError
from maya_core.hardware.catalog import gpus
from maya_core.hardware.cluster import Cluster
from maya_core.hardware.models import Gpu
from maya_core.hardware.platform import Platform
from maya_core.ops import attention_choice
from maya_core.ops.attention_choice import changes, settled
from maya_core.ops.kernel import Kernel
from maya_core.ops.plan import kernels_of
from maya_core.predictor import collective_time
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION, check_attention
from maya_core.predictor.collective_time import buffer_bytes
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.families import FAMILIES
from maya_core.predictor.family import Target
from maya_core.predictor.placement import place
from maya_core.torch_seam.version import numbers
from maya_core.trace.call import Call
from maya_core.trace.communication import CollectiveCall, Communicator
from maya_core.trace.rank import RankTrace

if TYPE_CHECKING:
    from maya_core.predictor.calibration import Calibration

# For the same products under load, an A100 of 300 W takes 1.16 times as long as one of 400 W, which is the square root of the ratio.
POWER_EXPONENT = 0.5


@dataclass(frozen=True)
class TraceDurations:
    """The durations of everything in a rank's trace on a GPU, by number in the trace."""

    calls: list[Call]  # for that GPU, on which attention may have another backend
    kernels: list[list[Kernel]]  # of each call
    each: Durations  # of all these kernels, in order
    ops: Durations  # by call
    collectives: Durations  # by collective call

    @cached_property
    def launches(self) -> np.ndarray:
        """The number of kernels, copies and memsets of each call."""
        return np.array([len(kernels) for kernels in self.kernels], np.int64)

    @cached_property
    def families(self) -> list[str]:
        """The most characteristic family of each call."""
        return [family_of(kernels) for kernels in self.kernels]


def family_of(kernels: Sequence[Kernel]) -> str:
    """The most characteristic family among an op's kernels."""
    names = [kernel.family for kernel in kernels]
    return max(names, key=lambda name: FAMILIES[name].precedence, default="memory")


def durations_of(
    trace: RankTrace, cluster: Cluster, predictor: Predictor | None = None, command: Sequence[str] = ()
) -> TraceDurations:
    """Predicts the durations of a trace on a cluster, which need not be the recorded one. `command` is the recorded command, if it is known."""
    check_same_ops(trace, cluster.gpu, command)
    predictor = predictor or Predictor(cluster.gpu)
    groups = [trace.communicators[call.communicator] for call in trace.collectives]
    found = [
        collective_durations(call, group, cluster, predictor.calibration)
        for call, group in zip(trace.collectives, groups, strict=True)
    ]
    platform = platform_of(trace, cluster.gpu)
    calls = [attention_choice.on(call, platform) or call for call in settled_calls(trace)]
    planned = [kernels_of(call, platform) for call in calls]
    each = predictor.kernels([kernel for kernels in planned for kernel in kernels])
    return TraceDurations(calls, planned, each, sums(planned, each), Durations.joined(found))


def platform_of(trace: RankTrace, gpu: Gpu) -> Platform:
    """The platform on which the job of this trace would run on this GPU: with the torch of the trace."""
    return Platform(gpu, numbers(trace.meta["torch"]))


def check_same_ops(trace: RankTrace, gpu: Gpu, command: Sequence[str] = ()) -> None:
    """Raises if torch would run other ops on this GPU: then the recorded trace cannot be used to predict it."""
    recorded = trace.meta["gpu"]
    if recorded != gpu.name and (different := changes(settled_calls(trace), platform_of(trace, gpu))):
        raise MayaError(
            f"a trace recorded on {recorded} cannot predict {gpu.name}: {different[0]}.",
            f"Emulate it there: maya run --gpu {gpu.name} -- {shlex.join(command) if command else 'COMMAND'}",
        )


def settled_calls(trace: RankTrace) -> list[Call]:
    """The calls of a trace. Calls of older traces, which have no settings, get those that follow from the recorded attention."""
    gpu = gpus().get(trace.meta["gpu"])
    if not trace.meta.get("without_settings") or gpu is None:
        return trace.calls
    platform = platform_of(trace, gpu)
    return [settled(call, platform) for call in trace.calls]


def sums(planned: Sequence[Sequence[Kernel]], each: Durations) -> Durations:
    """The durations of calls from those of their kernels: the sum, with the provenance of the longest kernel."""
    lengths = np.array([len(kernels) for kernels in planned], np.int64)
    owner = np.repeat(np.arange(len(planned)), lengths)
    seconds = np.bincount(owner, each.seconds, len(planned)) if len(owner) else np.zeros(len(planned))
    longest = np.full(len(planned), -1, np.int64)
    order = np.argsort(each.seconds, kind="stable")
    longest[owner[order]] = order  # the longest is written last
    some = longest >= 0
    provenance = np.where(some, each.provenance[longest] if len(owner) else 0, Provenance.MEASURED)
    profile = np.where(some, each.profile[longest] if len(owner) else 0, 0)
    return Durations(seconds, provenance.astype(np.uint8), profile.astype(np.int32), each.profiles or ("no kernel",))


def collective_durations(
    call: CollectiveCall, group: Communicator, cluster: Cluster, calibration: Calibration | None = None
) -> Durations:
    """The duration of one collective call of a rank."""
    nbytes = np.array([buffer_bytes(call, group, cluster)])
    if group.backend != "nccl":  # gloo uses the host's network, whose ports are in the catalog
        return Durations.of(nbytes / cluster.nic_bytes_per_s, Provenance.BOUND, "data sheet")
    placement = place(group.ranks, cluster)
    durations = collective_time.predict(call.op, nbytes, placement, cluster)
    if calibration is None:
        return durations
    from maya_core.predictor.calibration import apply_collectives

    return apply_collectives(calibration, call.op, nbytes, placement, cluster, durations)


class Predictor:
    """Predicts the durations of kernels on a GPU.

        durations = Predictor(find_gpu("h100")).ops(trace.calls)

    Durations are those under sustained load, unless `burst` is set. A user's own calibration takes precedence over Maya's profiles.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        burst: bool = False,
        attention: str = DEFAULT_ATTENTION,
        calibration: Calibration | None = None,
    ) -> None:
        check_attention(attention, gpu)
        self.gpu = gpu
        self.platform = Platform(gpu)
        self.burst = burst
        self.calibration = calibration
        target = Target(gpu, burst, attention)
        self._families = {name: family(target) for name, family in FAMILIES.items()}

    def kernels(self, kernels: Sequence[Kernel]) -> Durations:
        """The duration of each kernel. Repeated kernels cost a lookup."""
        numbers: dict[Kernel, int] = {}
        places = np.fromiter((numbers.setdefault(kernel, len(numbers)) for kernel in kernels), np.int64, len(kernels))
        return self._distinct(list(numbers)).taken(places)

    def ops(self, calls: Sequence[Call]) -> Durations:
        """The duration of each call: the sum of its kernels, with the provenance of the longest."""
        planned = [kernels_of(call, self.platform) for call in calls]
        return sums(planned, self.kernels([kernel for kernels in planned for kernel in kernels]))

    def _distinct(self, kernels: list[Kernel]) -> Durations:
        groups: dict[str, list[int]] = defaultdict(list)
        for number, kernel in enumerate(kernels):
            groups[kernel.family].append(number)
        seconds, provenance = np.zeros(len(kernels)), np.zeros(len(kernels), np.uint8)
        profile, names = np.zeros(len(kernels), np.int32), dict[str, int]()
        for name, places in groups.items():
            found = self._families[name].predict([kernels[place] for place in places])
            seconds[places], provenance[places] = found.seconds, found.provenance
            if FAMILIES[name].compute_bound and not self.burst:
                seconds[places] *= max(1.0, self.gpu.tdp_w / self.gpu.power_limit_w) ** POWER_EXPONENT
            numbers = np.array([names.setdefault(each, len(names)) for each in found.profiles])
            profile[places] = numbers[found.profile]
        durations = Durations(seconds, provenance, profile, tuple(names))
        if self.calibration is None:
            return durations
        from maya_core.predictor.calibration import apply  # imported here, because calibration uses Predictor

        return apply(self.calibration, kernels, durations)
