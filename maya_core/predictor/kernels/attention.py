"""Attention: flash, memory-efficient and cuDNN. Follows ATen/native/transformers/cuda (flash_api.cpp, attention_backward.cu, mem_eff_attention).

A backward pass is several kernels that were only ever measured together: the main one stands for all, the others are
"included". Copies of inputs and sums over shared heads are ATen's own and priced apart.
"""

from __future__ import annotations

from maya_core.device.kernels.call import Tensor
from maya_core.predictor.kernels.kernel import INCLUDED, Kernel, Op, bytes_moved, chain, contiguous_copy, helper

BACKENDS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_cudnn_attention": "cudnn",
}
BY_TOKEN = ("_flash_attention", "_efficient_attention", "_cudnn_attention")  # heads come after tokens in these
INNER = {"flash": 2, "efficient": 0, "cudnn": 2}  # launches of a backward pass beside its main kernel


def _backend(name: str) -> str:
    return name.removesuffix("_forward").removesuffix("_backward")


def _attention(op: Op, direction: str) -> Kernel:
    backend = _backend(op.name)
    query, key, value = op["query"], op["key"], op["value"]
    if backend in BY_TOKEN:
        query, key, value = (t.permuted(0, 2, 1, 3) if len(t.sizes) == 4 else _packed(t) for t in (query, key, value))
    batch, heads, queries, head = query.sizes
    kv_heads, keys = key.sizes[1], key.sizes[2]
    if op.get("cum_seq_q") is not None and op.get("max_q") and backend in BY_TOKEN:  # sequences one after the other
        sequences = max(1, op["cum_seq_q"].numel - 1)
        batch, queries, keys = sequences, queries / sequences, keys / sequences
    causal = bool(op.get("is_causal", False)) or bool(op.get("custom_mask_type", 0))
    window = op.get("window_size_left")
    sizes = (
        batch, heads, kv_heads, queries, keys, head, value.sizes[-1], int(causal),
        window if isinstance(window, int) and window > 0 else 0, query.itemsize,
    )  # fmt: skip
    return Kernel("attention", f"{BACKENDS[backend]}_{direction}", sizes)


def _packed(tokens: Tensor) -> Tensor:
    """Tokens of all sequences in one row (tokens, heads, head) as one sequence."""
    count, heads, head = tokens.sizes
    return Tensor(tokens.dtype, (1, heads, count, head), (count * heads * head, head, heads * head, 1), tokens.device)


@chain(*(name for each in BACKENDS for name in ((each, f"{each}_forward") if each in BY_TOKEN else (each,))))
def forward(op: Op) -> list[Kernel]:
    """One kernel; where few queries share many keys a second one combines the parts."""
    return [_attention(op, "forward"), *[INCLUDED] * (op.launches - 1)]


@chain(*(f"{each}_backward" for each in BACKENDS))
def backward(op: Op) -> list[Kernel]:
    backend = BACKENDS[_backend(op.name)]
    main = _attention(op, "backward")
    copies: list[Kernel] = []
    if op.name.startswith("_scaled_dot_product") and backend != "cudnn":  # wanted contiguous by token
        given = ("grad_out", "out") if backend == "flash" else ("grad_out_",)
        for name in given:
            tensor = op.tensor(name)
            if tensor is not None:
                copies += contiguous_copy(tensor.permuted(0, 2, 1, 3))
    if backend == "efficient":
        return [*copies, *_efficient_helpers(op, op.launches - 1 - len(copies)), main]
    sums = _sums_over_shared_heads(op, main, op.launches - 1 - len(copies) - INNER[backend])
    inner = op.launches - 1 - len(copies) - len(sums)
    before = min(inner, 1)
    return [*copies, *[INCLUDED] * before, main, *[INCLUDED] * (inner - before), *sums]


def _sums_over_shared_heads(op: Op, main: Kernel, launches: int) -> list[Kernel]:
    """dk and dv of each query head, summed over the heads that share a key (flash_api.cpp, at::sum_out)."""
    _, heads, kv_heads = main.sizes[:3]
    if heads == kv_heads or launches < 2:
        return []
    key = op["key"]
    read = key.nbytes * heads / kv_heads
    one = bytes_moved("column_reduction", read, key.nbytes, key.numel * heads / kv_heads, heads / kv_heads)
    semaphores = [helper()] * ((launches - 2) // 2)
    return [*semaphores, one, *semaphores, one]


def _efficient_helpers(op: Op, launches: int) -> list[Kernel]:
    """The workspace zeroed, and for float sum(grad * out) beside: product, sum, turned by head."""
    query = op["query"]
    count = query.numel
    zeroed = bytes_moved("fill", 0, 4 * count, count)
    if query.itemsize == 2 or launches < 2:
        return [zeroed] * min(launches, 1) + [helper()] * (launches - 1)
    grad = op["grad_out_"]
    rows = grad.numel // max(grad.sizes[-1], 1)
    beside = [
        bytes_moved("elementwise", 2 * grad.nbytes, 4 * grad.numel, grad.numel),
        bytes_moved("reduction", 4 * grad.numel, 4 * rows, grad.numel, grad.sizes[-1]),
        bytes_moved("transpose", 4 * rows, 4 * rows, rows),
        zeroed,
    ]
    return beside[:launches] + [helper()] * (launches - len(beside))
