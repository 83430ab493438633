"""Ops that are a fixed chain of kernels: for each, its pattern, what it reads and what it writes.

Arguments are named, results numbered. `small` is a launch over a few numbers. Launch counts of these ops are in
`device/kernels/table.py` and `losses.py`; the kernels are those of the ATen file named on the right.
"""

from __future__ import annotations

from typing import NamedTuple

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import (
    Chain,
    Kernel,
    Op,
    bytes_moved,
    chain,
    contiguous_copy,
    helper,
    memory,
    moved,
    pattern,
)


class Step(NamedTuple):
    model: str
    reads: str = ""
    writes: str = ""


SMALL = Step("small")

RECIPES: dict[str, tuple[Step, ...]] = {
    # Loss.cpp, BinaryOps.cpp: the gradient is made 0 first
    "mse_loss_backward": (Step("fill", "", "0"), Step("elementwise", "grad_output self target", "0")),
    # Loss.cu: the result is made of the gradient first
    "binary_cross_entropy_backward": (
        Step("elementwise", "grad_output", "0"),
        Step("elementwise", "0 self target", "0"),
    ),
    # LossCTC.cu
    "_ctc_loss": (Step("fill", "", "1"), Step("other", "log_probs 1", "1")),
    "_ctc_loss_backward": (
        Step("fill", "", "0"),
        Step("other", "log_probs log_alpha", "0"),
        Step("other", "log_probs", "0"),
    ),
    # NLLLoss2d.cu
    "nll_loss2d_backward": (Step("fill", "", "0"), Step("scatter", "target", "target")),
    # ScatterGatherKernel.cu: copied, what is scattered to initialized, scattered
    "scatter_reduce": (
        Step("elementwise", "self", "0"),
        Step("scatter", "index", "src"),
        Step("scatter", "src index src", "src"),
    ),
    # SummaryOps.cu
    "histc": (Step("fill", "", "0"), Step("scatter", "self", "0")),
    # Pooling, padding and resampling: a gradient that several outputs add to is made 0 first
    "max_pool2d_with_indices": (Step("pool", "self", "0 1"),),  # DilatedMaxPool2d.cu
    "max_pool3d_with_indices": (Step("pool", "self", "0 1"),),
    "max_pool2d_with_indices_backward": (Step("fill", "", "0"), Step("pool", "grad_output indices", "0")),
    "max_pool3d_with_indices_backward": (Step("fill", "", "0"), Step("scatter", "grad_output indices", "0")),
    "avg_pool2d": (Step("pool", "self", "0"),),  # AveragePool2d.cu
    "avg_pool2d_backward": (Step("pool", "grad_output", "0"),),
    "_adaptive_avg_pool2d": (Step("pool", "self", "0"),),  # AdaptiveAveragePooling.cu
    "_adaptive_avg_pool2d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0")),
    "_adaptive_avg_pool3d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0")),
    "adaptive_max_pool2d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output indices", "0")),
    "adaptive_max_pool3d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output indices", "0")),
    **{  # ReflectionPad.cu, ReplicationPadding.cu
        f"{kind}_pad{n}d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0"))
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    # UpSample*.cu
    "upsample_nearest2d": (Step("pool", "self", "0"),),
    "upsample_nearest2d_backward": (Step("pool", "grad_output", "0"),),
    "upsample_bilinear2d": (Step("pool", "self", "0"),),
    "upsample_bilinear2d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0")),
    "upsample_linear1d": (Step("fill", "", "0"), Step("pool", "self", "0")),
    "upsample_linear1d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0")),
    "upsample_bicubic2d": (Step("fill", "", "0"), Step("pool", "self", "0")),
    "upsample_bicubic2d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output", "0")),
    "grid_sampler_2d_backward": (Step("fill", "", "0"), Step("scatter", "grad_output input grid", "0 1")),
    # UnfoldBackwardKernel.cu: zeroed, positions numbered, added
    "unfold_backward": (Step("fill", "", "0"), SMALL, Step("scatter", "grad_in", "0")),
    # Unique.cu
    "_unique2": (
        Step("sort", "self", "self"),
        Step("sort", "self", "self"),
        Step("scan", "self", "self"),
        Step("gather", "self", "0"),
    ),
    # Indexing: what is not changed is copied first
    "masked_scatter": (Step("elementwise", "self", "0"), Step("scatter", "mask source", "0")),
    "index_fill": (Step("elementwise", "self", "0"), Step("scatter", "index", "index")),
}

