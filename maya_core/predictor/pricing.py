"""Durations for what a trace holds: every call is planned for the GPU, and its kernels are priced family by family, many at a time."""

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
from maya_core.trace.call import Call
from maya_core.trace.communication import CollectiveCall, Communicator
from maya_core.trace.rank import RankTrace

if TYPE_CHECKING:
    from maya_core.predictor.calibration import Calibration

# An A100 of 300 W takes 1.16 times as long as one of 400 W for the same products under load: the root of the ratio.
POWER_EXPONENT = 0.5


@dataclass(frozen=True)
class TraceDurations:
    """What everything in a rank's trace takes on a GPU, by its number there."""

    calls: list[Call]  # as they are on that GPU, where attention may be another backend's
    kernels: list[list[Kernel]]  # of each call
    each: Durations  # of all these kernels, one after the other
    ops: Durations  # by call
    collectives: Durations  # by collective call

    @cached_property
    def launches(self) -> np.ndarray:
        """Kernels, copies and memsets of each call."""
        return np.array([len(kernels) for kernels in self.kernels], np.int64)

    @cached_property
    def families(self) -> list[str]:
        """The family that each call is known for."""
        return [family_of(kernels) for kernels in self.kernels]


def family_of(kernels: Sequence[Kernel]) -> str:
    """Of an op's kernels, the most telling family."""
    names = [kernel.family for kernel in kernels]
    return max(names, key=lambda name: FAMILIES[name].telling, default="memory")


def durations_of(
    trace: RankTrace, cluster: Cluster, predictor: Predictor | None = None, command: Sequence[str] = ()
) -> TraceDurations:
    """Prices a trace for a cluster, which need not be the one it was recorded for. `command` is what was recorded, if that is known."""
    check_same_ops(trace, cluster.gpu, command)
    predictor = predictor or Predictor(cluster.gpu)
    groups = [trace.communicators[call.communicator] for call in trace.collectives]
    found = [
        collective_durations(call, group, cluster, predictor.calibration)
        for call, group in zip(trace.collectives, groups, strict=True)
    ]
    calls = [attention_choice.on(call, predictor.platform) or call for call in settled_calls(trace)]
    planned = [kernels_of(call, predictor.platform) for call in calls]
    each = predictor.kernels([kernel for kernels in planned for kernel in kernels])
    return TraceDurations(calls, planned, each, sums(planned, each), Durations.joined(found))


def check_same_ops(trace: RankTrace, gpu: Gpu, command: Sequence[str] = ()) -> None:
    """A trace tells of another GPU what the same ops would do there; where torch would run others, it does not."""
    recorded = trace.meta["gpu"]
    if recorded != gpu.name and (different := changes(settled_calls(trace), Platform(gpu))):
        raise MayaError(
            f"what was recorded on {recorded} does not tell what {gpu.name} would do: {different[0]}.",
            f"Emulate it there: maya run --gpu {gpu.name} -- {shlex.join(command) if command else 'COMMAND'}",
        )


def settled_calls(trace: RankTrace) -> list[Call]:
    """The calls; those of older traces, which have no settings, with what the recorded attention says of them."""
    gpu = gpus().get(trace.meta["gpu"])
    if not trace.meta.get("without_settings") or gpu is None:
        return trace.calls
    return [settled(call, Platform(gpu)) for call in trace.calls]


def sums(planned: Sequence[Sequence[Kernel]], each: Durations) -> Durations:
    """Of calls by the durations of their kernels, one after the other: the sum, known as surely as the longest of them."""
    lengths = np.array([len(kernels) for kernels in planned], np.int64)
    owner = np.repeat(np.arange(len(planned)), lengths)
    seconds = np.bincount(owner, each.seconds, len(planned)) if len(owner) else np.zeros(len(planned))
    longest = np.full(len(planned), -1, np.int64)
    order = np.argsort(each.seconds, kind="stable")
    longest[owner[order]] = order  # the last written is the longest
    some = longest >= 0
    provenance = np.where(some, each.provenance[longest] if len(owner) else 0, Provenance.MEASURED)
    profile = np.where(some, each.profile[longest] if len(owner) else 0, 0)
    return Durations(seconds, provenance.astype(np.uint8), profile.astype(np.int32), each.profiles or ("no kernel",))


def collective_durations(
    call: CollectiveCall, group: Communicator, cluster: Cluster, calibration: Calibration | None = None
) -> Durations:
    """Of one collective, as a rank calls it."""
    nbytes = np.array([buffer_bytes(call, group, cluster)])
    if group.backend != "nccl":  # over the host's own network, of which the catalog knows the ports
        return Durations.of(nbytes / cluster.nic_bytes_per_s, Provenance.BOUND, "data sheet")
    placement = place(group.ranks, cluster)
    durations = collective_time.predict(call.op, nbytes, placement, cluster)
    if calibration is None:
        return durations
    from maya_core.predictor.calibration import apply_collectives

    return apply_collectives(calibration, call.op, nbytes, placement, cluster, durations)


class Predictor:
    """How long kernels take on a GPU.

        durations = Predictor(find_gpu("h100")).ops(trace.calls)

    Under sustained load, unless `burst` is asked for. A calibration of the user's own comes before what Maya ships.
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
        """Each kernel's duration. Repeated ones cost a lookup."""
        numbers: dict[Kernel, int] = {}
        places = np.fromiter((numbers.setdefault(kernel, len(numbers)) for kernel in kernels), np.int64, len(kernels))
        return self._distinct(list(numbers)).taken(places)

    def ops(self, calls: Sequence[Call]) -> Durations:
        """Each call's duration: the sum of its kernels, known as surely as the longest of them."""
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
        from maya_core.predictor.calibration import apply  # which is made with a Predictor

        return apply(self.calibration, kernels, durations)
