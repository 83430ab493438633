"""Predictions of every family are positive and finite, and larger work is never faster, whatever the coefficients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maya_core.hardware.catalog import find_gpu, gpus
from maya_core.ops.kernel import Attention, Convolution, Copy, Gemm, GroupedGemm, Kernel, Recurrent, Streaming
from maya_core.predictor.attention_time import MODELS
from maya_core.predictor.durations import Provenance
from maya_core.predictor.pricing import Predictor

pytestmark = pytest.mark.slow

GPUS = sorted(gpus())
DTYPES = ("bfloat16", "float16", "float32", "float8", "float64", "int8")
SIZES = st.one_of(
    st.integers(1, 300), st.sampled_from([2**p + d for p in range(0, 21) for d in (-1, 0, 1) if 2**p + d > 0])
)
gpu_names = st.sampled_from(GPUS)
fixed = settings(max_examples=80, deadline=None, derandomize=True)


@functools.cache
def predictor(gpu: str) -> Predictor:
    return Predictor(find_gpu(gpu))


def seconds(gpu: str, *kernels: Kernel) -> np.ndarray:
    return predictor(gpu).kernels(kernels).seconds


def doubled(kernel: Kernel, *places: int) -> Kernel:
    return kernel.of(kernel.model, tuple(2 * s if i in places else s for i, s in enumerate(kernel.sizes)))


@fixed
@given(gpu_names, st.sampled_from(DTYPES), SIZES, SIZES, SIZES, SIZES, st.integers(0, 3), st.integers(0, 3))
def test_a_product_is_not_faster_for_a_dimension_doubled(gpu, dtype, batch, m, n, k, layout, place):
    batch = min(batch, 4096)
    once = Gemm(dtype, batch, m, n, k, layout)
    # Single and batched products use different kernels, so going from one product to two does not double the work of one kernel.
    if place == 0 and batch == 1:
        return
    before, after = seconds(gpu, once, doubled(once, place))
    assert 0 < before <= after


@fixed
@given(
    gpu_names, st.sampled_from(sorted(MODELS)), st.integers(1, 64), st.integers(1, 64), SIZES,
    st.sampled_from([32, 64, 80, 96, 128, 192, 256]), st.booleans(), st.sampled_from(["batch", "heads", "length", "head"]),
)  # fmt: skip
def test_attention_is_not_faster_for_a_dimension_doubled(gpu, model, batch, heads, length, head, causal, what):
    length = min(length, 2**17)
    once = Attention.of(model, (batch, heads, heads, length, length, head, head, float(causal), 0, 2))
    places = {"batch": (0,), "heads": (1, 2), "length": (3, 4), "head": (5, 6)}[what]
    before, after = seconds(gpu, once, doubled(once, *places))
    assert 0 < before <= after * (1 + 1e-12)


@fixed
@given(gpu_names, SIZES, st.sampled_from([64, 128, 1024]))
def test_a_window_does_not_make_attention_much_slower(gpu, length, window):
    """Kernels with and without a window were measured separately, so their agreement checks both."""
    length = min(length, 2**15)
    sizes = (4, 16, 16, length, length, 128, 128, 1.0)
    whole, part = (seconds(gpu, Attention("cudnn", "forward", *sizes, w, 2))[0] for w in (0, window))
    assert part <= 1.6 * whole


@fixed
@given(
    gpu_names, st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 2), st.integers(1, 256),
    st.sampled_from([3, 16, 64, 96, 512]), st.sampled_from([8, 64, 256]), st.integers(4, 224), st.sampled_from([1, 3, 7]),
)  # fmt: skip
def test_a_convolution_is_not_faster_for_more_images(gpu, dtype, direction, batch, c_in, c_out, edge, filters):
    once = Convolution(dtype, direction, batch, c_in, c_out, 1, edge**2, edge**2, filters**2, 0, 1)
    before, after = seconds(gpu, once, doubled(once, 1))
    assert 0 < before <= after


@fixed
@given(
    gpu_names,
    st.sampled_from(["float32", "float16"]),
    st.integers(0, 1),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 200),
    SIZES,
    st.integers(1, 7),
)
def test_a_recurrent_layer_is_not_faster_for_a_size_doubled(gpu, dtype, backward, gates, steps, hidden, place):
    hidden = min(hidden, 8192)
    once = Recurrent(dtype, backward, gates, 1, 1, steps, 16, hidden, hidden, 4)
    before, after = seconds(gpu, once, doubled(once, max(place, 2) if place != 3 else 4))
    assert 0 < before <= after


ABSURD = (0, 1, 7, 2**31)


@pytest.mark.parametrize("gpu", ["h100", "t4", "rtx-4090", "b300", "v100-16gb"])
def test_absurd_shapes_have_finite_durations(gpu):
    kernels = [
        Gemm(dtype, batch, m, n, k, 0)
        for dtype in DTYPES for batch in (0, 1, 2**20) for m in ABSURD for n in ABSURD for k in ABSURD
    ]  # fmt: skip
    kernels += [
        Attention.of(model, (batch, heads, 1, length, length, head, head, 1, 0, 2))
        for model in MODELS for batch in (0, 1) for heads in ABSURD for length in ABSURD for head in (0, 1, 512)
    ]  # fmt: skip
    kernels += [
        Convolution("float32", direction, batch, c, c, 1, pixels, pixels, 9, 0, 1)
        for direction in range(3) for batch in ABSURD for c in ABSURD for pixels in ABSURD
    ]  # fmt: skip
    kernels += [Recurrent("float32", 0, 4, 1, 1, steps, 1, hidden, hidden, 4) for steps in ABSURD for hidden in ABSURD]  # fmt: skip
    kernels += [GroupedGemm("bfloat16", groups, m, 64, 64, 0) for groups in ABSURD for m in ABSURD]
    kernels += [Streaming("elementwise", b, b, b / 4, 0) for b in (*ABSURD, 2**45)]
    kernels += [Copy(kind, b) for kind in ("h2d", "d2h", "d2d") for b in (*ABSURD, 2**45)]
    found = Predictor(find_gpu(gpu)).kernels(kernels)
    assert np.isfinite(found.seconds).all() and (found.seconds >= 0).all()


def test_no_work_takes_no_time():
    empty = [
        Gemm("bfloat16", 1, 0, 64, 64, 0),
        Attention("flash", "forward", 0, 8, 8, 64, 64, 64, 64, 1, 0, 2),
    ]
    assert (seconds("h100", *empty) == 0).all()


@pytest.mark.parametrize(
    ("gpu", "tflops"),  # from what large products reach under load to the best that sweeps over shapes have found
    [("a100", (220, 271)), ("h100", (640, 795)), ("b200", (1000, 1745))],
)
def test_large_products_run_at_the_rate_that_is_known_of_the_gpu(gpu, tflops):
    [time] = seconds(gpu, Gemm("bfloat16", 1, 8192, 8192, 8192, 0))
    assert tflops[0] < 2 * 8192**3 / time / 1e12 < tflops[1]


def test_sustained_load_is_slower_than_a_burst():
    kernel = Gemm("bfloat16", 1, 8192, 8192, 8192, 0)
    h100 = find_gpu("h100")
    sustained, burst = (Predictor(h100, burst=b).kernels([kernel]).seconds[0] for b in (False, True))
    assert 1.02 < sustained / burst < 1.4


def test_a_power_limit_slows_products_and_not_copies():
    h100 = find_gpu("h100")
    capped = h100.model_copy(update={"power_limit_w": 350.0})
    kernels = [
        Gemm("bfloat16", 1, 8192, 8192, 8192, 0),
        Streaming("elementwise", 2**30, 2**30, 2**29, 0),
    ]
    before, after = Predictor(h100).kernels(kernels).seconds, Predictor(capped).kernels(kernels).seconds
    assert after[0] / before[0] == pytest.approx(2**0.5)
    assert after[1] == before[1]


def test_a_gpu_without_measurements_borrows_and_says_so():
    durations = Predictor(find_gpu("h100-nvl")).kernels([Gemm("bfloat16", 1, 4096, 4096, 4096, 0)])
    assert durations.provenance[0] == Provenance.EXTRAPOLATED
    assert durations.profiles == ("gemm/h100",)


def test_inside_the_measurements_is_interpolated_and_outside_extrapolated():
    inside, outside = (Gemm("bfloat16", 1, m, 4096, 4096, 0) for m in (4096, 2**22))
    found = Predictor(find_gpu("h100")).kernels([inside, outside])
    assert list(found.provenance) == [Provenance.INTERPOLATED, Provenance.EXTRAPOLATED]


def test_many_kernels_are_predicted_as_each_alone():
    kernels = [Gemm("bfloat16", 1, m, 1000, 1000, 0) for m in range(1, 60)]
    together = Predictor(find_gpu("a100")).kernels(kernels).seconds
    one_by_one = np.array([predictor("a100").kernels([kernel]).seconds[0] for kernel in kernels])
    assert np.allclose(together, one_by_one, rtol=1e-12)
