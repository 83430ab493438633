"""LSTM, GRU and RNN on cuDNN, following aten/src/ATen/native/cudnn/RNN.cpp of torch 2.13, and the pointwise part of cells, which otherwise
consist of products (cuda/RNN.cu).

cuDNN keeps all weights of a network in one buffer; `flatten_parameters` makes the parameters views of it. Gradients are views of one buffer
in the same way. The sizes that only cuDNN knows are computed as follows:

- weight buffer: the elements of all weights, without padding between them;
- reserve space: what the backward pass reads, for each time step, sample, layer and direction: the activated gates, for LSTM the cell
  state, for GRU the candidate's hidden part before its reset, and the output of every layer but the last; with dropout, one byte of mask
  for each element passed from layer to layer;
- dropout state: one 16-byte generator state for each thread that the GPU can run at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from maya_core.hardware.dtypes import dtype
from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Recurrent, Streaming
from maya_core.ops.lazy_torch import torch
from maya_core.ops.registry import aten, op, values
from maya_core.ops.rules import Rules, autocast_rule, describe, rule, without_autocast
from maya_core.ops.work import Work
from maya_core.trace.call import Call, tensors_in

RELU, TANH, LSTM, GRU = range(4)  # cudnnRNNMode_t
KEPT_PER_UNIT = {RELU: 1, TANH: 1, LSTM: 4 + 1, GRU: 3 + 1}
GENERATOR_STATE_BYTES = 16
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}


# ---- kernels ----
def forward_flops(call: Call) -> int:
    weights = sum(t.numel for t in call["weight"] if len(t.sizes) > 1)
    data = call["input"]
    answer: int = 2 * weights * data.numel // max(data.sizes[-1], 1)
    return answer


def backward_flops(call: Call) -> int:
    return 2 * forward_flops(call)


def _layers(call: Call, backward: int) -> Work:
    """One kernel for the whole call, because what cuDNN launches was only measured together."""
    source = call["input"]
    if lengths := call.get("batch_sizes"):  # a packed sequence: the rows of all steps are in one dimension
        steps, batch = len(lengths), source.sizes[0] / len(lengths)
    else:  # the size of the state tells which dimension of the input is the batch
        batch = call["hx"].sizes[1]
        steps = source.numel / max(batch * source.sizes[-1], 1)
    return Work().launch(
        Recurrent(
            dtype(source.dtype).rate, backward, GATES.get(call["mode"], 4), call["num_layers"],
            2 if call["bidirectional"] else 1, steps, batch, source.sizes[-1], call["hidden_size"], source.itemsize,
        )
    )  # fmt: skip


@op("aten::_cudnn_rnn", flops=forward_flops)
def layers_forward(call: Call, platform: Platform) -> Work:
    return _layers(call, 0)


@op("aten::_cudnn_rnn_backward", flops=backward_flops)
def layers_backward(call: Call, platform: Platform) -> Work:
    return _layers(call, 1)


@op(
    *aten(
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell_backward_impl",
        "_thnn_fused_gru_cell_backward",
    )
)
def cell(call: Call, platform: Platform) -> Work:
    read = sum(tensor.nbytes for argument in call.arguments for tensor in tensors_in(argument))
    written = sum(result.nbytes for result in call.results)
    return Work().launch(Streaming("elementwise", read, written, sum(result.numel for result in call.results)))


values(*aten("_cudnn_rnn", "_cudnn_rnn_backward"), heavy=True, mixes_devices=True)


# ---- results ----
def _pieces(buffer: torch.Tensor, weights: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """The place of each weight in cuDNN's buffer: the matrices of all layers, then the biases of all layers.

    As in ATen, the pieces share the buffer's memory, but autograd does not know them as views of it.
    """
    order = [i for i, weight in enumerate(weights) if weight.dim() > 1] + [
        i for i, weight in enumerate(weights) if weight.dim() == 1
    ]
    start = 0
    for i in order:
        yield i, buffer.new_empty(0).set_(buffer.untyped_storage(), start, weights[i].shape, [])
        start += weights[i].numel()


def _elements(weights: Sequence[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def _shared_buffer(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer of which all weights are views, if there is one."""
    storage = weights[0].untyped_storage()
    if storage.nbytes() != _elements(weights) * weights[0].element_size():
        return None
    if any(weight.untyped_storage().data_ptr() != storage.data_ptr() for weight in weights):
        return None
    return weights[0].as_strided((_elements(weights),), (1,), 0)


@rule("aten::_cudnn_rnn_flatten_weight")
def flatten_weight(rules: Rules, weights: list[torch.Tensor], *_: Any) -> torch.Tensor:
    buffer = torch.zeros(_elements(weights), dtype=weights[0].dtype, device=weights[0].device)
    for i, piece in _pieces(buffer, weights):
        piece.copy_(weights[i])
        weights[i].set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
    return buffer


def reserve_bytes(
    steps_times_batch: int,
    itemsize: int,
    mode: int,
    hidden_size: int,
    output_size: int,
    layers: int,
    directions: int,
    dropout: float,
) -> int:
    """The reserve space of a forward pass in training; the module's docstring describes it."""
    kept = layers * directions * hidden_size * KEPT_PER_UNIT[mode]
    passed_on = (layers - 1) * directions * output_size
    return steps_times_batch * (itemsize * (kept + passed_on) + (passed_on if dropout else 0))


