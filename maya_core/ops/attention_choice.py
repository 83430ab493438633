"""Decides which kernel scaled_dot_product_attention runs on a GPU in training, for a recorded call and any GPU.

The order of preference and the constraints are those of ATen's sdp_utils.cpp for CUDA (torch 2.13). native/attention.cpp makes the same decision
while a program runs, where sizes may be symbolic; a test checks that the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from maya_core.hardware.dtypes import HALVES
from maya_core.hardware.models import Gpu
from maya_core.hardware.platform import Platform
from maya_core.trace.call import Call, Tensor, TorchSettings

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
FUSED = {f"aten::_scaled_dot_product_{backend}_attention": backend for backend in (FLASH, EFFICIENT, CUDNN)}
BACKENDS = (MATH, FLASH, EFFICIENT, CUDNN)  # by their numbers in at::SDPBackend
CHOICE = (
    "maya::attention_choice"  # a call in a trace's table without an event: the arguments of SDPA, whichever kernel ran
)


def prefers_cudnn(gpu: Gpu) -> bool:
    """Whether torch tries cuDNN's attention first by default."""
    return gpu.compute_capability[0] in (9, 10)


@dataclass(frozen=True)
class AttentionInputs:
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    gqa: bool


def backend_of(call: Call) -> str | None:
    """The fused backend of a recorded call; None if it is another call, or was recorded without the names of its arguments."""
    return FUSED.get(call.name.removesuffix("_backward")) if "query" in call.named else None


def inputs_of(call: Call) -> AttentionInputs:
    """The arguments of SDPA that led to a recorded call. It has shared key heads only if they were allowed."""
    query, key, value = call["query"], call["key"], call["value"]
    mask = call.get("attn_bias")
    causal, dropout = bool(call.get("is_causal", False)), float(call.get("dropout_p") or 0.0)
    return AttentionInputs(
        query, key, value, mask if isinstance(mask, Tensor) else None, dropout, causal, query.sizes[1] != key.sizes[1]
    )


def choose(inputs: AttentionInputs, settings: TorchSettings, platform: Platform) -> str | None:
    """The backend that runs; None if torch would raise an error."""
    cudnn_first = settings.sdpa_cudnn_first and prefers_cudnn(platform.gpu)
    order = (CUDNN, FLASH, EFFICIENT, MATH) if cudnn_first else (FLASH, EFFICIENT, MATH, CUDNN)
    enabled = {backend: getattr(settings, f"sdpa_{backend}") for backend in order}
    return next((each for each in order if enabled[each] and _runs(each, inputs, settings, platform.capability)), None)


def _runs(backend: str, inputs: AttentionInputs, settings: TorchSettings, capability: int) -> bool:
    if backend == MATH:
        return True
    runs = {CUDNN: _cudnn_runs, FLASH: _flash_runs, EFFICIENT: _efficient_runs}[backend]
    return _dense(inputs) and runs(inputs, settings, capability)


def _dense(inputs: AttentionInputs) -> bool:
    tensors = (inputs.query, inputs.key, inputs.value)
    if any(len(tensor.sizes) != 4 for tensor in tensors) or len({tensor.sizes[0] for tensor in tensors}) > 1:
        return False
    return inputs.query.sizes[2] != 0 and inputs.key.sizes[2] != 0


def _heads_match(inputs: AttentionInputs, shared: bool, alike: bool = True) -> bool:
    """`shared`: the backend accepts fewer key heads than query heads; `alike`: but needs as many value heads as key heads."""
    query, key, value = (tensor.sizes[1] for tensor in (inputs.query, inputs.key, inputs.value))
    if not (inputs.gqa and shared):
        return query == key == value
    return min(key, value) > 0 and query % key == 0 and query % value == 0 and (key == value or not alike)


def _last_is_packed(inputs: AttentionInputs, one_is_fine: bool) -> bool:
    packed = all(tensor.strides[-1] == 1 for tensor in (inputs.query, inputs.key, inputs.value))
    packed = packed or (one_is_fine and inputs.query.sizes[-1] == 1)
    return packed and (inputs.mask is None or inputs.mask.strides[-1:] in ((), (1,)))


def _one_dtype(inputs: AttentionInputs, *allowed: str) -> bool:
    return inputs.query.dtype == inputs.key.dtype == inputs.value.dtype and inputs.query.dtype in allowed


def _low_precision(inputs: AttentionInputs, capability: int) -> bool:
    return _one_dtype(inputs, *HALVES) if capability >= 80 else _one_dtype(inputs, "Half")


def _flash_runs(inputs: AttentionInputs, settings: TorchSettings, capability: int) -> bool:
    head = inputs.query.sizes[-1]
    if inputs.mask is not None or inputs.key.sizes[-1] != head or inputs.value.sizes[-1] != head or head > 256:
        return False
    if not 80 <= capability <= 121:
        return False
    small_shared_memory = 86 <= capability <= 89 or capability >= 120
    if small_shared_memory and not (head <= 192 or (inputs.dropout == 0.0 and head > 224)):
        return False
    if inputs.causal and inputs.query.sizes[2] != inputs.key.sizes[2]:
        return False
    return _low_precision(inputs, capability) and _heads_match(inputs, shared=True) and _last_is_packed(inputs, True)


