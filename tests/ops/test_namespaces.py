"""Ops with the same name in two namespaces are different ops, and ops without a description are unknown."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Gemm, Kernel, Streaming, Unknown, to_json
from maya_core.ops.plan import find, flops_of, kernels_of
from maya_core.ops.registry import FORMULAS, PLANS, op
from maya_core.ops.work import Work
from maya_core.predictor.durations import Provenance
from maya_core.predictor.pricing import Predictor
from maya_core.trace.call import Call, Tensor, packed

H100 = Platform(find_gpu("h100"))


def t(*sizes: int, dtype: str = "Float") -> Tensor:
    return Tensor(dtype, sizes, packed(sizes), "cuda")


def product(op: str) -> Call:
    return Call(op, ["self", "mat2"], [t(64, 32), t(32, 16)], [t(64, 16)])


@pytest.fixture
def of_the_program() -> Iterator[None]:
    """Removes the ops that a test describes."""
    plans, formulas = dict(PLANS), dict(FORMULAS)
    yield
    PLANS.clear()
    PLANS.update(plans)
    FORMULAS.clear()
    FORMULAS.update(formulas)


def test_mm_of_a_library_is_not_cublas() -> None:
    assert [type(kernel) for kernel in kernels_of(product("aten::mm"), H100)] == [Gemm]
    mine = product("mylib::mm")
    assert find(mine) is None
    assert kernels_of(mine, H100) == [Unknown("mylib::mm", 4 * (64 * 32 + 32 * 16), 4 * 64 * 16, 64 * 16)]
    assert (flops_of(product("aten::mm")), flops_of(mine)) == (2 * 64 * 32 * 16, 0)


def test_an_unknown_kernel_is_a_bound() -> None:
    durations = Predictor(H100.gpu).ops([product("mylib::mm"), product("aten::mm")])
    assert durations.provenance[0] == Provenance.BOUND != durations.provenance[1]
    assert np.isfinite(durations.seconds).all() and (durations.seconds > 0).all()


def test_amax_of_transformer_engine_is_not_atens() -> None:
    """Transformer Engine's reduces to a single number with its own kernel, whatever its arguments are called; ATen's reduces dimensions."""
    source = t(4096, 1024, dtype="BFloat16")
    engines = Call("transformer_engine::amax", ["input"], [source], [t(1)])
    atens = Call("aten::amax", ["self", "dim", "keepdim"], [source, [-1], False], [t(4096, dtype="BFloat16")])
    assert find(engines) is not find(atens)
    assert kernels_of(engines, H100) == [Streaming("reduction", source.nbytes, 4, source.numel, source.numel)]
    assert kernels_of(atens, H100) == [Streaming("reduction", source.nbytes, 2 * 4096, source.numel, 1024)]


def test_an_overload_comes_before_its_op(of_the_program: None) -> None:
    @op("mylib::twist")
    def twist(call: Call, platform: Platform) -> Work:
        return Work().launch(Streaming("elementwise", 1, 1, 1))

    @op("mylib::twist.twice")
    def twice(call: Call, platform: Platform) -> Work:
        return Work().launch(*[Streaming("elementwise", 1, 1, 1)] * 2)

    assert len(kernels_of(product("mylib::twist"), H100)) == 1
    assert len(kernels_of(product("mylib::twist.other"), H100)) == 1
    assert len(kernels_of(product("mylib::twist.twice"), H100)) == 2


def test_an_op_is_described_under_its_full_name() -> None:
    with pytest.raises(ValueError, match="'mm' is not the full name of an op"):
        op("mm")(lambda call, platform: Work())


@pytest.mark.parametrize(
    "error", [KeyError("alpha"), IndexError(3), TypeError("None"), ZeroDivisionError(), ValueError()]
)
def test_a_rule_for_other_calls_leaves_the_kernel_unknown(of_the_program: None, error: Exception) -> None:
    @op("mylib::mm")
    def picky(call: Call, platform: Platform) -> Work:
        raise error

    with pytest.warns(
        UserWarning, match=rf"what mylib::mm launches is not known for this call \({type(error).__name__}"
    ):
        kernels = kernels_of(product("mylib::mm"), H100)
    assert kernels == [Unknown("mylib::mm", 4 * (64 * 32 + 32 * 16), 4 * 64 * 16, 64 * 16)]


def test_other_errors_of_a_rule_are_not_hidden(of_the_program: None) -> None:
    @op("mylib::mm")
    def broken(call: Call, platform: Platform) -> Work:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        kernels_of(product("mylib::mm"), H100)


def test_kernels_that_the_author_planned_are_those_of_the_trace() -> None:
    """A trace may be priced without the program's own rule, so the call contains the kernels that it planned."""
    planned: list[Kernel] = [Gemm("float32", 1, 64, 16, 32, 0), Streaming("elementwise", 4096, 4096, 1024)]
    call = product("mylib::mm")
    call.kernels.extend(json.loads(json.dumps([to_json(kernel) for kernel in planned])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels_of(call, H100) == planned
