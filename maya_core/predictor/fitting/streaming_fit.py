"""Fits `streaming_time` to measured elementwise ops, normalizations, softmaxes and copies, and computes its errors on held-out rows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maya_core.hardware.catalog import Gpu, find_gpu
from maya_core.ops.normalization import softmax_pattern
from maya_core.predictor import streaming_time
from maya_core.predictor.fitting.lattice_fit import fit_lattice
from maya_core.predictor.fitting.measurements import Table, read_table, where
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.lattice import SCALE, Lattice
from maya_core.predictor.profile import Profile, ProfileSource, distance
from maya_core.predictor.streaming_time import Coefficients

LARGE_BYTES = 2**20  # errors are computed from this size on
LEAST_ROWS = 40  # for its own curve over sizes, and for a check with held-out rows
ONE_SIZE = ("fill", "reduction")  # measured at large sizes only: they use the curve of elementwise kernels
COURSE_WEIGHT = 0.05  # of a relative's curve at a knot, relative to a measurement
SCATTER = 0.25  # a pattern is dropped if its median error on the fitted rows exceeds this
FEWEST = 8  # rows that are needed to state an error
SHAPES, LARGEST = "unseen shapes", "largest tenth"
FLOAT, HALF = 4, 2

# The floor of a kernel, read by hand from Vidur's adds of a few KiB (clock of 1 us), HTA's one-block kernels on V100, and gpu-benches'
# graph on L40. Other GPUs use the default.
FLOORS_US = {
    "a100": 2.0, "a40": 1.2, "h100": 1.3, "v100": 1.9, "v100-pcie": 1.9, "l40": 1.0,
}  # fmt: skip


def _pattern(model: str, row: float, item: int) -> str:
    return softmax_pattern(row, item) if model == "softmax" else model


class Row(NamedTuple):
    """A measured kernel."""

    gpu: str
    model: str
    source: str
    op: str
    key: str  # rows of one key are held out together
    read: float
    written: float
    elements: float
    row: float
    seconds: float


@dataclass(frozen=True)
class Rows:
    """Measured kernels of one GPU and pattern."""

    sizes: np.ndarray  # (n, 4), as in streaming_time
    seconds: np.ndarray
    source: np.ndarray
    op: np.ndarray
    key: np.ndarray

    @staticmethod
    def of(rows: list[Row]) -> Rows:
        return Rows(
            np.array([row[5:9] for row in rows], float).reshape(-1, 4),
            np.array([row.seconds for row in rows], float),
            np.array([row.source for row in rows], object),
            np.array([row.op for row in rows], object),
            np.array([row.key for row in rows], object),
        )

    def __getitem__(self, mask: np.ndarray) -> Rows:
        return Rows(self.sizes[mask], self.seconds[mask], self.source[mask], self.op[mask], self.key[mask])

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def total_bytes(self) -> np.ndarray:
        answer: np.ndarray = self.sizes[:, 0] + self.sizes[:, 1]
        return answer


Measured = dict[str, dict[str, Rows]]  # by GPU and pattern


# ---- measurements ----
NEUSIGHT_GPUS = {
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
}
NEUSIGHT_OPS = {  # op: pattern, tensors read, all of one size. Powers with one exponent are excluded: on A100 they are a quarter slower, as if bound by arithmetic
    "add": ("elementwise", 2), "mul": ("elementwise", 2), "div": ("elementwise", 2), "pow": ("elementwise", 2),
    "addu": ("elementwise", 1), "mulu": ("elementwise", 1), "divu": ("elementwise", 1),
    "gelu": ("elementwise", 1), "relu": ("elementwise", 1), "tanh": ("elementwise", 1),
    "softmax": ("softmax", 1), "ln": ("norm", 1),
}  # fmt: skip
HOST_BOUND = 1.5  # times the duration of the smallest call: shorter rows measured the host


def neusight(folder: Path) -> Iterator[Row]:
    """Times between events. For small ops they are the host's, so those are excluded; for large ones they include a constant."""
    table = read_table(folder, "ops/neusight_fp32_ops.parquet")
    for device, gpu in NEUSIGHT_GPUS.items():
        of_gpu = where(table, (table["device"] == device) & np.isin(table["op"], list(NEUSIGHT_OPS)))
        beside = _constant_beside(of_gpu)
        for op, (model, reads) in NEUSIGHT_OPS.items():
            of_op = where(of_gpu, of_gpu["op"] == op)
            seconds = of_op["latency_ms"] * 1e-3
            kept = seconds > HOST_BOUND * np.quantile(seconds, 0.02)
            for rows, columns, took in zip(of_op["rows"][kept], of_op["cols"][kept], seconds[kept], strict=True):
                count = rows * columns
                row = columns if model != "elementwise" else 0
                yield Row(
                    gpu, _pattern(model, columns, FLOAT), "NeuSight", op, f"{rows:g}x{columns:g}", reads * FLOAT * count, FLOAT * count, count, row,
                    took - beside,
                )  # fmt: skip


