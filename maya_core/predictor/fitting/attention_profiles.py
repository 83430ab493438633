"""Selects the measurements for the attention profile of each GPU, fits it, and computes its errors on held-out rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from maya_core.hardware.catalog import Gpu, find_gpu
from maya_core.predictor.attention_time import AttentionModel, seen_keys
from maya_core.predictor.family import peak_flops
from maya_core.predictor.fitting.attention_fit import fit_attention, fit_backward, fit_scale, predict
from maya_core.predictor.fitting.gemm_sources import BURST
from maya_core.predictor.fitting.measurements import read_table, rows, where
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.profile import Profile, ProfileSource

# Kernels of the forward table, by Maya's names. TensorRT-LLM's represents cuDNN's, for which no measurements are published.
FLASH2, FLASH3, FUSED = "flash2", "flash3", "fused"
KERNELS = {
    FUSED: ("torch_flow",),
    FLASH2: ("flash_attention", "vllm_flash_attn_fa2"),
    FLASH3: ("fa3",),
}
SIMUMAX = {"A100-PCIe-80GB": ("a100-pcie", FLASH2), "B200-SXM": ("b200", FUSED)}
FLASH2_BENCHMARK = {"A100-SXM-80GB": "a100", "H100-SXM-80GB": "h100"}
HEADS, LARGEST, SHAPES = "unseen head shapes", "largest tenth", "forward + backward, unseen lengths"


@dataclass(frozen=True)
class AttentionRows:
    sizes: list[np.ndarray]  # the arguments of AttentionStructure.seconds
    seconds: np.ndarray
    with_forward: np.ndarray  # for backward rows: whether they include the forward pass

    def __getitem__(self, mask: np.ndarray) -> AttentionRows:
        return AttentionRows([size[mask] for size in self.sizes], self.seconds[mask], self.with_forward[mask])

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def work(self) -> np.ndarray:
        batch, heads, _, queries, keys, head, value_head, causal, window = self.sizes
        answer: np.ndarray = batch * heads * queries * seen_keys(queries, keys, causal, window)[1] * (head + value_head)
        return answer


def forward_rows(data: Path, gpu: str, kernel: str) -> AttentionRows | None:
    table = read_table(data, "ops/aiconfigurator_prefill_attention.parquet")
    systems = [system for system, name in BURST.items() if name == gpu]
    mask = np.isin(table["system"], systems) & np.isin(table["kernel_source"], KERNELS[kernel])
    table = where(table, mask & (table["attn_dtype"] == "bfloat16") & (table["kv_cache_dtype"] == "bfloat16"))
    if rows(table) < 500:
        return None
    one = np.ones(rows(table))
    names = ("batch_size", "num_heads", "num_key_value_heads", "seq_len", "seq_len", "head_dim", "head_dim")
    return AttentionRows([*(table[name] for name in names), one, table["window_size"]], table["latency_ms"] * 1e-3, one > 1)  # fmt: skip


def flash2_rows(data: Path, gpu: str) -> AttentionRows:
    """FlashAttention-2's own benchmark: both passes, many heads."""
    table = read_table(data, "ops/flash_attention2_fwd_bwd.csv")
    name = next(key for key, ours in FLASH2_BENCHMARK.items() if ours == gpu)
    table = where(table, (table["gpu"] == name) & (table["impl"] == "FA2"))
    zero = np.zeros(rows(table))
    columns = ("batch", "heads", "heads", "seq_len", "seq_len", "head_dim", "head_dim", "causal")
    return AttentionRows([*(table[c].astype(float) for c in columns), zero], table["implied_latency_ms"] * 1e-3, zero == 0)  # fmt: skip


def simumax_rows(data: Path, device: str, op: str) -> AttentionRows:
    table = read_table(data, "ops/simumax_op_efficiency.csv")
    table = where(table, (table["gpu"] == device) & (table["op"] == op))
    fields = [dict(re.findall(r"(\w+)=(\w+)", key)) for key in table["key"]]
    names = ("batch", "head_num", "kv_head_num", "seq_len", "seq_len", "qk_head_dim", "v_head_dim")
    sizes = [np.array([float(field[name]) for field in fields]) for name in names]
    one = np.ones(len(fields))
    return AttentionRows([*sizes, one, 0 * one], table["implied_latency_us"] * 1e-6, one > 1)