# Inputs that are copied where they are neither contiguous nor channels_last (the IMAGE_OPS of device/kernels/table.py).
WANTED = {
    name: "self" if not name.endswith("_backward") else "grad_output"
    for name in (
        "avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward",
        "upsample_bilinear2d_backward",
    )
}  # fmt: skip


def _tensors(op: Op, references: str) -> list[Tensor]:
    return [tensor for name in references.split() if (tensor := op.tensor(name)) is not None]


def _kernel(op: Op, step: Step) -> Kernel:
    if step.model == "small":
        return helper()
    reads, writes = _tensors(op, step.reads), _tensors(op, step.writes)
    model = pattern(reads, writes[0]) if step.model == "elementwise" and writes else step.model
    return memory(model, reads, writes)


def _chain(steps: tuple[Step, ...], wanted: str | None) -> Chain:
    def kernels(op: Op) -> list[Kernel]:
        made = [_kernel(op, step) for step in steps]
        if wanted is not None and op.launches > len(made):
            made = [*contiguous_copy(op.tensor(wanted)), *made]
        return made

    return kernels


for _name, _steps in RECIPES.items():
    chain(_name)(_chain(_steps, WANTED.get(_name)))


@chain("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
def loss(op: Op) -> list[Kernel]:
    """The loss of each element, then reduced; binary_cross_entropy multiplies weights in, and copies its result (Loss.cu)."""
    source = op.inputs[0]
    each = [memory("elementwise", op.inputs[:2], [source])]
    if op.get("weight") is not None:
        each.append(memory("elementwise", [source, op.tensor("weight")], [source]))
    if op["reduction"] == 0:
        return each
    copied = [Kernel("copy", "d2d", (source.itemsize,))] if op.name == "binary_cross_entropy" else []
    total = bytes_moved("reduction", source.nbytes, source.itemsize, source.numel, source.numel)
    semaphores = [helper()] * min(1, op.launches - len(each) - len(copied) - 1)
    return [*each, *semaphores, total, *copied]


@chain("nll_loss_forward")
def nll_loss(op: Op) -> list[Kernel]:
    """One block over all targets, or one thread each after the total weight is zeroed (cuda/Loss.cu)."""
    scores, targets = op["self"], op["target"]
    picked = bytes_moved("loss", moved(targets) + 32 * targets.numel, sum(moved(r) for r in op.results), targets.numel)
    if op.launches > 1:
        return [helper(), picked._replace(model="gather")]
    return [picked if len(scores.sizes) > 1 else helper()]


@chain("nll_loss_backward")
def nll_loss_backward(op: Op) -> list[Kernel]:
    """The whole gradient zeroed, in parts past 2 GiB, then written where the targets are."""
    targets, result = op["target"], op.results[0]
    parts = max(1, op.launches - 1)
    zeroed = bytes_moved("fill", 0, result.nbytes / parts, result.numel / parts)
    return [*[zeroed] * parts, bytes_moved("loss", moved(targets), 32 * targets.numel, targets.numel)]


@chain("nll_loss2d_forward")
def nll_loss2d(op: Op) -> list[Kernel]:
    targets, result = op["target"], op.results[0]
    picked = bytes_moved("gather", moved(targets) + 32 * targets.numel, moved(result), targets.numel)
    if op["reduction"] == 0:
        return [helper(), picked]
    return [helper(), helper(), picked, helper()][: op.launches]


@chain("multinomial")
def multinomial(op: Op) -> list[Kernel]:
    """Probabilities checked, then the largest of each over an exponential draw (Distributions.cpp)."""
    source = op.inputs[0]
    row = source.sizes[-1]
    rows = source.numel // max(row, 1)
    whole = bytes_moved("reduction", source.nbytes, 4, source.numel, source.numel)
    by_row = bytes_moved("reduction", source.nbytes, 4 * rows, source.numel, row)
    of_rows = bytes_moved("reduction", 4 * rows, 4, rows, rows)
    return [
        whole, *[helper()] * 4, by_row, helper(), of_rows, helper(), helper(),
        bytes_moved("random", 0, source.nbytes, source.numel),
        bytes_moved("elementwise", 2 * source.nbytes, source.nbytes, source.numel),
        by_row,
    ]  # fmt: skip
