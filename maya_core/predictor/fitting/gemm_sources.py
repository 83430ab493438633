"""Reads measured matrix multiplications from the files of a data folder, by GPU and dtype."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np

from maya_core.predictor.fitting.gemm_fit import GemmRows
from maya_core.predictor.fitting.measurements import Table, read_table, rows, where
from maya_core.predictor.gemm_time import LAYOUTS

# Names of GPUs in the files, and in the catalog.
BURST = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200",
    "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
BURST_DTYPES = {"bfloat16": "bfloat16", "fp8": "float8"}
VIDUR = {"a100": "a100", "h100": "h100", "a40": "a40"}
SIMUMAX = {"A100-PCIe-80GB": "a100-pcie", "B200-SXM": "b200"}
NEUSIGHT = {"Tesla V100-PCIE-32GB": "v100-pcie", "Tesla T4": "t4", "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb"}
IN_MODEL = {"NVIDIA_H100_80GB_HBM3": "h100", "NVIDIA_L4": "l4"}
DEEPBENCH = {"V100-SXM2 (DGX-1)": "v100", "T4": "t4"}
FASTEST_FRAMEWORK = "trtllm"  # others add a few percent of their own


def burst(data: Path, gpu: str, dtype: str) -> GemmRows:
    """x[m,k] @ W[n,k].t(), timed in short bursts. Rows of other frameworks are scaled to the level of the fastest one."""
    table = read_table(data, "ops/aiconfigurator_gemm.parquet")
    system = next(key for key, name in BURST.items() if name == gpu)
    kind = next(key for key, name in BURST_DTYPES.items() if name == dtype)
    table = where(table, (table["system"] == system) & (table["dtype"] == kind))
    first = where(table, table["src_framework"] == FASTEST_FRAMEWORK)
    if rows(first) == rows(table) or rows(first) >= 20_000:
        return _burst_rows(first, 1.0)
    second = where(table, table["src_framework"] != FASTEST_FRAMEWORK)
    known = dict(zip(_shapes(first), first["latency_ms"], strict=True))
    shapes = _shapes(second)
    ratios = [ms / known[shape] for shape, ms in zip(shapes, second["latency_ms"], strict=True) if shape in known]
    unseen = where(second, np.array([shape not in known for shape in shapes]))
    both = {name: np.concatenate([first[name], unseen[name]]) for name in first}
    scale = np.concatenate([np.ones(rows(first)), np.full(rows(unseen), np.median(ratios))])
    return _burst_rows(both, scale)


def _shapes(table: Table) -> list[tuple[float, float, float]]:
    return list(zip(table["m"], table["n"], table["k"], strict=True))


def _burst_rows(table: Table, scale: np.ndarray | float) -> GemmRows:
    ones = np.ones(rows(table))
    return GemmRows(ones, table["m"], table["n"], table["k"], table["latency_ms"] * 1e-3 / scale)


def vidur(data: Path, gpu: str) -> GemmRows:
    """Linear layers of language models, device time under sustained load, float16."""
    table = read_table(data, "ops/vidur_fp16_layer_ops.parquet")
    name = next(key for key, ours in VIDUR.items() if ours == gpu)
    table = where(table, (table["gpu"] == name) & ~np.isnan(table["m"]))
    ones = np.ones(rows(table))
    return GemmRows(
        ones, table["m"], table["n"], table["k"], table["median_ms"] * 1e-3, np.zeros(len(ones), int), table["model"]
    )


def simumax(data: Path, gpu: str) -> GemmRows:
    """Forward, dgrad and wgrad of linear layers under sustained load, bfloat16."""
    table = read_table(data, "ops/simumax_op_efficiency.csv")
    name = next(key for key, ours in SIMUMAX.items() if ours == gpu)
    table = where(table, (table["gpu"] == name) & (table["op"] == "matmul"))
    fields = [dict(re.findall(r"(\w+)=(\w+)", key)) for key in table["key"]]
    batch, m, n, k = (np.array([float(field[name]) for field in fields]) for name in "bmnk")
    layout = np.array([LAYOUTS.index(field["layout"]) for field in fields])
    group = np.array([f"{field['n']}x{field['k']}" for field in fields], object)
    return GemmRows(batch, m, n, k, table["implied_latency_us"] * 1e-6, layout, group)


def neusight(data: Path, gpu: str, op: str) -> GemmRows:
    """float32 with TF32 off, `linear` or `bmm`, timed with the launch."""
    table = read_table(data, "ops/neusight_fp32_ops.parquet")
    name = next(key for key, ours in NEUSIGHT.items() if ours == gpu)
    table = where(table, (table["device"] == name) & (table["op"] == op))
    batch = np.nan_to_num(table["batch"], nan=1)
    return GemmRows(batch, table["m"], table["n"], table["k"], table["latency_ms"] * 1e-3)


def in_model(data: Path, gpu: str) -> GemmRows:
    """float32 multiplications inside transformer models, forward only. There are few, but for GPUs without other rows."""
    table = read_table(data, "ops/neusight_inmodel_fx_ops_fp32.parquet")
    name = next(key for key, ours in IN_MODEL.items() if ours == gpu)
    table = where(table, table["gpu"] == name)
    found = []
    columns = (table[key] for key in ("target", "input_shapes", "output_shape", "fw_ms", "run"))
    for target, inputs, output, forward_ms, run in zip(*columns, strict=True):
        shapes, result = ast.literal_eval(inputs or "[]"), ast.literal_eval(output or "()")
        sizes = _sizes(target, shapes, result)
        if sizes is not None and forward_ms > 0:
            found.append((*sizes, forward_ms * 1e-3, run.split("-")[0]))
    batch, m, n, k, seconds = (np.array(column, float) for column in list(zip(*found, strict=True))[:5])
    return GemmRows(batch, m, n, k, seconds, group=np.array([row[5] for row in found], object))


_LAYERS = re.compile(r"(dense|_proj|fc\d|lm_head|decoder|c_attn|c_proj|c_fc)$")


def _sizes(target: str, shapes: list[Any], result: tuple[Any, ...]) -> tuple[float, float, float, float] | None:
    """(batch, m, n, k) of a node, or None if it is not a multiplication."""
    if "addmm" in target and len(shapes) == 3:
        return 1, shapes[1][0], shapes[2][1], shapes[1][1]
    if ("matmul" in target or "bmm" in target) and len(shapes) == 2 and len(shapes[0]) == len(shapes[1]) >= 3:
        *batch, m, k = shapes[0]
        return float(np.prod(batch)), m, shapes[1][-1], k
    if _LAYERS.search(target) and len(shapes) == 1 and len(shapes[0]) == len(result) >= 2:
        return 1, float(np.prod(result[:-1])), result[-1], shapes[0][-1]
    return None


def deepbench(data: Path, gpu: str, dtype: str) -> GemmRows:
    table = read_table(data, "ops/deepbench_v100_t4.csv")
    device = next(key for key, ours in DEEPBENCH.items() if ours == gpu)
    wanted = {"float32": "fp32", "float16": "fp16"}[dtype]
    mask = [
        g == device and s == "Dense Matrix Multiplication" and str(p).startswith(wanted)
        for g, s, p in zip(table["gpu"], table["section"], table["precision"], strict=True)
    ]
    table = where(table, np.array(mask))
    # Column-major with A transposed and B not is TN here; its m is n here.
    code = {"TN": 0, "NN": 1, "NT": 2, "TT": 3}
    layout = np.array([code[f"{a}{b}"] for a, b in zip(table["a_transpose"], table["b_transpose"], strict=True)])
    ones = np.ones(rows(table))
    return GemmRows(ones, table["n"], table["m"], table["k"], table["time_msec"] * 1e-3, layout)