def _constant_beside(table: Table) -> float:
    """The seconds that events measure in addition to the kernel: the intercept of time over bytes of large adds."""
    adds = where(table, table["op"] == "add")
    nbytes, seconds = 3 * FLOAT * adds["rows"] * adds["cols"], adds["latency_ms"] * 1e-3
    large = nbytes > 2**26
    _, begin = np.polyfit(nbytes[large], seconds[large], 1, w=1 / seconds[large])
    return float(max(begin, 0.0))


VIDUR_GPUS = ("a100", "a40", "h100")
VIDUR_ADDS = {
    "microsoft/phi-2": 2
}  # attention and MLP in parallel: assumed to be two adds, because it took twice as long


def vidur(folder: Path) -> Iterator[Row]:
    """Profiler times of the residual add. Vidur's other ops are kernels of its serving engine, not of ATen."""
    table = read_table(folder, "ops/vidur_fp16_layer_ops.parquet")
    for gpu in VIDUR_GPUS:
        adds = where(table, (table["gpu"] == gpu) & (table["op"] == "add"))
        for model, tokens, hidden, took in zip(
            adds["model"], adds["num_tokens"], adds["hidden"], adds["median_ms"], strict=True
        ):
            count = tokens * hidden
            yield Row(
                gpu, "elementwise", "Vidur", model, f"{tokens:g}x{hidden:g}", 2 * HALF * count, HALF * count, count, 0,
                took * 1e-3 / VIDUR_ADDS.get(model, 1),
            )  # fmt: skip


IN_MODEL_GPUS = {
    "NVIDIA_L4": "l4", "NVIDIA_H100_80GB_HBM3": "h100", "Tesla_V100-PCIE-32GB": "v100-pcie", "Tesla_T4": "t4",
    "NVIDIA_A100-PCIE-40GB": "a100-pcie-40gb", "NVIDIA_A100_80GB_PCIe": "a100-pcie",
}  # fmt: skip
IN_MODEL_OPS = [  # a regular expression for the node's name, and its pattern
    (r"^(tanh|pow|mul|add|gelu|truediv|relu)$", "elementwise"),
    (r"^softmax$", "softmax"),
    (r"ln_|layer_norm|LayerNorm", "norm"),
    (r"^contiguous$", "strided"),  # of heads: rows of a head stay contiguous
    (r"drop", "dropout"),
]
BYTES_OF_MASK = 1


class StreamingPart(NamedTuple):
    """A kernel of an eager chain, which reads and writes tensors of one size."""

    model: str
    reads: float
    writes: float


LAYER_NORM_BACKWARD = [StreamingPart("norm_backward", 2, 1), StreamingPart("column_reduction", 2, 0)]
SOFTMAX_BACKWARD = [StreamingPart("elementwise", 2, 1), StreamingPart("softmax_backward", 2, 1)]
BACKWARD = {"norm": LAYER_NORM_BACKWARD, "softmax": SOFTMAX_BACKWARD}


