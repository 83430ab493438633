"""Durations for what a trace holds: every op's kernels, priced family by family, many at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from maya_core.device.kernels.call import Signature
from maya_core.hardware.catalog import Gpu
from maya_core.hardware.cluster import Cluster
from maya_core.predictor import collectives, copies, memory, recurrent, templates
from maya_core.predictor.attention import Attention
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION, SLOWER_THAN_FLASH2, check_attention
from maya_core.predictor.collectives import buffer_bytes
from maya_core.predictor.convolution import DIRECTIONS, Convolution
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.gemm import Gemm, peak_flops
from maya_core.predictor.kernels import Kernel, kernels_of
from maya_core.predictor.placement import place
from maya_core.predictor.profile import Found, distance, find_profile
from maya_core.trace.communication import CollectiveCall, Communicator
from maya_core.trace.rank import RankTrace

if TYPE_CHECKING:
    from maya_core.predictor.calibration import Calibration

T = TypeVar("T")

# What a dtype's products are priced by, first choice first: half precisions run at one rate.
GEMM_MODELS = {
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("bfloat16", "float16"),
    "float8": ("float8",),
    "int8": ("float8", "bfloat16"),
    "float32": ("float32",),
    "tf32": ("bfloat16",),
    "float64": ("float32",),
}
SAME_RATE = {("bfloat16", "float16"), ("float16", "bfloat16")}

# Which measured kernel stands for torch's: flash is FlashAttention-2; cuDNN's was not published, TensorRT-LLM's is its like.
ATTENTION_MODELS = {
    "flash_forward": ("flash2", "fused"),
    "flash_backward": ("flash2 backward", "fused backward"),
    "cudnn_forward": ("fused", "flash3"),
    "cudnn_backward": ("fused backward", "flash2 backward"),
    "efficient_forward": ("flash2", "fused"),
    "efficient_backward": ("flash2 backward", "fused backward"),
}
# CUTLASS's memory-efficient kernels against FlashAttention-2: 1.6 forward and 2 backward at lengths of 1k to 8k in the figures
# of the FlashAttention-2 paper (A100, xformers); not measured elsewhere.
SLOWER_THAN_FLASH = {"efficient_forward": 1.6, "efficient_backward": 2.0}
# Grouped products against as many of the same size in a batch, by layout: SimuMax' on B200, medians of 82 with half of them 0.8 to
# 1.3 of that. On an A100 (11) they take as long.
GROUPED_SLOWER = {10: (1.2, 1.3, 1.57, 1.3), 12: (1.2, 1.3, 1.57, 1.3)}  # by compute capability
# An A100 of 300 W takes 1.16 times as long as one of 400 W for the same products under load: the root of the ratio.
POWER_EXPONENT = 0.5
POWER_BOUND = ("gemm", "grouped_gemm", "triton_gemm", "attention", "triton_attention", "convolution", "recurrent")


@dataclass(frozen=True)
class TraceDurations:
    """What everything in a rank's trace takes, by its number there."""

    ops: Durations  # by signature
    calls: Durations  # by collective call


def durations_of(trace: RankTrace, cluster: Cluster, predictor: Predictor | None = None) -> TraceDurations:
    """Prices a trace for a cluster, which need not be the one it was recorded for."""
    predictor = predictor or Predictor(cluster.gpu)
    groups = [trace.communicators[call.communicator] for call in trace.calls]
    found = [
        _collective(call, group, cluster, predictor.calibration)
        for call, group in zip(trace.calls, groups, strict=True)
    ]
    return TraceDurations(predictor.ops(trace.signatures), Durations.joined(found))


def _collective(
    call: CollectiveCall, group: Communicator, cluster: Cluster, calibration: Calibration | None
) -> Durations:
    nbytes = np.array([buffer_bytes(call, group, cluster)])
    if group.backend != "nccl":  # over the host's own network, of which the catalog knows the ports
        return Durations.of(nbytes / cluster.nic_bytes_per_s, Provenance.BOUND, "data sheet")
    placement = place(group.ranks, cluster)
    durations = collectives.predict(call.op, nbytes, placement, cluster)
    if calibration is None:
        return durations
    from maya_core.predictor.calibration import apply_collectives

    return apply_collectives(calibration, call.op, nbytes, placement, cluster, durations)


