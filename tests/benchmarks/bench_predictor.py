"""How fast durations are predicted: a trace of 10,000 distinct ops at once, compared with one op at a time.

python tests/benchmarks/bench_predictor.py
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from maya_core.hardware.catalog import find_gpu
from maya_core.predictor.pricing import Predictor
from maya_core.trace.call import Call, Tensor, packed

OPS = 10_000
ONE_BY_ONE = 200


def _tensor(*sizes: int, dtype: str = "BFloat16") -> Tensor:
    return Tensor(dtype, sizes, packed(sizes), "cuda")


def distinct_ops(count: int) -> list[Call]:
    """Ops as a large model's steps have them, no two alike: a third products, the rest of a transformer's families."""
    random = np.random.default_rng(0)
    found = []
    for number in range(count):
        rows, width, wide = (int(x) for x in random.integers(64, 8192, 3) + number % 7)
        x, bias = _tensor(rows, width), _tensor(wide)
        kind = number % 9
        if kind < 3:
            call = ("aten::addmm", ["self", "mat1", "mat2"], [bias, x, _tensor(width, wide)], [_tensor(rows, wide)])
        elif kind < 6:
            call = ("aten::add.Tensor", ["self", "other"], [x, x], [x])
        elif kind == 6:
            stats = _tensor(rows, 1, dtype="Float")
            weight = _tensor(width)
            call = ("aten::native_layer_norm", ["input", "normalized_shape", "weight", "bias", "eps"], [x, [width], weight, weight, 1e-5], [x, stats, stats])  # fmt: skip
        elif kind == 7:
            call = ("aten::_softmax", ["self", "dim", "half_to_float"], [x, -1, False], [x])
        else:
            call = ("aten::gelu", ["self"], [x], [x])
        found.append(Call(*call))
    return found


def main() -> None:
    ops = distinct_ops(OPS)
    table = Table(
        "GPU", "10,000 distinct ops, s", "of that the models' loading", "again, s", "us an op", "one by one / at once"
    )
    for name in ("h100", "a100", "rtx-4090"):
        predictor = Predictor(find_gpu(name))
        begun = time.perf_counter()
        predictor.ops(ops[:9])
        loaded = time.perf_counter()
        predictor.ops(ops)
        first = time.perf_counter()
        predictor.ops(ops)
        again = time.perf_counter()
        for op in ops[:ONE_BY_ONE]:
            predictor.ops([op])
        alone = (time.perf_counter() - again) / ONE_BY_ONE
        each = (again - first) / OPS
        table.add_row(
            name, f"{first - begun:.2f}", f"{loaded - begun:.2f}", f"{again - first:.2f}", f"{each * 1e6:.0f}", f"{alone / each:.0f}"
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