def _split(
    gpu: str,
    chain: list[StreamingPart],
    source: str,
    op: str,
    item: int,
    count: float,
    row: float,
    key: str,
    took: float,
) -> Iterator[Row]:
    """The kernels of a chain that was timed as a whole; its time is divided in proportion to their structural times."""
    card = find_gpu(gpu)
    starting = Coefficients(streaming_time.FLOOR_US * 1e-6, streaming_time.DATA_SHEET_SHARE)
    sizes = [(part.reads * item * count, part.writes * item * count, count, row) for part in chain]
    each = [
        float(streaming_time.evaluate(card, part.model, starting, np.array([size]))[0][0])
        for part, size in zip(chain, sizes, strict=True)
    ]
    for part, size, seconds in zip(chain, sizes, each, strict=True):
        in_rows = part.model in streaming_time.BY_ROW
        yield Row(
            gpu,
            _pattern(part.model, row, item),
            source,
            op,
            key,
            *size[:3],
            row if in_rows else 0,
            took * seconds / sum(each),
        )


def in_model(folder: Path) -> Iterator[Row]:
    """Times between events for the nodes of whole models. A node without a kernel shows the constant that events add."""
    table = read_table(folder, "ops/neusight_inmodel_fx_ops_fp32.parquet")
    table = where(table, np.array(["switch" not in run for run in table["run"]]))
    for device, gpu in IN_MODEL_GPUS.items():
        of_gpu = where(table, table["gpu"] == device)
        nothing = float(np.median(of_gpu["fw_ms"][of_gpu["target"] == "view"])) * 1e-3
        peak = find_gpu(gpu).memory_bandwidth_bytes_per_s
        for target, given, made, took, back in zip(
            of_gpu["target"], of_gpu["input_shapes"], of_gpu["output_shape"], of_gpu["fw_ms"] * 1e-3, of_gpu["bw_ms"], strict=True
        ):  # fmt: skip
            name = re.sub(
                r"<built-in (?:function|method) (\w+).*", r"\1", re.sub(r"<function (\w+).*", r"\1", str(target))
            )
            model = next((model for part, model in IN_MODEL_OPS if re.search(part, name)), None)
            shape = [int(number) for number in re.findall(r"\d+", made)]
            count = math.prod(shape)
            if model is None or took < 2 * nothing or (model == "dropout" and not back):
                continue
            given_counts = [math.prod(each) for each in json.loads(given.replace("(", "[").replace(")", "]"))]
            reads = sum(each for each in given_counts if each <= count)
            read, written = FLOAT * max(reads, count), (FLOAT + BYTES_OF_MASK * (model == "dropout")) * count
            if (read + written) / (took - nothing) > peak:  # a view, or the shapes are not those of the kernel
                continue
            row = shape[-1] if model in streaming_time.BY_ROW else 0
            broadcast = model == "elementwise" and any(each < count for each in given_counts)
            model = "strided" if broadcast else model
            pattern = _pattern(model, shape[-1], FLOAT)
            yield Row(gpu, pattern, "NeuSight in models", name, f"{made}", read, written, count, row, took - nothing)
            units = sum(part.reads + part.writes for part in BACKWARD.get(model, []))
            least = units * FLOAT * count / peak
            if units and back * 1e-3 - nothing > max(least, nothing):
                of_row = (FLOAT, count, shape[-1], f"{made}", back * 1e-3 - nothing)
                yield from _split(gpu, BACKWARD[model], "NeuSight in models", f"{name} backward", *of_row)


LIGER_GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA B200": "b200", "NVIDIA GeForce RTX 3090": "rtx-3090",
}  # fmt: skip
LIGER_ITEM = {"torch.float32": FLOAT, "torch.bfloat16": HALF}


