"""Selects the measurements for the GEMM profile of each GPU, fits it, and computes its errors on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
# The GPU whose burst tables are used if a GPU has only sustained rows, and whose sustained rows if it has only bursts.
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
    """Errors on each model (or pair of n and k, if models have no names), predicted by a fit to the others."""
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
    """Errors on rows that include the timer; its share is added to predictions."""
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


@dataclass
class _GpuFit:
    """What has been fitted for one GPU so far."""

    gpu: Gpu
    models: dict[str, GemmModel] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)  # of held-out errors
    used: list[ProfileSource] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.gpu.name

    def profile(self) -> Profile:
        return Profile(
            family="gemm",
            gpu=self.name,
            sources=self.used,
            held_out=summarize(self.lines),
            models={key: model.model_dump(exclude_none=True) for key, model in self.models.items()},
        )


@dataclass
class _Fits:
    """Fits GPU after GPU. A GPU without measurements of some kind borrows the fit of one that was fitted before it."""

    data: Path
    evaluate: bool
    burst: dict[str, GemmModel] = field(default_factory=dict)
    sustained: dict[str, GemmModel] = field(default_factory=dict)
    float32: dict[str, GemmModel] = field(default_factory=dict)  # of FLOAT32_DONOR

    def of(self, gpu: Gpu) -> _GpuFit:
        fitted = _GpuFit(gpu)
        self._fit_bursts(fitted)
        self._fit_sustained(fitted)
        if gpu.name in sources.NEUSIGHT.values():
            self._fit_float32(fitted)
        if gpu.name in sources.IN_MODEL.values():
            self._scale_float32(fitted)
        if gpu.name in sources.DEEPBENCH.values():
            self._fit_deepbench(fitted)
        return fitted

    def _fit_bursts(self, fitted: _GpuFit) -> None:
        name = fitted.name
        for dtype in sources.BURST_DTYPES.values() if name in sources.BURST.values() else ():
            rows = sources.burst(self.data, name, dtype)
            if len(rows) == 0:
                continue
            fitted.models[dtype], _ = fit_gemm(fitted.gpu, dtype, rows)
            fitted.used.append(ProfileSource(name=BURST_NOTE, rows=len(rows), note=dtype))
            if self.evaluate:
                fitted.lines += burst_lines(self.data, fitted.gpu, dtype)
        if name in BURST_OF:
            fitted.models["bfloat16"] = self.burst[BURST_OF[name]]
        if "bfloat16" in fitted.models:
            self.burst[name] = fitted.models["bfloat16"]

    def _fit_sustained(self, fitted: _GpuFit) -> None:
        name, gpu, models = fitted.name, fitted.gpu, fitted.models
        if name in SUSTAINED:
            rows = SUSTAINED[name](self.data, name)
            fitted.used.append(ProfileSource(name=SUSTAINED_NOTES[SUSTAINED[name].__name__], rows=len(rows)))
            models["bfloat16"] = self.sustained[name] = fit_sustained(gpu, "bfloat16", models["bfloat16"], rows)
            if self.evaluate:
                fitted.lines += sustained_lines(self.data, gpu, self.burst[name])
        elif name in SUSTAINED_OF and SUSTAINED_OF[name] in self.sustained:
            lender = self.sustained[SUSTAINED_OF[name]].sustained
            models["bfloat16"] = models["bfloat16"].model_copy(update={"sustained": lender})
            fitted.used.append(ProfileSource(name=f"what sustained load costs: as on {SUSTAINED_OF[name]}", rows=0))
        elif name in sources.VIDUR.values():
            rows = sources.vidur(self.data, name)
            models["bfloat16"], _ = fit_gemm(gpu, "bfloat16", rows, per_octave=1)
            fitted.used.append(ProfileSource(name=SUSTAINED_NOTES["vidur"], rows=len(rows)))
            if self.evaluate:
                fitted.lines += timed_lines(gpu, "bfloat16", rows, per_octave=1, bare=True)

    def _fit_float32(self, fitted: _GpuFit) -> None:
        for op, model in (("linear", "float32"), ("bmm", "float32 batched")):
            rows = sources.neusight(self.data, fitted.name, op)
            fitted.models[model], timer = fit_gemm(fitted.gpu, "float32", rows, per_octave=1, bare=False)
            fitted.used.append(_timed_source(f"NeuSight {op}, TF32 off", rows, timer))
            if self.evaluate:
                fitted.lines += timed_lines(fitted.gpu, "float32", rows, per_octave=1, bare=False)
        if fitted.name == FLOAT32_DONOR:
            self.float32 = {model: fitted.models[model] for model in ("float32", "float32 batched")}

    def _scale_float32(self, fitted: _GpuFit) -> None:
        every = sources.in_model(self.data, fitted.name)
        for model, those in (("float32", every.batch == 1), ("float32 batched", every.batch > 1)):
            rows = every[those]
            fitted.models[model], timer = fit_scale(fitted.gpu, "float32", self.float32[model], rows)
            source = f"NeuSight in-model multiplications, shape of {FLOAT32_DONOR}"
            fitted.used.append(_timed_source(source, rows, timer))
            if self.evaluate:
                fitted.lines += scaled_lines(fitted.gpu, rows, self.float32[model])

    def _fit_deepbench(self, fitted: _GpuFit) -> None:
        for dtype in ("float16", "float32"):
            rows = sources.deepbench(self.data, fitted.name, dtype)
            if dtype in fitted.models or len(rows) < 50:
                continue
            fitted.models[dtype], _ = fit_gemm(fitted.gpu, dtype, rows, per_octave=1, smoothness=2.0)
            fitted.used.append(ProfileSource(name="DeepBench", rows=len(rows), note=dtype))
            if self.evaluate:
                fitted.lines += timed_lines(fitted.gpu, dtype, rows, per_octave=1, bare=True)


def _timed_source(name: str, rows: GemmRows, timer: float) -> ProfileSource:
    return ProfileSource(name=name, rows=len(rows), note=f"{timer * 1e6:.0f} us of timer taken out")


def fit(data: Path, *, evaluate: bool = True, only: set[str] | None = None) -> Iterator[tuple[Profile, list[Line]]]:
    """Yields a profile for every GPU with measurements, with its held-out errors."""
    measured = (sources.BURST, sources.VIDUR, sources.NEUSIGHT, sources.IN_MODEL, sources.DEEPBENCH)
    names = [*dict.fromkeys([*measured[0].values(), *BURST_OF, *(gpu for one in measured[1:] for gpu in one.values())])]
    # A GPU whose fit others borrow comes before them.
    names.sort(key=lambda name: (name in SUSTAINED_OF, name in sources.IN_MODEL.values(), name in BURST_OF))
    fits = _Fits(data, evaluate)
    for name in names:
        if only is None or name in only:
            fitted = fits.of(find_gpu(name))
            yield fitted.profile(), fitted.lines
