"""cuDNN's recurrent layers, and the pointwise part of cells that are products otherwise. Follows cudnn/RNN.cpp and cuda/RNN.cu."""

from __future__ import annotations

from maya_core.device.kernels.call import tensors_in
from maya_core.predictor.kernels.kernel import INCLUDED, Kernel, Op, bytes_moved, chain
from maya_core.predictor.kernels.products import dtype_of

GATES = {0: 1, 1: 1, 2: 4, 3: 3}  # of cuDNN's modes: ReLU, tanh, LSTM, GRU


@chain("_cudnn_rnn", "_cudnn_rnn_backward")
def layers(op: Op) -> list[Kernel]:
    source = op["input"]
    lengths = op.get("batch_sizes")
    if lengths:  # packed: rows of all steps in one
        steps, batch = len(lengths), source.sizes[0] / len(lengths)
    else:  # the state says which of the input's dimensions is the batch, however the input lies
        batch = op["hx"].sizes[1]
        steps = source.numel / max(batch * source.sizes[-1], 1)
    sizes = (
        int(op.name.endswith("_backward")), GATES.get(op["mode"], 4), op["num_layers"], 2 if op["bidirectional"] else 1,
        steps, batch, source.sizes[-1], op["hidden_size"], source.itemsize,
    )  # fmt: skip
    return [Kernel("recurrent", dtype_of(source), sizes), *[INCLUDED] * (op.launches - 1)]


@chain(
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell_backward_impl",
    "_thnn_fused_gru_cell_backward",
)
def cell(op: Op) -> list[Kernel]:
    read = sum(tensor.nbytes for argument in op.arguments for tensor in tensors_in(argument))
    written = sum(result.nbytes for result in op.results)
    return [bytes_moved("elementwise", read, written, sum(result.numel for result in op.results))]
