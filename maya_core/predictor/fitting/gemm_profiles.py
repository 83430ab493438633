"""Which measurements make the GEMM profile of which GPU, and how far off the fits are on what they did not see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maya_core.hardware.catalog import Gpu, find_gpu
from maya_core.hardware.dtypes import RATE_BYTES
from maya_core.predictor.family import peak_flops
from maya_core.predictor.fitting import gemm_sources as sources
from maya_core.predictor.fitting.gemm_fit import GemmRows, fit_gemm, fit_scale, fit_sustained
from maya_core.predictor.fitting.splits import Line, by_key, largest_tenth, summarize
from maya_core.predictor.gemm_time import FittedGemm, GemmModel
from maya_core.predictor.profile import Profile, ProfileSource

BURST_NOTE = "AIConfigurator GEMM tables (short bursts)"
SUSTAINED = {"a100": sources.vidur, "h100": sources.vidur, "a100-pcie": sources.simumax, "b200": sources.simumax}
# Whose burst tables stand in where a GPU has only sustained rows, and whose sustained rows where it has only bursts.
BURST_OF = {"a100-pcie": "a100"}
SUSTAINED_OF = {"h200": "h100", "b300": "b200", "gb200": "b200", "gb300": "b200"}
SUSTAINED_NOTES = {
    "vidur": "Vidur: linear layers of language models, float16, device time under load",
    "simumax": "SimuMax: linear layers forward and backward, bfloat16, under load",
}
FLOAT32_DONOR = "a100-pcie-40gb"
PAIRS, LARGEST, MODELS, SHAPES = "unseen (n, k)", "largest tenth", "unseen models", "unseen shapes"


def _size(rows: GemmRows) -> np.ndarray:
    answer: np.ndarray = rows.batch * rows.m * rows.n * rows.k
    return answer


def _line(label: str, gpu: Gpu, dtype: str, rows: GemmRows, predicted: np.ndarray) -> Line:
    moved = RATE_BYTES[dtype] * rows.batch * (rows.m * rows.k + rows.k * rows.n + rows.m * rows.n)
    roof = np.maximum(2 * _size(rows) / peak_flops(gpu, dtype), moved / gpu.memory_bandwidth_bytes_per_s)
    return Line("gemm", label, gpu.name, dtype, rows.seconds, predicted, roof, 2 * _size(rows), moved)


def _groups(rows: GemmRows) -> np.ndarray:
    assert rows.group is not None
    return rows.group


def burst_lines(data: Path, gpu: Gpu, dtype: str) -> Iterator[Line]:
    rows = sources.burst(data, gpu.name, dtype)
    for label, out in ((PAIRS, by_key(rows.n, rows.k)), (LARGEST, largest_tenth(_size(rows)))):
        model, _ = fit_gemm(gpu, dtype, rows[~out])
        predicted, _ = FittedGemm(model, gpu, dtype, burst=True).seconds(*rows[out].sizes)
        yield _line(label, gpu, dtype, rows[out], predicted)


def sustained_lines(data: Path, gpu: Gpu, burst: GemmModel) -> Iterator[Line]:
    """Each model (or pair of n and k, where models have no names) predicted by a fit to the others."""
    rows = SUSTAINED[gpu.name](data, gpu.name)
    of = _groups(rows)
    groups = sorted(set(of))
    folds = [[group] for group in groups] if len(groups) < 10 else [groups[fold::5] for fold in range(5)]
    for fold in folds:
        out = np.isin(of, np.array(fold, object))
        model = fit_sustained(gpu, "bfloat16", burst, rows[~out])
        predicted, _ = FittedGemm(model, gpu, "bfloat16").seconds(*rows[out].sizes, rows[out].layout)
        yield _line(MODELS, gpu, "bfloat16", rows[out], predicted)
    out = largest_tenth(_size(rows))
    model = fit_sustained(gpu, "bfloat16", burst, rows[~out])
    predicted, _ = FittedGemm(model, gpu, "bfloat16").seconds(*rows[out].sizes, rows[out].layout)
    yield _line(f"{LARGEST}, sustained", gpu, "bfloat16", rows[out], predicted)


def timed_lines(gpu: Gpu, dtype: str, rows: GemmRows, *, per_octave: int, bare: bool) -> Iterator[Line]:
    """Of rows fitted as they are, in whose errors the timer's share counts as it was measured."""
    folds = [(SHAPES, by_key(*rows.sizes)), (LARGEST, largest_tenth(_size(rows)))]
    if rows.group is not None and len(set(rows.group)) > 1:
        folds = [(MODELS, rows.group == group) for group in sorted(set(rows.group))] + folds[1:]
    for label, out in folds:
        model, timer = fit_gemm(gpu, dtype, rows[~out], per_octave=per_octave, bare=bare)
        predicted, _ = FittedGemm(model, gpu, dtype, burst=True).seconds(*rows[out].sizes)
        yield _line(label, gpu, dtype, rows[out], predicted + timer)


