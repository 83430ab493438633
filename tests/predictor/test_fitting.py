"""Fits to made-up measurements find the known truth, for held-out rows and for sizes beyond the data, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu
from maya_core.predictor.fitting.gemm_fit import START, GemmRows, fit_gemm, fit_scale, fit_sustained
from maya_core.predictor.fitting.lattice_fit import fit_lattice, fit_surface
from maya_core.predictor.fitting.measurements import read_table
from maya_core.predictor.fitting.splits import by_key, errors, largest_tenth
from maya_core.predictor.gemm_time import FittedGemm
from maya_core.predictor.lattice import Axis, Lattice, Surface, knot_sizes
from maya_core.predictor.profile import SHIPPED, find_profile, read_profile, shipped

pytestmark = pytest.mark.slow

H100 = find_gpu("h100")


def made_up(factor: float = 1.0, noise: float = 0.02, seed: int = 0) -> GemmRows:
    """Products of a GPU with a structure unlike the starting values of the fit, timed with some noise."""
    random = np.random.default_rng(seed)
    truth = START.model_copy(
        update={
            "memory_share": 0.6,
            "floor_us": 4.0,
            "l2_share": 5.0,
            "tile_efficiency": [0.3, 0.4, 0.4, 0.6, 0.8, 0.8, 0.85, 0.85],
        }
    )
    grid = [2.0**p for p in range(5, 14)]
    m, n, k = (size.ravel() for size in np.meshgrid(grid, grid, grid))
    seconds = truth.seconds(H100, "bfloat16", np.ones_like(m), m, n, k) * factor
    return GemmRows(np.ones_like(m), m, n, k, seconds * np.exp(noise * random.standard_normal(len(m))))


def test_a_fit_finds_the_truth_behind_noise_at_shapes_it_did_not_see():
    rows = made_up()
    out = by_key(rows.n, rows.k)
    model, timer = fit_gemm(H100, "bfloat16", rows[~out])
    predicted, _ = FittedGemm(model, H100, "bfloat16").seconds(*rows[out].sizes)
    assert timer == 0
    assert np.median(errors(rows[out].seconds, predicted)) < 3


def test_structure_carries_on_beyond_the_data():
    rows = made_up(noise=0.0)
    large = largest_tenth(rows.m * rows.n * rows.k)
    model, _ = fit_gemm(H100, "bfloat16", rows[~large])
    predicted, _ = FittedGemm(model, H100, "bfloat16").seconds(*rows[large].sizes)
    assert np.percentile(errors(rows[large].seconds, predicted), 90) < 15
    _, far = FittedGemm(model, H100, "bfloat16").seconds(1, 2**20, 2**20, 2**20)
    assert not far.any()


def test_what_a_timer_adds_is_taken_out():
    rows = made_up(noise=0.0)
    late = GemmRows(*rows.sizes, rows.seconds + 40e-6)
    model, timer = fit_gemm(H100, "bfloat16", late, bare=False)
    assert timer == pytest.approx(41.5e-6, rel=0.1)  # its own floor of 4 us stands for 2.5
    predicted, _ = FittedGemm(model, H100, "bfloat16").seconds(*rows.sizes)
    long = rows.seconds > 100e-6
    assert np.median(errors(rows.seconds[long], predicted[long])) < 3


def test_sustained_rows_slow_a_burst_model_by_as_much_as_they_show():
    burst, _ = fit_gemm(H100, "bfloat16", made_up())
    slower = made_up(1.2, seed=1)
    layout = np.zeros(len(slower), int)
    model = fit_sustained(H100, "bfloat16", burst, GemmRows(*slower.sizes, slower.seconds, layout))
    large = slower.m * slower.n * slower.k > 2**33
    sizes = [size[large] for size in slower.sizes]
    before, after = (FittedGemm(model, H100, "bfloat16", burst=b).seconds(*sizes)[0] for b in (True, False))
    assert np.median(after / before) == pytest.approx(1.2, rel=0.02)


def test_a_relatives_model_is_scaled_to_a_few_rows():
    donor, _ = fit_gemm(H100, "bfloat16", made_up())
    few = made_up(1.7, seed=2)[np.arange(0, 729, 40)]
    model, timer = fit_scale(H100, "bfloat16", donor, few)
    predicted = FittedGemm(model, H100, "bfloat16").seconds(*few.sizes)[0] + timer
    assert np.median(errors(few.seconds, predicted)) < 5


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1, 1), min_size=12, max_size=12), st.floats(0.0, 1.0))
def test_whatever_the_data_say_doubling_is_never_faster(residuals, slope):
    """Structure rises by `slope` in each octave, while the data may fall."""
    axes = [Axis(0, 11)]
    sizes = [2.0 ** np.arange(12)]

    def structure(size: np.ndarray) -> np.ndarray:
        return size**slope

    lattice = fit_lattice(axes, sizes, np.array(residuals), structure=structure)
    at = 2.0 ** np.linspace(0, 14, 200)
    before, after = (structure(x) * lattice(x)[0] for x in (at, 2 * at))
    assert (after >= before * (1 - 1e-9)).all()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-2, 2), min_size=25, max_size=25))
def test_a_surface_never_falls(residuals):
    axes = [Axis(3, 7), Axis(2, 6)]
    sizes = knot_sizes(axes)
    correction = fit_surface(axes, sizes, np.array(residuals), structure=lambda a, b: a * b)
    surface = Surface.of(sizes[0] * sizes[1], correction)
    a, b = (size.ravel() for size in np.meshgrid(2 ** np.linspace(1, 9, 40), 2 ** np.linspace(1, 9, 40)))
    for more in ((1.3 * a, b), (a, 1.3 * b)):
        assert (surface(*more) >= surface(a, b) * (1 - 1e-9)).all()


def test_a_lattice_keeps_its_values_in_a_profile():
    values = np.linspace(-1, 1, 15).reshape(5, 3)
    lattice = Lattice((Axis(0, 4), Axis(2, 3, 2)), values, values > 0)
    back = Lattice.load(json.loads(lattice.store().model_dump_json()))
    assert back.axes == lattice.axes
    assert np.allclose(back.values, values, atol=5e-4)
    assert (back.support == lattice.support).all()


def test_held_out_keys_leave_whole():
    n, k = (np.repeat(np.arange(20.0), 30), np.tile(np.arange(30.0), 20))
    out = by_key(np.concatenate([n, n]), np.concatenate([k, k]))
    assert (out[:600] == out[600:]).all()
    assert 0.1 < out.mean() < 0.3


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(MayaError, match=r"nothing\.csv"):
        read_table(tmp_path, "ops/nothing.csv")


def test_tables_read_texts_numbers_and_gaps(tmp_path: Path):
    table = pa.table(
        {"name": pa.array(["a", "b", "a"]).dictionary_encode(), "n": [1, None, 3], "yes": [True, False, True]}
    )
    parquet.write_table(table, tmp_path / "some.parquet", row_group_size=1)
    found = read_table(tmp_path, "some.parquet")
    assert list(found["name"]) == ["a", "b", "a"]
    assert found["n"][0] == 1 and np.isnan(found["n"][1])
    assert list(found["yes"]) == [1, 0, 1]


def test_the_command_says_which_file_is_missing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "maya_core.predictor.fitting", str(tmp_path), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "aiconfigurator_gemm.parquet" in done.stderr.replace("\n", "")


@pytest.mark.parametrize("family", ["gemm", "attention", "convolution", "recurrent", "memory", "collectives"])
def test_shipped_profiles_are_whole_small_and_say_where_they_come_from(family: str):
    profiles = shipped(family)
    assert profiles
    for name, profile in profiles.items():
        assert profile.family == family and profile.gpu == name
        assert profile.sources and all(source.name for source in profile.sources)
        assert profile.models
    total = sum(path.stat().st_size for path in SHIPPED.rglob("*.json"))
    assert total < 5e6


def test_every_profile_with_rows_to_spare_states_its_error_on_unseen_ones():
    for name in ("a100", "h100", "b200"):
        splits = {each.split: each for each in shipped("gemm")[name].held_out["bfloat16"]}
        assert splits["unseen (n, k)"].rows > 4000
        assert splits["unseen (n, k)"].median_pct < 5
        assert splits["largest tenth"].median_pct < 10


def test_a_gpu_borrows_from_its_nearest_relative():
    assert find_profile("gemm", find_gpu("h100-nvl"), "bfloat16").name == "gemm/h100"
    assert find_profile("gemm", find_gpu("rtx-4090"), "bfloat16").name == "gemm/l40s"
    assert find_profile("gemm", find_gpu("h100"), "bfloat16").own
    assert find_profile("gemm", find_gpu("h100"), "no such model") is None


def test_a_broken_profile_is_named(tmp_path: Path):
    broken = tmp_path / "h100.json"
    broken.write_text('{"format": "maya-profile", "family": "gemm"}')
    with pytest.raises(MayaError, match=r"h100\.json"):
        read_profile(broken)
