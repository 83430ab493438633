"""Fits `recurrent_time` to DeepBench's layers. It needs the GEMM profiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from maya_core.hardware.catalog import Gpu, find_gpu
from maya_core.hardware.dtypes import RATE_BYTES
from maya_core.ops.kernel import Columns, Recurrent
from maya_core.predictor.family import Target, peak_flops
from maya_core.predictor.fitting.measurements import read_table, rows
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.gemm_time import price
from maya_core.predictor.profile import Profile, ProfileSource
from maya_core.predictor.recurrent_time import Product, RecurrentModel, parts, seconds

DEVICES = {"V100-SXM2 (DGX-1)": "v100", "T4": "t4"}
DTYPES = {"float32": "fp32", "float16": "fp16"}
GATES = {"Vanilla": 1, "GRU": 3, "LSTM": 4}
FIELDS = tuple(RecurrentModel.model_fields)
FEWEST = 20  # rows that a fit needs
SHAPES, LARGEST = "unseen shapes", "largest tenth"


def measured(data: Path, gpu: str, dtype: str, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Sizes by row, in the order of `Recurrent.sizes`, and seconds."""
    table = read_table(data, "ops/deepbench_v100_t4.csv")
    device = next(key for key, ours in DEVICES.items() if ours == gpu)
    found = []
    for index in range(rows(table)):
        row = {name: values[index] for name, values in table.items()}
        cell = str(row["section"]).rpartition(" - ")[2]
        if row["gpu"] != device or cell not in GATES or not str(row["precision"]).startswith(DTYPES[dtype]):
            continue
        ms = row["time_backward_wrt_inputs_msec"] + row["time_backward_wrt_weights_msec"] if backward else row["time_forward_msec"]  # fmt: skip
        hidden = row["hidden_units"]
        if np.isfinite(ms) and ms > 0:
            found.append((float(backward), GATES[cell], 1, 1, row["timesteps"], row["n"], hidden, hidden, RATE_BYTES[dtype], ms * 1e-3))  # fmt: skip
    whole = np.array(found, float).reshape(-1, 10)
    return whole[:, :-1], whole[:, -1]


def _product(gpu: Gpu, dtype: str) -> Product:
    target = Target(gpu)

    def product(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
        one = np.ones_like(m)
        return price(target, dtype, one, m, n, k, 0 * one).seconds

    return product


def fit_recurrent(gpu: Gpu, dtype: str, sizes: np.ndarray, taken: np.ndarray) -> RecurrentModel:
    stepwise, whole, count = parts(_product(gpu, dtype), Columns.of_rows(Recurrent, sizes))

    def off(vector: np.ndarray) -> np.ndarray:
        step_us, step_share, whole_share = np.exp(vector)
        answer: np.ndarray = np.log((step_us * 1e-6 * count + step_share * stepwise + whole_share * whole) / taken)
        return answer

    found = least_squares(off, np.log([5.0, 0.5, 1.0]), bounds=([-3, -4, -4], [5, 2, 2]), loss="soft_l1", f_scale=0.1)
    return RecurrentModel(**dict(zip(FIELDS, (round(float(v), 4) for v in np.exp(found.x)), strict=True)))


def roofline(gpu: Gpu, dtype: str, sizes: np.ndarray) -> np.ndarray:
    backward, gates, _, _, steps, batch, given, hidden, item = sizes.T
    passes = np.where(backward > 0, 2, 1)
    flops = passes * 2 * steps * batch * gates * hidden * (given + hidden)
    moved = passes * item * (gates * hidden * (given + hidden) + steps * batch * (given + hidden))
    answer: np.ndarray = np.maximum(flops / peak_flops(gpu, dtype), moved / gpu.memory_bandwidth_bytes_per_s)
    return answer


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    for name in DEVICES.values():
        if only is not None and name not in only:
            continue
        gpu, lines, used = find_gpu(name), list[Line](), list[ProfileSource]()
        models: dict[str, RecurrentModel] = {}
        for dtype in DTYPES:
            for backward in (False, True):
                sizes, taken = measured(data, name, dtype, backward)
                model = f"{dtype} {'backward' if backward else 'forward'}"
                if len(taken) < FEWEST:
                    continue
                models[model] = fit_recurrent(gpu, dtype, sizes, taken)
                used.append(ProfileSource(name="DeepBench", rows=len(taken), note=model))
                work = sizes[:, 1] * sizes[:, 4] * sizes[:, 5] * sizes[:, 7] ** 2
                for split, out in ((SHAPES, by_key(*sizes.T)), (LARGEST, largest_tenth(work))) if evaluate else ():
                    fitted = fit_recurrent(gpu, dtype, sizes[~out], taken[~out])
                    predicted = seconds(fitted, _product(gpu, dtype), Columns.of_rows(Recurrent, sizes[out]))
                    lines.append(Line("recurrent", split, name, model, taken[out], predicted, roofline(gpu, dtype, sizes[out])))  # fmt: skip
        if not models:
            continue
        yield (
            Profile(
                family="recurrent", gpu=name, sources=used, held_out=summarize(lines),
                models={key: model.model_dump() for key, model in models.items()},
            ),
            lines,
        )  # fmt: skip