def _efficient_runs(inputs: AttentionInputs, settings: TorchSettings, capability: int) -> bool:
    if not 50 <= capability <= 121:
        return False
    half = inputs.query.dtype in HALVES
    alignment = 4 if capability >= 80 else 1
    if capability >= 80 or (capability >= 70 and half):  # tensor cores
        alignment = max(alignment, 128 // (16 if half else 32))
    head, value_head = inputs.query.sizes[-1], inputs.value.sizes[-1]
    if inputs.key.sizes[-1] != head or head % alignment or head <= 0 or value_head % alignment or value_head <= 0:
        return False
    if not _heads_match(inputs, shared=False) or not _last_is_packed(inputs, False):
        return False
    return _one_dtype(inputs, "Half", "Float", *(["BFloat16"] if capability >= 80 else []))


def _cudnn_runs(inputs: AttentionInputs, settings: TorchSettings, capability: int) -> bool:
    if not 80 <= capability <= 121 or settings.deterministic or not _low_precision(inputs, capability):
        return False
    if not _mask_fits(inputs) or (inputs.dropout * 16.0) % 1.0:
        return False
    if not _heads_match(inputs, shared=True, alike=False) or not _last_is_packed(inputs, True):
        return False
    head, value_head = inputs.query.sizes[-1], inputs.value.sizes[-1]
    limit = 256 if capability == 90 else 128
    if capability // 10 == 10 and (head, value_head) == (192, 128):
        limit = 192
    if head > limit or value_head > limit or head % 8 or value_head % 8:
        return False
    queries, keys = inputs.query.sizes[2], inputs.key.sizes[2]
    return keys != 1 and not (inputs.dropout != 0.0 and queries == 1)


def _mask_fits(inputs: AttentionInputs) -> bool:
    if inputs.mask is None:
        return True
    batch, heads, queries, _ = inputs.query.sizes
    wanted = (batch, heads, queries, inputs.key.sizes[2])
    sizes = inputs.mask.sizes
    return len(sizes) in (2, 4) and all(a in (1, b) for a, b in zip(sizes, wanted[-len(sizes) :], strict=True))


@dataclass(frozen=True)
class Change:
    """Attention that runs in another way on another GPU, which the recorded trace cannot show."""

    inputs: AttentionInputs
    recorded: str
    wanted: str | None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.inputs.query.sizes))
        ran = "as separate ops" if self.recorded == MATH else f"by its {self.recorded} kernel"
        would = {None: "nothing could run it", MATH: "it runs as separate ops"}.get(
            self.wanted, f"its {self.wanted} kernel runs"
        )
        return f"attention of {shape} {self.inputs.query.dtype} ran {ran} where it was recorded, and there {would}"


def changes(calls: Sequence[Call], platform: Platform) -> list[Change]:
    """Attention whose recorded ops would be different ones on this platform: a fused kernel instead of separate ops, or the reverse."""
    found = []
    for call in calls:
        if call.op == CHOICE:
            query, key, value, mask, dropout, causal, gqa, number = call.arguments
            inputs, recorded = AttentionInputs(query, key, value, mask, dropout, causal, gqa), BACKENDS[number]
        elif (backend := backend_of(call)) is not None:
            inputs, recorded = inputs_of(call), backend
        else:
            continue
        wanted = choose(inputs, call.settings, platform)
        if (recorded == MATH) != (wanted in (MATH, None)):
            found.append(Change(inputs, recorded, wanted))
    return found


def changes_layout(call: Call, platform: Platform) -> bool:
    """Whether the result of a recorded attention would have another memory layout on this platform: the memory-efficient kernel writes
    token by token, the others in the layout of the queries. The copies that follow are then different, too."""
    backend = backend_of(call)
    if backend is None or call.name.endswith("_backward"):
        return False
    wanted = choose(inputs_of(call), call.settings, platform)
    if wanted == MATH or (backend == EFFICIENT) == (wanted == EFFICIENT):
        return False
    query: Tensor = call["query"]
    by_token = [query.strides[d] for d in (0, 2, 1, 3) if query.sizes[d] > 1]
    return by_token != sorted(by_token, reverse=True)


def only(backend: str) -> AbstractContextManager[None]:
    """A context in which attention uses this backend on every GPU. It is for packages that have a kernel of their own."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen: AbstractContextManager[None] = sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION"))
    return chosen


def settled(call: Call, platform: Platform) -> Call:
    """The call as it is recorded. If its switches would lead to another backend on this GPU (because it was chosen earlier or called
    by name), only its own backend is switched on, so that it stays the same on every GPU."""
    backend = backend_of(call)
    if backend is None or choose(inputs_of(call), call.settings, platform) == backend:
        return call
    fixed = {f"sdpa_{each}": each == backend for each in (FLASH, EFFICIENT, CUDNN, MATH)}
    return replace(call, settings=replace(call.settings, **fixed))


def on(call: Call, platform: Platform) -> Call | None:
    """The recorded call with the backend that the platform would run; None if that is not a fused one, or the call is not attention."""
    backend = backend_of(call)
    if backend is None:
        return None
    chosen = choose(inputs_of(call), call.settings, platform)
    if chosen == backend:
        return call
    if chosen not in (FLASH, EFFICIENT, CUDNN):
        return None
    backward = call.name.endswith("_backward")
    gradient = {"grad_out", "grad_out_"}
    names = [("grad_out_" if chosen == EFFICIENT else "grad_out") if name in gradient else name for name in call.names]
    return replace(call, op=f"aten::_scaled_dot_product_{chosen}_attention{'_backward' * backward}", names=names)
