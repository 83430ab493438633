"""Calibrations: factors from measurements, how predictions follow them, and the files that store them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.cluster import cluster
from maya_core.ops.kernel import Gemm, Kernel, Streaming
from maya_core.predictor import calibration_factors as factors
from maya_core.predictor import collective_time
from maya_core.predictor.calibration import (
    STEEPEST,
    Calibration,
    Collective,
    Factor,
    Measured,
    apply,
    apply_collectives,
    calibrations,
    load_calibration,
    read_calibration,
    remove_calibration,
    write_calibration,
)
from maya_core.predictor.durations import Durations, Provenance
from maya_core.predictor.placement import place

GB_PER_S = 1e12


def bytes_kernel(nbytes: float, model: str = "elementwise") -> Kernel:
    return Streaming(model, nbytes / 2, nbytes / 2, nbytes / 8, 0)


def predict(_: str, kernels: Sequence[Kernel]) -> np.ndarray:
    """A model of a GPU that has nothing but memory."""
    return np.array([2e-6 + sum(kernel.sizes[:2]) / GB_PER_S for kernel in kernels])


def measured(kernel: Kernel, seconds: float) -> Measured:
    return Measured(family=kernel.family, model=kernel.model, sizes=kernel.sizes, seconds=seconds, samples=10)


def rows(ratio: float, count: int = 20, noise: float = 0.0, slope: float = 0.0) -> list[Measured]:
    random = np.random.default_rng(0)
    kernels = [bytes_kernel(2.0 ** (16 + place * 12 / count)) for place in range(count)]
    base = predict("h100", kernels)
    true = base * ratio * (base / base[0]) ** slope * np.exp(noise * random.standard_normal(count))
    return [measured(kernel, seconds) for kernel, seconds in zip(kernels, true, strict=True)]


def calibration(measurements: list[Measured], name: str = "mine", gpu: str = "h100", **more: object) -> Calibration:
    return factors.make(name, gpu, [], measurements, [], predict=predict, **more)  # type: ignore[arg-type]


def applied(found: Calibration, kernels: list[Kernel]) -> Durations:
    base = Durations.of(predict("h100", kernels), Provenance.EXTRAPOLATED, "memory/h100")
    return apply(found, kernels, base)


# ---- factors ----
def test_a_gpu_that_is_slower_by_a_third_is_found_out() -> None:
    found = calibration(rows(1.33, noise=0.05))
    [factor] = found.factors
    assert (factor.short, factor.long) == (pytest.approx(1.33, rel=0.05), pytest.approx(1.33, rel=0.05))
    assert factor.rows == 16  # every fifth shape is skipped
    [check] = found.checks
    assert check.rows == 4
    assert check.before_pct == pytest.approx(25, abs=5) and check.after_pct < 6


def test_short_and_long_kernels_may_differ() -> None:
    [factor] = calibration(rows(1.6, count=30, noise=0.02, slope=-0.1)).factors
    assert factor.short == pytest.approx(1.6, rel=0.05)
    assert factor.slope == pytest.approx(-0.1, abs=0.02)


@pytest.mark.parametrize(
    ("measurements", "reason"),
    [
        (rows(1.5, count=6), "too few shapes"),
        (rows(1.5, count=40, noise=1.0), "shapes disagree"),
        (rows(1.0, count=40, noise=0.1), "it would not help"),
        (rows(30.0), "cannot be the same work"),
    ],
)
def test_a_factor_needs_support(measurements: list[Measured], reason: str) -> None:
    found = calibration(measurements)
    assert found.factors == []
    assert reason in found.unused[0].reason
    for check in found.checks:  # what is skipped says that nothing changed
        assert check.before_pct == check.after_pct


def test_what_is_skipped_has_no_part_in_the_factor() -> None:
    clean = rows(1.2)
    order = sorted(range(len(clean)), key=lambda each: clean[each].seconds)
    spoiled = [row.model_copy() for row in clean]
    for each in order[4::5]:
        spoiled[each].seconds *= 3
    one, other = calibration(clean), calibration(spoiled)
    assert one.factors == other.factors
    assert other.checks[0].after_pct > 60 > one.checks[0].after_pct


# ---- predictions ----
def test_measured_kernels_take_what_was_measured_and_others_the_factor() -> None:
    found = calibration(rows(1.33))
    known, between, beyond = found.measured[7].kernel, bytes_kernel(2.0**20.5), bytes_kernel(2.0**34)
    other = bytes_kernel(2.0**20, model="softmax")
    result = applied(found, [known, between, beyond, other])
    base = predict("h100", [known, between, beyond, other])
    np.testing.assert_allclose(result.seconds, base * [1.33, 1.33, 1.33, 1], rtol=1e-3)
    assert result.provenance.tolist() == [
        Provenance.MEASURED,
        Provenance.INTERPOLATED,
        Provenance.EXTRAPOLATED,
        Provenance.EXTRAPOLATED,
    ]
    assert [result.profiles[each] for each in result.profile] == ["calibration/mine"] * 3 + ["memory/h100"]


@settings(max_examples=200, deadline=None)
@example(short=1.25, slope=-0.5, low=0.0009819151138600914, span=1.0000000000000002, one=1.0, more=1.0)
@given(
    short=st.floats(0.1, 10), slope=st.floats(-STEEPEST, STEEPEST), low=st.floats(1e-6, 1e-3), span=st.floats(1, 1e4),
    one=st.floats(1e-7, 10), more=st.floats(1, 1e3),
)  # fmt: skip
def test_longer_stays_longer(short: float, slope: float, low: float, span: float, one: float, more: float) -> None:
    factor = Factor(
        family="memory", model="elementwise", rows=9, short=short, long=short * span**slope, short_s=low,
        long_s=low * span, spread=0, smallest=(0,), largest=(1,),
    )  # fmt: skip
    first, second = np.array([one]), np.array([one * more])
    assert second * factor.at(second) >= first * factor.at(first) * (1 - 1e-9)


def test_a_factor_that_would_turn_order_round_is_refused() -> None:
    with pytest.raises(ValueError, match="longer kernels would become shorter"):
        Factor(
            family="memory", model="x", rows=9, short=4, long=0.5, short_s=1e-6, long_s=4e-6, spread=0, smallest=(0,),
            largest=(1,),
        )  # fmt: skip


def test_maya_predicts_with_it() -> None:
    from maya_core.predictor.pricing import Predictor

    gpu = find_gpu("h100")
    kernels = [Gemm("bfloat16", 1, 512 * place, 4096, 4096, 0) for place in range(1, 26)]
    base = Predictor(gpu).kernels(kernels).seconds
    taken = [measured(kernel, seconds * 1.2) for kernel, seconds in zip(kernels[::2], base[::2], strict=True)]
    found = factors.make("mine", "h100", [], taken, [])
    result = Predictor(gpu, calibration=found).kernels(kernels)
    np.testing.assert_allclose(result.seconds, base * 1.2, rtol=1e-3)
    assert set(result.provenance[::2]) == {Provenance.MEASURED}


# ---- collectives ----
def test_collectives_placed_alike_follow_the_measurements() -> None:
    machine = cluster("h100", 8, nodes=2)
    sizes = [2.0**each for each in range(16, 29, 2)]
    shape = {"ranks_per_node": 8, "nodes": 2, "network": "infiniband-ndr", "samples": 20}
    taken = [Collective(op="all_reduce", bytes=size, seconds=50e-6 + size / 1e11, **shape) for size in sizes]  # type: ignore[arg-type]
    found = factors.make("mine", "h100", [], [], taken, predict=predict)
    asked = [2.0**each for each in np.arange(10, 33, 0.5)]

    def durations(op: str, ranks: range) -> tuple[Durations, Durations]:
        group = place(ranks, machine)
        base = collective_time.predict(op, asked, group, machine)
        return base, apply_collectives(found, op, asked, group, machine, base)

    _, result = durations("all_reduce", range(16))
    assert (np.diff(result.seconds) >= 0).all()
    exact = asked.index(2.0**20)
    assert result.seconds[exact] == pytest.approx(50e-6 + 2**20 / 1e11)
    assert result.provenance[exact] == Provenance.MEASURED
    assert result.provenance[exact + 1] == Provenance.INTERPOLATED
    assert result.profiles[result.profile[exact]] == "calibration/mine"
    for op, ranks in (("all_gather", range(16)), ("all_reduce", range(8))):  # not measured, not placed alike
        base, result = durations(op, ranks)
        assert result is base


# ---- files ----
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAYA_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def at(day: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, day, tzinfo=datetime.timezone.utc)


def test_the_newest_of_that_very_gpu_is_used(folder: Path) -> None:
    assert load_calibration("h100") is None
    for name, gpu, day in (("old", "h100", 1), ("new", "h100", 3), ("other", "a100", 5)):
        write_calibration(calibration(rows(1.2), name, gpu, created=at(day)))
    (folder / "unrelated.json").write_text('{"format": "maya-profile"}')
    found = load_calibration(find_gpu("h100"))
    assert found is not None and found.name == "new"
    assert [each.name for each in calibrations("h100")] == ["new", "old"]
    assert load_calibration("h200") is None  # another GPU's is never taken


def test_nothing_is_written_over_unasked(folder: Path) -> None:
    path = write_calibration(calibration(rows(1.2)))
    before = path.read_text()
    with pytest.raises(MayaError, match="there is a calibration 'mine' already") as error:
        write_calibration(calibration(rows(1.5)))
    assert "--replace" in error.value.advice and path.read_text() == before
    write_calibration(calibration(rows(1.5)), replace=True)
    assert path.read_text() != before
    assert read_calibration(path) == calibration(rows(1.5), created=read_calibration(path).created)  # type: ignore[union-attr]


def test_added_measurements_join_the_older(folder: Path) -> None:
    older = calibration(rows(1.2))
    newer = [measured(older.measured[0].kernel, 1.0), measured(bytes_kernel(12345678.0), 20e-6)]
    joined = factors.merge(older, [], newer, [], predict=predict)
    assert len(joined.measured) == len(older.measured) + 1
    assert joined.seconds_of[older.measured[0].kernel] == 1.0


def test_factors_follow_changed_predictions(folder: Path) -> None:
    write_calibration(calibration(rows(1.2)).model_copy(update={"shipped": "of another version"}))
    found = load_calibration("h100")
    assert found is not None and found.shipped != "of another version"
    assert found.measured == calibration(rows(1.2)).measured


def test_a_broken_file_is_named(folder: Path) -> None:
    path = write_calibration(calibration(rows(1.2)))
    path.write_text(path.read_text().replace('"version":1', '"version":9').replace('"version": 1', '"version": 9'))
    with pytest.raises(MayaError, match=r"mine\.json is not a calibration that this version of Maya can read") as error:
        load_calibration("h100")
    assert "maya calibrate remove mine" in error.value.advice
    remove_calibration("mine")
    assert load_calibration("h100") is None
    with pytest.raises(MayaError, match="no calibration 'mine'"):
        remove_calibration("mine")
    with pytest.raises(MayaError, match="cannot be the name"):
        remove_calibration("../mine")
