"""Ops whose work is a fixed number of launches, and the few with a small temporary. Counted on real CUDA torch 2.13."""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Work, kernel

# op: kernels, memsets and copies launched, whatever the shape
LAUNCHES = {
    "topk": 2,
    "eye": 2,
    "nonzero": 5,
    "masked_select": 5,
    "bincount": 5,
    "_unique2": 4,
    "nll_loss_backward": 2,
    "nll_loss2d_backward": 2,
    "native_batch_norm": 3,
    "batch_norm_backward": 2,
    "embedding_bag": 2,
    "_embedding_bag": 2,
    "_ctc_loss": 2,
    "_ctc_loss_backward": 3,
    "scatter_reduce": 2,
    "max_pool2d_with_indices_backward": 2,
    "max_pool3d_with_indices_backward": 2,
    "upsample_bilinear2d_backward": 2,
    "upsample_nearest2d_backward": 1,
    "_local_scalar_dense": 1,
    "equal": 3,
    "multinomial": 8,
    "convolution_backward": 2,
}

# Ops that allocate their outputs in another order than they return them.
OUTPUT_ORDER = {
    "native_dropout": (1, 0),
}

# Out-of-place variants of in-place kernels: the input is copied first.
COPIES_FIRST = ["scatter", "scatter_add", "index_add", "index_copy", "index_fill", "masked_scatter"]


def _fixed(launches: int):
    def rule(_: Call) -> Work:
        return Work(launches=launches)

    return rule


for _name, _launches in LAUNCHES.items():
    kernel(_name)(_fixed(_launches))
def _ordered(order: tuple[int, ...]):
    def rule(_: Call) -> Work:
        return Work().out(*order)

    return rule


for _name, _order in OUTPUT_ORDER.items():
    kernel(_name)(_ordered(_order))
for _name in COPIES_FIRST:
    kernel(_name)(_fixed(2))


@kernel("mm", "addmm", "bmm", "baddbmm", "addmv", "addbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "dot", "vdot")
def matmul(call: Call) -> Work:
    """One cuBLAS call with its workspace; a bias that is not a row cublasLt can add is copied in first."""
    work = Work().out(0)
    if call.name in ("addmm", "baddbmm", "addmv") and not _bias_in_epilogue(call):
        work.launches = 2
    return work.blas()


def _bias_in_epilogue(call: Call) -> bool:
    bias, first, second = call.inputs[0], call.inputs[1], call.inputs[2]
    if call.name != "addmm" or len(bias.sizes) != 1 or not bias.is_contiguous:
        return False
    if bias.sizes[0] != second.sizes[1] or call.get("beta", 1) != 1:
        return False
    rows, columns = call.results[0].sizes
    small = second.sizes[0] > 1 and second.sizes[1] > 1 and rows > 1 if call.name == "addmm" else True
    return bool(small) and all(t.dtype in ("Double", "Float", "Half", "BFloat16") for t in (first, second)) and columns > 0


@kernel("pow")
def pow_(call: Call) -> Work:
    if call.op.endswith(".Scalar"):  # the base is made a tensor first
        work = Work(launches=2).out(0)
        work.temporary(8)
        return work
    return Work()


@kernel("convolution")
def convolution(call: Call) -> Work:
    """cuDNN's kernel, and another that adds the bias."""
    return Work(launches=1 + (call["bias"] is not None))