# The eager implementations that were timed, kernel by kernel. Those of kl_div and tvd are not documented with the measurements: they are
# assumed to be the plain ones that stay below the data sheet's bandwidth.
LIGER_CHAINS: dict[tuple[str, str], list[StreamingPart]] = {
    ("layer_norm", "forward"): [StreamingPart("norm", 1, 1)],
    ("layer_norm", "backward"): LAYER_NORM_BACKWARD,
    ("softmax", "forward"): [StreamingPart("softmax", 1, 1)],
    ("softmax", "backward"): SOFTMAX_BACKWARD,
    ("relu_squared", "forward"): [StreamingPart("elementwise", 1, 1)] * 2,
    ("kl_div", "forward"): [
        StreamingPart("elementwise", 1, 1),
        *[StreamingPart("elementwise", 2, 1)] * 2,
        StreamingPart("reduction", 1, 0),
    ],
    ("tvd", "forward"): [
        StreamingPart("elementwise", 2, 1),
        *[StreamingPart("elementwise", 1, 1)] * 2,
        StreamingPart("reduction", 1, 0),
    ],
    ("cross_entropy", "forward"): [StreamingPart("softmax", 1, 1)],
    ("cross_entropy", "backward"): [StreamingPart("fill", 0, 1), StreamingPart("softmax_backward", 2, 1)],
}
LOSS_ROUND_S = streaming_time.SERIAL["loss"][1] / streaming_time.SERIAL["loss"][0]


def liger(folder: Path) -> Iterator[Row]:
    """Medians of eager chains after the cache was flushed. A chain's time is divided in proportion to structural times."""
    table = read_table(folder, "ops/liger_kernel_fwd_bwd.csv.gz")
    eager = np.isin(table["kernel_provider"], ["torch", "huggingface"]) & (table["metric_name"] == "speed")
    table = where(table, eager)
    for name, mode, device, x_name, x, config, took in zip(
        table["kernel_name"], table["kernel_operation_mode"], table["gpu_name"], table["x_name"], table["x_value"],
        table["config"], table["p50"] * 1e-3, strict=True,
    ):  # fmt: skip
        chain, gpu = LIGER_CHAINS.get((name, mode)), LIGER_GPUS.get(device)
        found = _liger_shape(x_name, x, json.loads(config))
        if chain is None or gpu is None or found is None:
            continue
        rows, row, item = found
        count = rows * row
        if name == "cross_entropy":
            took -= rows * LOSS_ROUND_S
        yield from _split(gpu, chain, "Liger-Kernel", f"{name} {mode}", item, count, row, f"{rows:g}x{row:g}", took)


def _liger_shape(x_name: str, x: str, config: dict[str, Any]) -> tuple[float, float, int] | None:
    """The number of rows, their length, and the bytes of an element."""
    if not str(x).isdigit():
        return None
    size, item = float(x), LIGER_ITEM.get(config.get("dtype", "torch.float32"), FLOAT)
    if x_name in ("N", "H") and "M" in config:
        return float(config["M"]), size, item
    if x_name in ("T", "BT"):
        row = config.get("hidden_size") or config.get("vocab_size")
        return (size, float(row), item) if row else None
    if x_name == "V" and "B" in config and "T" in config:
        return float(config["B"] * config["T"]), size, item
    return None


BENCHES_GPUS = {
    "v100": "v100",
    "a100_40": "a100-40gb",
    "a100_80": "a100",
    "a40": "a40",
    "l40": "l40",
    "h100_pcie": "h100-pcie",
}
BENCHES_KERNELS = {"init": ("fill", 0, 1), "read": ("reduction", 1, 0)}  # pattern, arrays read and written
STREAM_BYTES = 2**30


def gpu_benches(folder: Path) -> Iterator[Row]:
    """Streams at high occupancy, and kernels over growing amounts of data in a CUDA graph. H200 is excluded: it reaches 0.5 to 0.74 of its
    data sheet, which is attributed to these kernels and not to the GPU."""
    table = read_table(folder, "ops/gpu_benches_stream.csv")
    for name, gpu in BENCHES_GPUS.items():
        for kernel, (model, reads, writes) in BENCHES_KERNELS.items():
            rates = table["GBps"][(table["gpu"] == name) & (table["kernel"] == kernel) & (table["occ_pct"] > 60)]
            rate = float(np.quantile(rates, 0.75)) * 1e9
            part = STREAM_BYTES / (reads + writes)
            count = part / 8
            yield Row(
                gpu,
                model,
                "gpu-benches",
                f"stream {kernel}",
                kernel,
                reads * part,
                writes * part,
                count,
                0,
                STREAM_BYTES / rate,
            )
    table = read_table(folder, "ops/gpu_benches_small_kernels.csv")
    for name in ("l40",):  # for the others there are Vidur's adds, which run between other kernels, as in training
        graph = where(table, (table["gpu"] == name) & (table["mode"] == "graph"))
        for nbytes, took in zip(graph["bytes"], graph["time_us"] * 1e-6, strict=True):
            yield Row(
                BENCHES_GPUS[name],
                "elementwise",
                "gpu-benches",
                "small",
                f"{nbytes:g}",
                nbytes / 2,
                nbytes / 2,
                nbytes / 16,
                0,
                took,
            )


