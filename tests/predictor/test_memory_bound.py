"""Durations of memory-bound kernels and copies: measured figures, and properties that hold at any size."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maya_core.hardware.catalog import find_gpu, gpus
from maya_core.predictor import copy_time, streaming_time
from maya_core.predictor.durations import Provenance
from maya_core.predictor.profile import SHIPPED, shipped

MIB = 2**20
PATTERNS = sorted(
    {
        *streaming_time.RELATIVES,
        *streaming_time.MEASURED,
        *(model for profile in shipped("memory").values() for model in profile.models),
    }
)
any_gpu = st.sampled_from(sorted(gpus()))
any_size = st.one_of(st.sampled_from([0, 1, 2**31, 2**45]), st.integers(0, 2**45))


def seconds(gpu: str, model: str, *sizes: float) -> float:
    return float(streaming_time.predict(find_gpu(gpu), model, np.array([sizes])).seconds[0])


# ---- figures ----
@pytest.mark.parametrize(
    ("gpu", "nbytes", "low", "high"),
    [
        ("a100", 1024 * MIB, 0.80, 0.88),
        ("a40", 1024 * MIB, 0.79, 0.88),
        ("h100", 4096 * MIB, 0.86, 0.95),
        ("t4", 512 * MIB, 0.70, 0.80),
    ],
)
def test_large_adds_reach_their_share_of_the_data_sheet(gpu: str, nbytes: int, low: float, high: float) -> None:
    took = seconds(gpu, "elementwise", nbytes * 2 / 3, nbytes / 3, nbytes / 6, 0)
    assert low < nbytes / took / find_gpu(gpu).memory_bandwidth_bytes_per_s < high


def test_a_kernel_of_a_few_bytes_takes_its_floor() -> None:
    for gpu in ("a100", "h100", "t4", "b200"):
        assert 0.8e-6 < seconds(gpu, "elementwise", 8, 4, 1, 0) < 3e-6


def test_what_fits_in_l2_is_faster_than_dram() -> None:
    a100 = find_gpu("a100")
    nbytes = 20 * MIB
    assert (
        seconds("a100", "elementwise", nbytes * 2 / 3, nbytes / 3, nbytes / 6, 0)
        < nbytes / a100.memory_bandwidth_bytes_per_s * 1.05
    )


def test_rows_that_no_cache_holds_are_read_again() -> None:
    """Cross entropy over 128 Ki words on A100: four times the logits move, not two."""
    rows, words = 16384, 131072
    took = seconds("a100", "softmax", 4 * rows * words, 4 * rows * words, rows * words, words)
    assert took == pytest.approx(20.2e-3, rel=0.05)


def test_layer_norm_is_bound_by_the_sms_of_fast_memory() -> None:
    """8192 rows of 4096 halves on B200 were measured at 63 us: a quarter of what DRAM allows."""
    count = 8192 * 4096
    assert seconds("b200", "norm", 2 * count, 2 * count, count, 4096) == pytest.approx(63e-6, rel=0.15)


def test_a_few_long_rows_leave_the_gpu_idle() -> None:
    count = 2**22
    few = seconds("a100", "norm", 4 * count, 4 * count, count, count // 4)
    many = seconds("a100", "norm", 4 * count, 4 * count, count, 1024)
    assert few > 2 * many


def test_a_gpu_without_measurements_borrows_shares() -> None:
    h200, h100 = (
        streaming_time.predict(find_gpu(name), "elementwise", np.array([[2e9, 1e9, 5e8, 0]]))
        for name in ("h200", "h100")
    )
    assert h200.seconds[0] == pytest.approx(h100.seconds[0] * 3350 / 4800, rel=0.03)
    assert h200.provenance[0] == Provenance.EXTRAPOLATED
    assert h100.provenance[0] == Provenance.INTERPOLATED
    assert h200.profiles == ("memory/h100",)


def test_what_is_no_matter_of_bytes_is_a_bound() -> None:
    assert (
        streaming_time.predict(find_gpu("h100"), "other", np.array([[1e6, 1e6, 1e6, 0]])).provenance[0]
        == Provenance.BOUND
    )


def test_copies_go_by_their_link() -> None:
    gpu = find_gpu("h100")
    nbytes = np.array([2**30])
    pinned, pageable = (copy_time.predict(gpu, "h2d", nbytes, pinned=each).seconds[0] for each in (True, False))
    assert 0.7 < 2**30 / pinned / gpu.host_link_bytes_per_s < 0.85
    assert pageable > 1.5 * pinned
    assert copy_time.predict(gpu, "d2d", nbytes).seconds[0] < pinned / 20


# ---- properties ----
@settings(max_examples=300, deadline=None)
@given(any_gpu, st.sampled_from(PATTERNS), any_size, any_size, any_size)
def test_time_is_finite_and_more_bytes_never_cost_less(
    gpu: str, model: str, read: int, written: int, elements: int
) -> None:
    took = seconds(gpu, model, read, written, elements, 0)
    assert math.isfinite(took)
    assert took > 0
    for more in ((2 * read, written, elements), (read, 2 * written, elements), (read, written, 2 * elements)):
        assert seconds(gpu, model, *more, 0) >= took * (1 - 1e-9)


@settings(max_examples=300, deadline=None)
@given(any_gpu, st.sampled_from(PATTERNS), st.integers(1, 2**24), st.integers(1, 2**20), st.sampled_from([1, 2, 4, 8]))
def test_more_or_longer_rows_never_cost_less(gpu: str, model: str, rows: int, row: int, item: int) -> None:
    def of(rows: int, row: int) -> float:
        return seconds(gpu, model, item * rows * row, item * rows * row, rows * row, row)

    took = of(rows, row)
    assert math.isfinite(took)
    assert of(2 * rows, row) >= took * (1 - 1e-9)
    assert of(rows, 2 * row) >= took * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(any_gpu, st.sampled_from(["h2d", "d2h", "d2d"]), any_size)
def test_more_to_copy_takes_longer(gpu: str, model: str, nbytes: int) -> None:
    once, twice = copy_time.predict(find_gpu(gpu), model, np.array([nbytes, 2 * nbytes])).seconds
    assert 0 < once <= twice < math.inf


# ---- profiles ----
def test_profiles_are_small_and_say_how_far_off_they_are() -> None:
    files = list((SHIPPED / "memory").glob("*.json"))
    assert sum(Path(file).stat().st_size for file in files) < 100_000
    for name, profile in shipped("memory").items():
        assert name in gpus()
        assert profile.sources
    for gpu in ("a100", "a40", "h100", "t4", "v100-pcie", "a100-pcie-40gb"):
        splits = {each.split: each for each in shipped("memory")[gpu].held_out["elementwise"]}
        assert splits["unseen shapes"].median_pct < 8
        assert splits["unseen shapes"].p90_pct < 25
        assert splits["largest tenth"].median_pct < 10
        assert splits["largest tenth"].p90_pct < 30


def test_a_fit_finds_what_rows_were_made_from() -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("pyarrow")
    from maya_core.predictor.fitting.streaming_fit import Rows, fit_pattern

    gpu = find_gpu("a100")
    nbytes = 2.0 ** np.arange(16, 32, 0.1)
    sizes = np.stack([nbytes / 2, nbytes / 2, nbytes / 8, 0 * nbytes], axis=1)
    rate = gpu.memory_bandwidth_bytes_per_s * np.where(nbytes < gpu.l2_bytes / 2, 1.6, 0.8)
    made = 2e-6 + nbytes / rate
    texts = np.array([f"{each:g}" for each in nbytes], object)
    fitted = fit_pattern(gpu, "elementwise", Rows(sizes, made, texts, texts, texts))
    predicted, backed = streaming_time.evaluate(gpu, "elementwise", fitted, sizes)
    assert fitted.share == pytest.approx(0.8, rel=0.02)
    away_from_the_step = np.abs(np.log2(nbytes / (gpu.l2_bytes / 2))) > 1
    assert np.abs(predicted / made - 1)[away_from_the_step].max() < 0.1
    assert backed[nbytes > 2**24].all()


def test_a_pattern_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="no pattern 'elementwize'; there are"):
        streaming_time.predict(find_gpu("h100"), "elementwize", np.ones((1, 4)))