@rule("aten::_cudnn_rnn")
def cudnn_rnn(
    rules: Rules,
    input: torch.Tensor,
    weights: list[torch.Tensor],
    weights_per_layer: int,
    weight_buffer: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *network: Any,
) -> tuple[torch.Tensor, ...]:
    mode, hidden_size, projection_size, layers, batch_first, dropout, train, bidirectional, batch_sizes, _ = network
    packed, directions = bool(batch_sizes), 2 if bidirectional else 1
    output_size = projection_size or hidden_size
    transposed = batch_first and not packed
    x = (input.transpose(0, 1) if transposed else input).contiguous()
    samples = batch_sizes[0] if packed else x.size(1)
    output = x.new_empty((*x.shape[:-1], output_size * directions))
    hy = hx.new_empty((layers * directions, samples, output_size))
    cy = hx.new_empty(0) if cx is None else cx.new_empty((layers * directions, samples, hidden_size))
    buffer = weight_buffer if weight_buffer is not None else _shared_buffer(weights)
    if buffer is None:
        buffer = x.new_empty(_elements(weights))
        for i, piece in _pieces(buffer, weights):
            piece.copy_(weights[i])
    kept = (
        reserve_bytes(x[..., 0].numel(), x.element_size(), mode, hidden_size, output_size, layers, directions, dropout)
        if train
        else 0
    )
    reserve = torch.empty(kept, dtype=torch.uint8, device=input.device)
    rules.record(
        "aten::_cudnn_rnn", [x, weights, weights_per_layer, buffer, hx, cx, *network], [output, hy, cy, reserve]
    )
    return output.transpose(0, 1) if transposed else output, hy, cy, reserve, buffer


@autocast_rule("aten::_cudnn_rnn")
def autocast_cudnn_rnn(
    input: torch.Tensor,
    weights: list[torch.Tensor],
    weights_per_layer: int,
    weight_buffer: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *network: Any,
) -> Any:
    """Casts to float16, whatever the dtype of autocast is, and flattens the cast weights (aten/src/ATen/cudnn/AutocastRNN.cpp)."""

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return (
            tensor.half()
            if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
            else tensor
        )

    with without_autocast():
        if weights[0].dtype not in (torch.float16, torch.float64):
            weight_buffer = weights[0].new_empty(_elements(weights), dtype=torch.float16)
            cast_weights: list[Any] = [None] * len(weights)
            for i, piece in _pieces(weight_buffer, weights):
                cast_weights[i] = piece.copy_(weights[i])
            weights = cast_weights
        return torch.ops.aten._cudnn_rnn(
            cast(input), weights, weights_per_layer, weight_buffer, cast(hx), cast(cx), *network
        )


@rule("aten::_cudnn_rnn_backward")
def cudnn_rnn_backward(
    rules: Rules,
    input: torch.Tensor,
    weights: list[torch.Tensor],
    weights_per_layer: int,
    weight_buffer: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    output: torch.Tensor,
    grad_output: torch.Tensor | None,
    grad_hy: torch.Tensor | None,
    grad_cy: torch.Tensor | None,
    *network: Any,  # as in the forward pass; then the reserve space and the output mask
) -> tuple[Any, ...]:
    _, _, _, _, batch_first, _, _, _, batch_sizes, _, _, output_mask = network
    if grad_output is None and grad_hy is None and grad_cy is None:
        return None, None, None, [None] * len(weights)
    transposed = batch_first and not batch_sizes
    grad_output = torch.zeros_like(output) if grad_output is None else grad_output
    grad_hy = torch.zeros_like(hx) if grad_hy is None else grad_hy
    if cx is not None and grad_cy is None:
        grad_cy = torch.zeros_like(cx)
    dy = (grad_output.transpose(0, 1) if transposed else grad_output).contiguous()
    x = (input.transpose(0, 1) if transposed else input).contiguous()
    dx = x.new_empty(x.shape)
    dhx = hx.new_empty(hx.shape)
    dcx = None if cx is None else cx.new_empty(cx.shape)
    given = [x, weights, weights_per_layer, weight_buffer, hx, cx, output, dy, grad_hy, grad_cy, *network]
    rules.record("aten::_cudnn_rnn_backward", given, [dx, dhx, *([] if dcx is None else [dcx])])
    grads: list[torch.Tensor | None] = [None] * len(weights)
    if output_mask[3]:
        buffer = torch.zeros_like(weight_buffer)
        rules.forget(buffer)
        for i, piece in _pieces(buffer, weights):
            grads[i] = piece
    return dx.transpose(0, 1) if transposed else dx, dhx, dcx, grads


@rule("aten::_cudnn_init_dropout_state")
def init_dropout_state(
    rules: Rules,
    dropout: float,
    train: bool,
    seed: int,
    dtype: torch.dtype | None,
    layout: Any,
    device: torch.device | None,
    pin_memory: bool | None,
) -> torch.Tensor:
    gpu = torch.cuda.get_device_properties(device)
    threads = gpu.multi_processor_count * gpu.max_threads_per_multi_processor
    state = torch.empty(threads * GENERATOR_STATE_BYTES, dtype=torch.uint8, device=device or "cuda")
    rules.record("aten::_cudnn_init_dropout_state", [seed], [state])
    return state


@describe("aten::_thnn_fused_gru_cell")
def fused_gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty((hx.size(0), hx.size(1) * 5))


@describe("aten::_thnn_fused_gru_cell_backward")
def fused_gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    samples, hidden_size = grad_hy.shape
    gates = [workspace.new_empty((samples, 3 * hidden_size)) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * hidden_size) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], torch.empty_like(grad_hy, memory_format=torch.contiguous_format), biases[0], biases[1]