SOURCES: dict[str, tuple[Callable[[Path], Iterator[Row]], str]] = {
    "Vidur": (vidur, "residual add, fp16, profiler times"),
    "NeuSight": (
        neusight,
        "elementwise (without powers of one exponent), softmax, layer norm, fp32, event times less a constant, host-bound rows left out",
    ),
    "NeuSight in models": (
        in_model,
        "nodes of BERT, GPT-2, GPT-3, OPT, fp32, event times less those of an empty node; rows faster than the data sheet left out",
    ),
    "Liger-Kernel": (liger, "eager PyTorch chains, taken to be their plain kernels, split as structure splits them"),
    "gpu-benches": (gpu_benches, "streams, and kernels over growing data"),
}


def read(folder: Path) -> Measured:
    """All measurements, by GPU and pattern."""
    found: dict[str, dict[str, list[Row]]] = {}
    for reader, _ in SOURCES.values():
        for row in reader(folder):
            if row.seconds > 0:
                found.setdefault(row.gpu, {}).setdefault(row.model, []).append(row)
    return {gpu: {model: Rows.of(rows) for model, rows in models.items()} for gpu, models in found.items()}


# ---- the fit ----


def fit_pattern(gpu: Gpu, model: str, rows: Rows, course: Lattice | None = None) -> Coefficients:
    """Fits the level and the curve over sizes. Where there are no rows, it stays near the `course` of a relative, if one is given."""
    floor = FLOORS_US.get(gpu.name, streaming_time.FLOOR_US) * 1e-6
    beyond = np.maximum(rows.seconds - floor, 0.02 * rows.seconds)
    moved = streaming_time.traffic(gpu, model, rows.sizes)
    large = moved > 8 * gpu.l2_bytes
    if large.sum() < 5:
        large = moved >= np.quantile(moved, 0.75)
    share = float(
        np.clip(np.median(streaming_time.streaming(gpu, model, 1.0, rows.sizes)[large] / beyond[large]), 0.02, 1.0)
    )
    if course is None and len(np.unique(rows.key)) < 3:
        return Coefficients(floor, share)
    structural = streaming_time.streaming(gpu, model, share, rows.sizes)
    residuals = np.clip(np.log(beyond / structural), -2, 2)
    axes = streaming_time.ROW_AXES if model in streaming_time.BY_ROW else (streaming_time.TRAFFIC_AXIS,)
    # If the floor is most of the time, the rest is unknown, and a clock of one microsecond is too coarse for short kernels.
    known = structural / (structural + floor)
    weights = np.clip(rows.seconds / 10e-6, 0.05, 1.0) * known**2
    places = streaming_time.place(gpu, model, rows.sizes)
    if course is not None:
        level = float(np.median((residuals - np.log(course(*places)[0]))[large]))
        knots = np.meshgrid(*(2**axis.knots for axis in axes), indexing="ij")
        places = tuple(np.concatenate([own, knot.ravel()]) for own, knot in zip(places, knots, strict=True))
        residuals = np.concatenate([residuals, course.values.ravel() + level])
        weights = np.concatenate([weights, np.full(course.values.size, COURSE_WEIGHT)])

    lattice = fit_lattice(
        axes,
        places,
        residuals,
        structure=partial(streaming_time.growth, model),
        weights=weights,
        smoothness=0.02,
        shrinkage=0.002,
    )
    if len(axes) == 1:
        lattice = _also_within_octaves(lattice)
    return Coefficients(floor, share, lattice)


