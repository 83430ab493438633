"""Ops whose work is a fixed number of launches, and the few with a small temporary. Counted on real CUDA torch 2.13."""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Rule, Work, kernel
from maya_core.device.kernels.iterator import pointwise_launches
from maya_core.device.kernels.reductions import add_input_copy

# op: kernels, memsets and copies launched, whatever the shape
LAUNCHES = {
    "eye": 2,
    "nonzero": 6,
    "masked_select": 5,
    "_unique2": 4,
    "mse_loss_backward": 2,
    "binary_cross_entropy_backward": 2,
    "batch_norm_backward": 2,
    "_ctc_loss": 2,
    "_ctc_loss_backward": 3,
    "scatter_reduce": 3,
    "histc": 2,
    "max_pool3d_with_indices_backward": 2,
    "_adaptive_avg_pool3d_backward": 2,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d_backward": 2,
    "reflection_pad1d_backward": 2,
    "reflection_pad2d_backward": 2,
    "reflection_pad3d_backward": 2,
    "replication_pad1d_backward": 2,
    "replication_pad2d_backward": 2,
    "replication_pad3d_backward": 2,
    "upsample_linear1d": 2,
    "upsample_linear1d_backward": 2,
    "upsample_bicubic2d": 2,
    "upsample_bicubic2d_backward": 2,
    "grid_sampler_2d_backward": 2,
    "_local_scalar_dense": 1,
    "equal": 3,
    "multinomial": 13,
}

# Ops that allocate their outputs in another order than they return them.
OUTPUT_ORDER = {
    "native_dropout": (1, 0),
}

# Ops over images: their kernels, and the input they want contiguous or channels_last and copy otherwise.
IMAGE_OPS = {
    "avg_pool2d": (1, "self"),
    "avg_pool2d_backward": (1, "grad_output"),
    "max_pool2d_with_indices": (1, "self"),
    "max_pool2d_with_indices_backward": (2, "grad_output"),
    "_adaptive_avg_pool2d": (1, "self"),
    "_adaptive_avg_pool2d_backward": (2, "grad_output"),
    "upsample_nearest2d": (1, "self"),
    "upsample_nearest2d_backward": (1, "grad_output"),
    "upsample_bilinear2d_backward": (2, "grad_output"),
}
COPIES_BEFORE_OUTPUT = {"_adaptive_avg_pool2d"}

# Out-of-place variants of in-place kernels: the input is copied first.
COPIES_FIRST = ["scatter", "scatter_add", "index_add", "index_copy", "index_fill", "masked_scatter"]


def _fixed(launches: int) -> Rule:
    def rule(_: Call) -> Work:
        return Work(launches=launches)

    return rule


for _name, _launches in LAUNCHES.items():
    kernel(_name)(_fixed(_launches))


def _ordered(order: tuple[int, ...]) -> Rule:
    def rule(_: Call) -> Work:
        return Work().out(*order)

    return rule


for _name, _order in OUTPUT_ORDER.items():
    kernel(_name)(_ordered(_order))


def _image_op(launches: int, wanted: str) -> Rule:
    def rule(call: Call) -> Work:
        source, work = call[wanted], Work(launches=launches)
        channels_last = len(source.sizes) == 4 and source.permuted(0, 2, 3, 1).is_contiguous
        if channels_last:
            return work
        if call.name not in COPIES_BEFORE_OUTPUT:
            work.out(*range(len(call.results)))
        return add_input_copy(work, source)

    return rule


for _name, _image in IMAGE_OPS.items():
    kernel(_name)(_image_op(*_image))
for _name in COPIES_FIRST:
    kernel(_name)(_fixed(2))


@kernel("copy_")
def copy(call: Call) -> Work:
    """A memcpy if both lie in memory the same way (Copy.cu), an elementwise kernel otherwise."""
    to, source = call.inputs[:2]
    if to.device != source.device or (
        to.dtype == source.dtype and to.sizes == source.sizes and to.strides == source.strides and to.is_dense
    ):
        return Work()
    return Work(launches=pointwise_launches(to, [source]))


@kernel("pow")
def pow_(call: Call) -> Work:
    if call.op.endswith(".Scalar"):  # the base is made a tensor first
        work = Work(launches=2).out(0)
        work.temporary(8)
        return work
    return Work()