def _line(split: str, gpu: Gpu, model: str, rows_: AttentionRows, predicted: np.ndarray, much: float = 1.0) -> Line:
    """`much` is the work, in multiples of a forward pass."""
    batch, heads, kv_heads, queries, keys, head, value_head, causal, _ = rows_.sizes
    every = 2 * batch * heads * queries * keys * (head + value_head) * much
    moved = 2 * batch * (heads * queries + kv_heads * keys) * (head + value_head) * much
    seen = every * np.where(causal > 0, 0.5, 1.0)
    roofline = np.maximum(seen / peak_flops(gpu, "float16"), moved / gpu.memory_bandwidth_bytes_per_s)
    return Line("attention", split, gpu.name, model, rows_.seconds, predicted, roofline, every, moved)


def forward_lines(gpu: Gpu, kernel: str, found: AttentionRows) -> Iterator[Line]:
    heads = by_key(*(found.sizes[i] for i in (1, 2, 5)))
    for split, out in ((HEADS, heads), (LARGEST, largest_tenth(found.work))):
        model = fit_attention(gpu, found[~out].sizes, found[~out].seconds)
        yield _line(split, gpu, kernel, found[out], predict(model, gpu, found[out].sizes))


def backward_lines(gpu: Gpu, kernel: str, forward: AttentionModel, found: AttentionRows) -> Iterator[Line]:
    """Both passes together, with lengths or head counts held out in turn. They were measured together, or their measurements are added."""
    keys = [*zip(*(found.sizes[i].tolist() for i in (1, 3)), strict=True)]
    for key in sorted(set(keys)):
        out = np.array([each == key for each in keys])
        if out.all():
            continue
        model = fit_backward(gpu, forward, found[~out].sizes, found[~out].seconds, found[~out].with_forward)
        first = predict(forward, gpu, found[out].sizes)
        both = first + predict(model, gpu, found[out].sizes)
        measured = found[out].seconds + np.where(found[out].with_forward, 0, first)
        yield _line(SHAPES, gpu, f"{kernel} backward", replace(found[out], seconds=measured), both, 3.5)


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    flash2: dict[str, AttentionModel] = {}
    for name in [*BURST.values(), "a100-pcie"]:
        if only is not None and name not in only:
            continue
        gpu, lines, used = find_gpu(name), list[Line](), list[ProfileSource]()
        models: dict[str, AttentionModel] = {}
        for kernel, kernel_names in KERNELS.items():
            found = forward_rows(data, name, kernel)
            if found is None:
                continue
            models[kernel] = fit_attention(gpu, found.sizes, found.seconds)
            used.append(ProfileSource(name="AIConfigurator prefill attention", rows=len(found), note=f"{kernel}: {', '.join(kernel_names)}"))  # fmt: skip
            if evaluate:
                lines += forward_lines(gpu, kernel, found)
        if name in FLASH2_BENCHMARK.values():
            found = flash2_rows(data, name)
            if (
                FLASH2 not in models and "a100" in flash2
            ):  # it has no forward rows: uses the A100's, scaled to the level of both passes
                donor, reference = flash2["a100"], flash2_rows(data, "a100")
                share = np.median(predict(donor, find_gpu("a100"), reference.sizes) / reference.seconds)
                factor = np.median(share * found.seconds / predict(donor, gpu, found.sizes))
                models[FLASH2] = fit_scale(gpu, donor, float(factor))
            models[f"{FLASH2} backward"] = fit_backward(
                gpu, models[FLASH2], found.sizes, found.seconds, found.with_forward
            )
            used.append(ProfileSource(name="FlashAttention-2's benchmark, forward + backward", rows=len(found)))
            if evaluate:
                lines += backward_lines(gpu, FLASH2, models[FLASH2], found)
        for device, (ours, kernel) in SIMUMAX.items():
            if ours != name:
                continue
            if kernel not in models:
                fwd = simumax_rows(data, device, "sdp_fwd")
                factor = np.median(fwd.seconds / predict(flash2["a100"], gpu, fwd.sizes))
                models[kernel] = fit_scale(gpu, flash2["a100"], float(factor))
            found = simumax_rows(data, device, "sdp_bwd")
            models[f"{kernel} backward"] = fit_backward(
                gpu, models[kernel], found.sizes, found.seconds, found.with_forward
            )
            used.append(ProfileSource(name="SimuMax attention, forward and backward under load", rows=2 * len(found)))
            if evaluate:
                lines += backward_lines(gpu, kernel, models[kernel], found)
        if FLASH2 in models:
            flash2[name] = models[FLASH2]
        yield (
            Profile(
                family="attention", gpu=name, sources=used, held_out=summarize(lines),
                models={key: model.model_dump(exclude_none=True) for key, model in models.items()},
            ),
            lines,
        )  # fmt: skip