def _also_within_octaves(lattice: Lattice) -> Lattice:
    """Raises values that fall faster from knot to knot than bytes grow, because one more operand is less than twice the bytes."""
    [axis] = lattice.axes
    steepest = math.log(2) / axis.per_octave - 2 / SCALE
    values = lattice.values.copy()
    for knot in range(1, len(values)):
        values[knot] = max(values[knot], values[knot - 1] - steepest)
    return Lattice(lattice.axes, values, lattice.support)


def _course(gpu: Gpu, model: str, measured: Measured) -> Lattice | None:
    """The curve over sizes of the nearest GPU with enough measurements of the pattern."""
    rich = [
        name for name, patterns in measured.items() if name != gpu.name and len(patterns.get(model, ())) >= LEAST_ROWS
    ]
    if not rich:
        return None
    nearest = find_gpu(min(rich, key=lambda name: distance(gpu, find_gpu(name))))
    return fit_pattern(nearest, model, measured[nearest.name][model]).correction


def _line(gpu: Gpu, model: str, fitted_on: Gpu, fitted: Rows, rows: Rows, split: str) -> Line:
    predicted, _ = streaming_time.evaluate(gpu, model, fit_pattern(fitted_on, model, fitted), rows.sizes)
    roofline = rows.total_bytes / gpu.memory_bandwidth_bytes_per_s
    return Line(
        streaming_time.FAMILY, split, gpu.name, model, rows.seconds, predicted, roofline, moved=rows.total_bytes
    )


def lines_of(gpu: Gpu, model: str, measured: Measured) -> Iterator[Line]:
    """Errors by what was held out: a fifth of the shapes, the largest tenth, each op or model of a source, or the whole GPU."""
    rows = measured[gpu.name][model]
    large = rows.total_bytes >= LARGE_BYTES
    folds = [(SHAPES, by_key(rows.key)), (LARGEST, largest_tenth(rows.total_bytes))]
    folds += [(f"unseen: {rows.source[rows.op == op][0]} {op}", rows.op == op) for op in np.unique(rows.op)]
    for split, out in folds:
        if (out & large).sum() >= FEWEST and (~out).sum() >= LEAST_ROWS:
            yield _line(gpu, model, gpu, rows[~out], rows[out & large], split)
    others = [
        name for name, patterns in measured.items() if name != gpu.name and len(patterns.get(model, ())) >= FEWEST
    ]
    if large.sum() >= FEWEST and others:
        nearest = find_gpu(min(others, key=lambda name: distance(gpu, find_gpu(name))))
        yield _line(
            gpu, model, nearest, measured[nearest.name][model], rows[large], f"carried over from {nearest.name}"
        )


def _models(gpu: Gpu, measured: Measured) -> dict[str, Coefficients]:
    patterns = measured[gpu.name]
    models: dict[str, Coefficients] = {}
    for model, rows in patterns.items():
        course = None
        if len(rows) < LEAST_ROWS:
            course = _course(gpu, "elementwise" if model in ONE_SIZE else model, measured)
            if model in ONE_SIZE and len(patterns.get("elementwise", ())) >= LEAST_ROWS:
                course = fit_pattern(gpu, "elementwise", patterns["elementwise"]).correction
        fitted = fit_pattern(gpu, model, rows, course)
        predicted, _ = streaming_time.evaluate(gpu, model, fitted, rows.sizes)
        if np.median(np.abs(predicted / rows.seconds - 1)) < SCATTER:
            models[model] = fitted
    return models


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    """Yields a profile for every GPU with measurements, with its held-out errors."""
    measured = read(data)
    for name, patterns in measured.items():
        if only is not None and name not in only:
            continue
        gpu = find_gpu(name)
        counts = Counter(source for rows in patterns.values() for source in rows.source)
        lines = [line for model in patterns for line in lines_of(gpu, model, measured)] if evaluate else []
        yield (
            Profile(
                family=streaming_time.FAMILY,
                gpu=name,
                sources=[
                    ProfileSource(name=source, rows=count, note=SOURCES[source][1])
                    for source, count in sorted(counts.items())
                ],
                held_out=summarize(lines),
                models={model: coefficients.store() for model, coefficients in _models(gpu, measured).items()},
            ),
            lines,
        )
