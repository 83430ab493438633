"""Convolutions: cuDNN's kernels, and ATen's around them. Follows ConvShared.cpp, DepthwiseConv2d.cu and Convolution.cpp.

What cuDNN takes for itself is not published; its workspace is counted as none.
"""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Tensor, Work, kernel, packed
from maya_core.device.kernels.reductions import add_reduction


def _channels_last(tensor: Tensor) -> bool:
    return len(tensor.sizes) >= 4 and tensor.is_dense and tensor.strides[1] == 1 and not tensor.is_contiguous


def _lies_as(tensor: Tensor, channels_last: bool) -> bool:
    if not channels_last or len(tensor.sizes) < 4:
        return tensor.is_contiguous
    return tensor.permuted(0, *range(2, len(tensor.sizes)), 1).is_contiguous


def _packed(work: Work, channels_last: bool, *tensors: Tensor) -> list[int]:
    """cuDNN is given tensors in one memory format: others are copied into it, and the copies returned."""
    copies = []
    for tensor in tensors:
        if not _lies_as(tensor, channels_last):
            copies.append(work.temporary(tensor.nbytes))
            work.launches += 1
    return copies


def _by_depthwise_kernel(call: Call, channels_last: bool) -> bool:
    source, weight = call["input"], call["weight"]
    return (
        not channels_last
        and not call["transposed"]
        and len(source.sizes) == 4
        and 1 < call["groups"] == source.sizes[1]
        and weight.sizes[1] == 1
    )


@kernel("convolution", "convolution_overrideable")
def convolution(call: Call) -> Work:
    source, weight, channels_last = call["input"], call["weight"], _channels_last(call.results[0])
    depthwise = _by_depthwise_kernel(call, channels_last)  # which adds the bias as well
    work = Work(launches=1 if depthwise or call["bias"] is None else 2)
    if depthwise:
        work.out(0)
    _packed(work, channels_last, source, weight)
    return work


@kernel("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(call: Call) -> Work:
    grad, source, weight, mask = call["grad_output"], call["input"], call["weight"], call["output_mask"]
    channels_last = any(_channels_last(t) for t in (*call.results, source, weight))
    places = [
        sum(map(bool, mask[:i])) if wanted else None for i, wanted in enumerate(mask)
    ]  # among the outputs that there are
    work = Work(launches=0)
    kept: list[int] = []  # copies of the gradient that serve both
    source_read, each_packs = source, [grad]
    if len(grad.sizes) == 3:  # before it is seen as 2d
        _packed(work, False, source)
        kept = _packed(work, False, grad)
        source_read, each_packs = source._replace(strides=packed(source.sizes)), []
    elif channels_last and not _channels_last(grad):
        kept, each_packs = _packed(work, True, grad), []
    depthwise = _by_depthwise_kernel(call, channels_last)
    for which in (1, 0) if depthwise else (0, 1):
        place = places[which]
        if place is None:
            continue
        work.launches += 1
        if which == 0:
            work.out(place)
            copies = _packed(work, channels_last, *each_packs, weight)
        else:
            copies = _packed(work, channels_last, *each_packs, source_read)
            work.out(place)
        work.free(*reversed(copies))
    work.free(*kept)
    if places[2] is not None:
        work.out(places[2])
        add_reduction(work, grad, [0, *range(2, len(grad.sizes))], call)
    return work