def scaled_lines(gpu: Gpu, rows: GemmRows, donor: GemmModel) -> Iterator[Line]:
    for group in sorted(set(_groups(rows))):
        out = _groups(rows) == group
        model, timer = fit_scale(gpu, "float32", donor, rows[~out])
        predicted, _ = FittedGemm(model, gpu, "float32").seconds(*rows[out].sizes)
        yield _line(MODELS, gpu, "float32", rows[out], predicted + timer)


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    """A profile for every GPU that has measurements, with the lines of its held-out errors."""
    burst: dict[str, GemmModel] = {}
    sustained: dict[str, GemmModel] = {}
    float32: dict[str, GemmModel] = {}  # the donor's
    names = [*dict.fromkeys([*sources.BURST.values(), *BURST_OF, *sources.VIDUR.values(), *sources.NEUSIGHT.values(), *sources.IN_MODEL.values(), *sources.DEEPBENCH.values()])]  # fmt: skip
    # who lends to others comes first
    names.sort(key=lambda name: (name in SUSTAINED_OF, name in sources.IN_MODEL.values(), name in BURST_OF))
    for name in names:
        if only is not None and name not in only:
            continue
        gpu, lines, used = find_gpu(name), list[Line](), list[ProfileSource]()
        models: dict[str, GemmModel] = {}
        for dtype in sources.BURST_DTYPES.values() if name in sources.BURST.values() else ():
            rows = sources.burst(data, name, dtype)
            if len(rows) == 0:
                continue
            models[dtype], _ = fit_gemm(gpu, dtype, rows)
            used.append(ProfileSource(name=BURST_NOTE, rows=len(rows), note=dtype))
            if evaluate:
                lines += burst_lines(data, gpu, dtype)
        if name in BURST_OF:
            models["bfloat16"] = burst[BURST_OF[name]]
        if "bfloat16" in models:
            burst[name] = models["bfloat16"]
        if name in SUSTAINED:
            rows = SUSTAINED[name](data, name)
            used.append(ProfileSource(name=SUSTAINED_NOTES[SUSTAINED[name].__name__], rows=len(rows)))
            models["bfloat16"] = sustained[name] = fit_sustained(gpu, "bfloat16", models["bfloat16"], rows)
            if evaluate:
                lines += sustained_lines(data, gpu, burst[name])
        elif name in SUSTAINED_OF and SUSTAINED_OF[name] in sustained:
            lender = sustained[SUSTAINED_OF[name]].sustained
            models["bfloat16"] = models["bfloat16"].model_copy(update={"sustained": lender})
            used.append(ProfileSource(name=f"what sustained load costs: as on {SUSTAINED_OF[name]}", rows=0))
        elif name in sources.VIDUR.values():
            rows = sources.vidur(data, name)
            models["bfloat16"], _ = fit_gemm(gpu, "bfloat16", rows, per_octave=1)
            used.append(ProfileSource(name=SUSTAINED_NOTES["vidur"], rows=len(rows)))
            if evaluate:
                lines += timed_lines(gpu, "bfloat16", rows, per_octave=1, bare=True)
        if name in sources.NEUSIGHT.values():
            for op, model in (("linear", "float32"), ("bmm", "float32 batched")):
                rows = sources.neusight(data, name, op)
                models[model], timer = fit_gemm(gpu, "float32", rows, per_octave=1, bare=False)
                used.append(ProfileSource(name=f"NeuSight {op}, TF32 off", rows=len(rows), note=f"{timer * 1e6:.0f} us of timer taken out"))  # fmt: skip
                if evaluate:
                    lines += timed_lines(gpu, "float32", rows, per_octave=1, bare=False)
            if name == FLOAT32_DONOR:
                float32 = {model: models[model] for model in ("float32", "float32 batched")}
        if name in sources.IN_MODEL.values():
            every = sources.in_model(data, name)
            for model, those in (("float32", every.batch == 1), ("float32 batched", every.batch > 1)):
                rows = every[those]
                models[model], timer = fit_scale(gpu, "float32", float32[model], rows)
                used.append(ProfileSource(name=f"NeuSight in-model multiplications, shape of {FLOAT32_DONOR}", rows=len(rows), note=f"{timer * 1e6:.0f} us of timer taken out"))  # fmt: skip
                if evaluate:
                    lines += scaled_lines(gpu, rows, float32[model])
        if name in sources.DEEPBENCH.values():
            for dtype in ("float16", "float32"):
                rows = sources.deepbench(data, name, dtype)
                if dtype in models or len(rows) < 50:
                    continue
                models[dtype], _ = fit_gemm(gpu, dtype, rows, per_octave=1, smoothness=2.0)
                used.append(ProfileSource(name="DeepBench", rows=len(rows), note=dtype))
                if evaluate:
                    lines += timed_lines(gpu, dtype, rows, per_octave=1, bare=True)
        yield (
            Profile(
                family="gemm", gpu=name, sources=used, held_out=summarize(lines),
                models={key: model.model_dump(exclude_none=True) for key, model in models.items()},
            ),
            lines,
        )  # fmt: skip
