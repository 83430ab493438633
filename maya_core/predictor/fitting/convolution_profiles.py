"""Fits `convolution_time` to measured convolutions, and computes its errors on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from maya_core.hardware.catalog import Gpu, find_gpu
from maya_core.ops.kernel import Columns, Convolution
from maya_core.predictor.convolution_time import (
    DIRECTIONS,
    WINOGRAD_FILTER,
    ConvolutionModel,
    FittedConvolution,
    as_product,
    multiplied,
    traffic,
)
from maya_core.predictor.family import peak_flops
from maya_core.predictor.fitting.gemm_fit import KERNEL_FLOOR_US, GemmRows, axes_for, fit_structure
from maya_core.predictor.fitting.lattice_fit import fit_surface, flat_surface
from maya_core.predictor.fitting.measurements import read_table, rows, where
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.profile import Profile, ProfileSource

NEUSIGHT = {"Tesla V100-PCIE-32GB": "v100-pcie", "Tesla T4": "t4", "NVIDIA A100 80GB PCIe": "a100-pcie"}
DEEPBENCH = {"V100-SXM2 (DGX-1)": "v100", "T4": "t4"}
DEEPBENCH_DTYPES = {"float32": "fp32", "float16": "fp16"}
FEWEST = 40  # rows that a fit needs
SHAPES, LARGEST = "unseen shapes", "largest tenth"


def neusight_rows(data: Path, gpu: str) -> tuple[np.ndarray, np.ndarray]:
    """Forward convolutions in float32, channels first, timed with the launch: sizes by row, and seconds."""
    table = read_table(data, "ops/neusight_fp32_ops.parquet")
    device = next(key for key, ours in NEUSIGHT.items() if ours == gpu)
    table = where(table, (table["device"] == device) & (table["op"] == "conv"))
    out = np.floor((table["insize"] + 2 * table["padding"] - table["ksize"]) / table["stride"]) + 1
    one, zero = np.ones(rows(table)), np.zeros(rows(table))
    sizes = [zero, table["batch"], table["cin"], table["cout"], one, table["insize"] ** 2, out**2, table["ksize"] ** 2, zero, table["stride"] ** 2]  # fmt: skip
    return np.stack(sizes, axis=1), table["latency_ms"] * 1e-3


def deepbench_rows(data: Path, gpu: str, dtype: str, direction: str) -> tuple[np.ndarray, np.ndarray]:
    table = read_table(data, "ops/deepbench_v100_t4.csv")
    device = next(key for key, ours in DEEPBENCH.items() if ours == gpu)
    column = {"forward": "forward_msec", "dgrad": "wrt_inputs_msec", "wgrad": "wrt_parameters_msec"}[direction]
    found = []
    for index in range(rows(table)):
        row = {name: values[index] for name, values in table.items()}
        if (
            row["gpu"] != device
            or row["section"] != "W"
            or not str(row["precision"]).startswith(DEEPBENCH_DTYPES[dtype])
        ):
            continue
        try:
            ms = float(row[column])
        except (TypeError, ValueError):
            continue
        width = float(row["app"])  # the section's first column is W, read as `app`
        stride = row["horizontal_stride"] * row["vertical_stride"]
        filters = row["s_filter_width"] * row["r_filter_height"]
        if ms > 0 and np.isfinite(ms * width * row["h"]):
            found.append((DIRECTIONS.index(direction), row["n"], row["c"], row["k"], 1, width * row["h"], row["p"] * row["q"], filters, 0, stride, ms * 1e-3))  # fmt: skip
    whole = np.array(found, float).reshape(-1, 11)
    return whole[:, :-1], whole[:, -1]


def fit_convolution(
    gpu: Gpu, dtype: str, sizes: np.ndarray, seconds: np.ndarray, *, bare: bool, smoothness: float = 0.1
) -> tuple[ConvolutionModel, float]:
    """Returns the model, and the seconds that timing added to each row."""
    direction, batch, c_in, c_out, groups, pixels_in, pixels_out, volume, _, stride = sizes.T
    product = as_product(direction, batch, c_in, c_out, groups, pixels_in, pixels_out, volume)
    moved = traffic(dtype, batch, c_in, c_out, groups, pixels_in, pixels_out, volume)
    as_rows = GemmRows(groups, *product, seconds)
    structure = fit_structure(gpu, dtype, as_rows, moved)
    timer = 0.0 if bare else max(0.0, structure.floor_us - KERNEL_FLOOR_US) * 1e-6
    structure = structure.model_copy(update={"floor_us": structure.floor_us - timer * 1e6})
    alone = np.maximum(seconds - timer, 0.1 * seconds)
    axes = axes_for(as_rows, 1)[1:]
    structural = partial(multiplied, structure, gpu, dtype)
    place = (groups * product[0], *product[1:])
    residual = np.log(alone / flat_surface(axes, structural)(*place))
    memory = moved / (gpu.memory_bandwidth_bytes_per_s * structure.memory_share)
    bound = memory > 0.8 * alone  # such rows do not determine the product
    winograd = (volume == WINOGRAD_FILTER) & (stride == 1)
    faster = 0.0
    if winograd.sum() >= 10 and (~winograd).sum() >= 10:
        faster = float(np.median(residual[winograd]) - np.median(residual[~winograd]))
        residual = residual - faster * winograd
    lattice = fit_surface(
        axes, place, residual, structure=structural, smoothness=smoothness,
        weights=np.where(bound, 0.05, (alone / seconds) ** 2),
    )  # fmt: skip
    return ConvolutionModel(
        structure=structure, correction=lattice.store(), winograd=round(float(np.exp(faster)), 4)
    ), timer


def roofline(gpu: Gpu, dtype: str, sizes: np.ndarray) -> np.ndarray:
    _, batch, c_in, c_out, groups, _, pixels_out, volume, _, _ = sizes.T
    flops = 2 * batch * pixels_out * c_out * c_in / groups * volume
    answer: np.ndarray = np.maximum(
        flops / peak_flops(gpu, dtype),
        traffic(dtype, *sizes.T[1:8]) / gpu.memory_bandwidth_bytes_per_s,
    )
    return answer


def lines_of(gpu: Gpu, dtype: str, model: str, sizes: np.ndarray, seconds: np.ndarray, *, bare: bool) -> Iterator[Line]:
    work = sizes[:, 1] * sizes[:, 6] * sizes[:, 2] * sizes[:, 3] * sizes[:, 7]
    for split, out in ((SHAPES, by_key(*sizes.T)), (LARGEST, largest_tenth(work))):
        fitted, timer = fit_convolution(gpu, dtype, sizes[~out], seconds[~out], bare=bare)
        predicted = FittedConvolution(fitted, gpu, dtype).seconds(Columns.of_rows(Convolution, sizes[out]))[0] + timer
        yield Line("convolution", split, gpu.name, model, seconds[out], predicted, roofline(gpu, dtype, sizes[out]))


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    for name in dict.fromkeys([*NEUSIGHT.values(), *DEEPBENCH.values()]):
        if only is not None and name not in only:
            continue
        gpu, lines, used = find_gpu(name), list[Line](), list[ProfileSource]()
        models: dict[str, ConvolutionModel] = {}

        def add(
            dtype: str, direction: str, measured: tuple[np.ndarray, np.ndarray], source: str, bare: bool,
            gpu: Gpu = gpu, models: dict[str, ConvolutionModel] = models, used: list[ProfileSource] = used, lines: list[Line] = lines,
        ) -> None:  # fmt: skip
            sizes, seconds = measured
            model = f"{dtype} {direction}"
            if model in models or len(seconds) < FEWEST:
                return
            models[model], timer = fit_convolution(gpu, dtype, sizes, seconds, bare=bare)
            note = model if bare else f"{model}, {timer * 1e6:.0f} us of timer taken out"
            used.append(ProfileSource(name=source, rows=len(seconds), note=note))
            if evaluate:
                lines += lines_of(gpu, dtype, model, sizes, seconds, bare=bare)

        if name in NEUSIGHT.values():
            add("float32", "forward", neusight_rows(data, name), "NeuSight convolutions, TF32 off", False)
        if name in DEEPBENCH.values():
            for dtype in DEEPBENCH_DTYPES:
                for direction in DIRECTIONS:
                    add(dtype, direction, deepbench_rows(data, name, dtype, direction), "DeepBench", True)
        yield (
            Profile(
                family="convolution", gpu=name, sources=used, held_out=summarize(lines),
                models={key: model.model_dump(exclude_none=True) for key, model in models.items()},
            ),
            lines,
        )  # fmt: skip