class Predictor:
    """How long kernels take on a GPU.

        durations = Predictor(find_gpu("h100")).ops(trace.signatures)

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
        self.burst = burst
        self.attention = attention
        self.calibration = calibration
        self._ready: dict[tuple[str, ...], Any] = {}  # models put together for this GPU
        self._families = {
            "gemm": self._gemm,
            "grouped_gemm": self._grouped_gemm,
            "attention": self._attention,
            "convolution": self._convolution,
            "recurrent": self._recurrent,
            "memory": lambda model, sizes: memory.predict(gpu, model, sizes),
            "triton": self._triton,
            "triton_gemm": self._triton_gemm,
            "triton_attention": self._triton_attention,
            "copy": lambda model, sizes: copies.predict(gpu, model, sizes),
            "included": lambda _, sizes: Durations.of(
                np.zeros(len(sizes)), Provenance.INTERPOLATED, "with another kernel"
            ),
        }

    def kernels(self, kernels: Sequence[Kernel]) -> Durations:
        """Each kernel's duration. Repeated ones cost a lookup."""
        numbers: dict[Kernel, int] = {}
        places = np.fromiter((numbers.setdefault(kernel, len(numbers)) for kernel in kernels), np.int64, len(kernels))
        distinct = self._distinct(list(numbers))
        return distinct.taken(places)

    def ops(self, signatures: Sequence[Signature]) -> Durations:
        """Each call's duration: the sum of its kernels, known as surely as the longest of them."""
        chains = [kernels_of(signature) for signature in signatures]
        each = self.kernels([kernel for chain in chains for kernel in chain])
        lengths = np.array([len(chain) for chain in chains], np.int64)
        owner = np.repeat(np.arange(len(chains)), lengths)
        seconds = np.bincount(owner, each.seconds, len(chains)) if len(owner) else np.zeros(len(chains))
        longest = np.full(len(chains), -1, np.int64)
        order = np.argsort(each.seconds, kind="stable")
        longest[owner[order]] = order  # the last written is the longest
        some = longest >= 0
        provenance = np.where(some, each.provenance[longest] if len(owner) else 0, Provenance.MEASURED)
        profile = np.where(some, each.profile[longest] if len(owner) else 0, 0)
        return Durations(
            seconds, provenance.astype(np.uint8), profile.astype(np.int32), each.profiles or ("no kernel",)
        )

    def _distinct(self, kernels: list[Kernel]) -> Durations:
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, kernel in enumerate(kernels):
            groups[kernel.family, kernel.model].append(number)
        seconds, provenance = np.zeros(len(kernels)), np.zeros(len(kernels), np.uint8)
        profile, names = np.zeros(len(kernels), np.int32), dict[str, int]()
        for (family, model), places in groups.items():
            found = self._families[family](model, np.array([kernels[place].sizes for place in places], float))
            seconds[places], provenance[places] = found.seconds, found.provenance
            if family in POWER_BOUND and not self.burst:
                seconds[places] *= max(1.0, self.gpu.tdp_w / self.gpu.power_limit_w) ** POWER_EXPONENT
            numbers = np.array([names.setdefault(name, len(names)) for name in found.profiles])
            profile[places] = numbers[found.profile]
        durations = Durations(seconds, provenance, profile, tuple(names))
        if self.calibration is None:
            return durations
        from maya_core.predictor.calibration import apply  # which is made with a Predictor

        return apply(self.calibration, kernels, durations)

    def _find(self, family: str, choices: Sequence[str]) -> tuple[Found, str] | None:
        """The first choice this GPU has measurements of; else the nearest relative's, whichever choice that is."""
        found = [(each, model) for model in choices if (each := find_profile(family, self.gpu, model)) is not None]
        return min(found, key=lambda pair: (not pair[0].own, distance(self.gpu, pair[0].gpu)), default=None)

    def _model(self, found: Found, model: str, dtype: str, build: Callable[[dict[str, Any]], T]) -> T:
        """A profile's model put together for this GPU, once."""
        key = (found.name, model, dtype)
        if key not in self._ready:
            self._ready[key] = build(found.profile.models[model])
        return self._ready[key]

    def _gemm(self, dtype: str, sizes: np.ndarray) -> Durations:
        """One product, and many in a batch, are other kernels where they were measured apart."""
        batched = sizes[:, 0] > 1
        parts = [self._products(dtype, sizes[those], several) for those, several in ((~batched, False), (batched, True)) if those.any()]  # fmt: skip
        return Durations.joined(parts).taken(np.argsort(np.argsort(batched, kind="stable")))

    def _products(self, dtype: str, sizes: np.ndarray, batched: bool) -> Durations:
        choices = GEMM_MODELS.get(dtype, ("float32",))
        if batched:
            choices = (*(f"{choice} batched" for choice in choices), *choices)
        batch, m, n, k, layout = sizes.T
        if (found := self._find("gemm", choices)) is None:
            return self._bound(dtype, 2 * batch * m * n * k)
        profile, model = found
        near = profile.near(self.gpu)
        gemm = self._model(
            profile, model, dtype, lambda stored: Gemm(stored, self.gpu, dtype, burst=self.burst, corrected=near)
        )
        seconds, inside = gemm.seconds(batch, m, n, k, layout.astype(int))
        alike = model.removesuffix(" batched") == dtype or (model, dtype) in SAME_RATE
        return _known(seconds, inside & alike, profile)

    def _grouped_gemm(self, dtype: str, sizes: np.ndarray) -> Durations:
        """As a batched product of equal groups: how many rows fall to each is not in a trace."""
        groups = np.maximum(sizes[:, 0], 1)
        even = np.stack([groups, sizes[:, 1] / groups, *sizes[:, 2:].T], axis=1)
        found = self._products(dtype, even, batched=False)
        slower = np.array(GROUPED_SLOWER.get(self.gpu.compute_capability[0], (1.0,) * 4))[sizes[:, 4].astype(int)]
        return Durations(found.seconds * slower, np.maximum(found.provenance, Provenance.EXTRAPOLATED), found.profile, found.profiles)  # fmt: skip

    def _triton(self, model: str, sizes: np.ndarray) -> Durations:
        moved, rereads = sizes[:, :-1].copy(), sizes[:, -1]
        moved[:, memory.READ] += rereads * memory.missed(self.gpu, moved)
        return _at_best(memory.predict(self.gpu, model, moved), Provenance.EXTRAPOLATED)

    def _triton_gemm(self, dtype: str, sizes: np.ndarray) -> Durations:
        """As the libraries' product of that size, slowed by what Triton's compiler and this tile cost."""
        return _at_best(
            templates.gemm(self.gpu, self._gemm(dtype, sizes[:, :5]), dtype, sizes), Provenance.EXTRAPOLATED
        )

    def _triton_attention(self, model: str, sizes: np.ndarray) -> Durations:
        found = self._attention(model, sizes[:, :10])
        seconds = found.seconds * templates.ATTENTION_SLOWER[model.endswith("backward")] * sizes[:, 10]
        return _at_best(Durations(seconds, found.provenance, found.profile, found.profiles), Provenance.EXTRAPOLATED)

    def _attention(self, kernel: str, sizes: np.ndarray) -> Durations:
        found = self._find("attention", ATTENTION_MODELS[kernel])
        item = sizes[:, 9]
        if found is None:
            return self._bound("bfloat16", 4 * np.prod(sizes[:, [0, 1, 3, 4, 5]], axis=1))
        profile, model = found
        attention = self._model(profile, model, "", lambda stored: Attention(stored, self.gpu))
        seconds, inside = attention.seconds(*sizes[:, :9].T)
        slower = SLOWER_THAN_FLASH.get(kernel, 1.0)
        if kernel.startswith("flash"):
            slower = SLOWER_THAN_FLASH2[self.attention][kernel.endswith("backward")]
        single = peak_flops(self.gpu, "float16") / peak_flops(self.gpu, "tf32")  # float32 runs on TF32 tensor cores
        seconds = seconds * slower * np.where(item > 2, single, 1.0)
        return _known(seconds, inside & (slower == 1.0) & (item <= 2), profile)

    def _convolution(self, dtype: str, sizes: np.ndarray) -> Durations:
        seconds, inside = np.zeros(len(sizes)), np.zeros(len(sizes), bool)
        profile, names = np.zeros(len(sizes), np.int32), list[str]()
        own = np.zeros(len(sizes), bool)
        known_as = "float16" if dtype in ("bfloat16", "float16") else "float32"
        for direction, name in enumerate(DIRECTIONS):
            those = sizes[:, 0] == direction
            if not those.any():
                continue
            found = self._find("convolution", (f"{known_as} {name}", f"{known_as} forward"))
            if found is None:
                return self._bound(dtype, 2 * sizes[:, 1] * sizes[:, 2] * sizes[:, 3] * sizes[:, 6] * sizes[:, 7])
            whose, model = found
            rate = dtype if dtype in self.gpu.peak_flops else known_as
            convolution = self._model(whose, model, rate, partial(Convolution, gpu=self.gpu, dtype=rate))
            seconds[those], inside[those] = convolution.seconds(sizes[those])
            own[those] = whose.own and model == f"{dtype} {name}"
            profile[those] = len(names)
            names.append(whose.name)
        provenance = np.where(inside & own, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED).astype(np.uint8)
        return Durations(seconds, provenance, profile, tuple(names))

    def _recurrent(self, dtype: str, sizes: np.ndarray) -> Durations:
        def product(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
            return self._products(dtype, np.stack([np.ones_like(m), m, n, k, np.zeros_like(m)], axis=1), False).seconds

        half = "float16" if dtype in ("bfloat16", "float16") else "float32"
        parts, order = [], []
        for backward, name in enumerate(("forward", "backward")):
            those = np.flatnonzero(sizes[:, 0] == backward)
            if not len(those):
                continue
            order.append(those)
            found = self._find("recurrent", (f"{half} {name}",))
            if found is None:
                parts.append(self._bound(dtype, np.prod(sizes[those][:, 1:8], axis=1)))
                continue
            profile, model = found
            seconds = recurrent.seconds(profile.profile.models[model], product, sizes[those])
            parts.append(_known(seconds, recurrent.among_measured(sizes[those]) & (half == dtype), profile))
        return Durations.joined(parts).taken(np.argsort(np.concatenate(order)))

    def _bound(self, dtype: str, flops: np.ndarray) -> Durations:
        return Durations.of(flops / peak_flops(self.gpu, dtype), Provenance.BOUND, "data sheet")


def _at_best(found: Durations, known: Provenance) -> Durations:
    """As known, but no surer than that."""
    return Durations(found.seconds, np.maximum(found.provenance, known), found.profile, found.profiles)


def _known(seconds: np.ndarray, inside: np.ndarray, found: Found) -> Durations:
    provenance = np.where(inside & found.own, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)
    return Durations.of(seconds, provenance.astype(np.uint8), found.name)
