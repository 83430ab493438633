"""Calls of single ops for real CUDA PyTorch and the emulated device. Each case makes its inputs, then returns the call."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.nn import functional as F

Case = Callable[[], Callable[[], object]]
CASES: dict[str, Case] = {}
SIZED_BY_VALUES = {"masked_select"}  # its memory depends on values, which a fake runtime does not compute


def x(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device="cuda")


def half(*sizes: int) -> torch.Tensor:
    return x(*sizes, dtype=torch.bfloat16)


def index(*sizes: int, values: int = 0) -> torch.Tensor:
    return torch.full(sizes, values, dtype=torch.int64, device="cuda")


def make_workspaces() -> None:
    """Allocates the workspaces of cuBLAS and cublasLt, which stay, so that they are no part of the first product's memory."""
    torch.mm(half(512, 512), half(512, 512))
    torch.addmm(half(512), half(512, 512), half(512, 512))


def peak_bytes(call: Callable[[], object]) -> int:
    """The bytes that a call requests at its peak, with its results. What it gets depends on what was freed before it."""
    gc.collect()  # tensors of earlier cases
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with torch.autograd.set_multithreading_enabled(False):  # a thread of autograd may free what it used after the call
        call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def simple(name: str, op: Callable[..., object], *inputs: Callable[[], object]) -> None:
    """A case whose inputs are made one after the other."""

    def make() -> Callable[[], object]:
        made = [build() for build in inputs]
        return lambda: op(*made)

    CASES[name] = make


def gradient(name: str, op: Callable[..., torch.Tensor], *inputs: Callable[[], object]) -> None:
    """A case that consists of the backward pass of `op`, given the gradient of its result."""

    def make() -> Callable[[], object]:
        made = [build() for build in inputs]
        leaves = [each.requires_grad_() for each in made if isinstance(each, torch.Tensor) and each.is_floating_point()]
        result = op(*made)
        grad = torch.zeros_like(result)
        return lambda: torch.autograd.grad(result, leaves, grad)

    CASES[name] = make


def rows() -> torch.Tensor:
    return x(4096, 1024)


def half_rows() -> torch.Tensor:
    return half(4096, 1024)


def image() -> torch.Tensor:
    return x(16, 64, 56, 56)


def tall() -> torch.Tensor:
    return x(512, 5000)


aten = torch.ops.aten

# ---- elementwise ----
simple("add", torch.add, rows, rows)
simple("add_halves", torch.add, half_rows, half_rows)
simple("add_row", torch.add, rows, lambda: x(1024))
simple("add_column", torch.add, rows, lambda: x(4096, 1))
simple("add_mixed", torch.add, rows, half_rows)
simple("add_in_place", lambda a, b: a.add_(b), rows, rows)
simple("add_out", lambda a, b, out: torch.add(a, b, out=out), rows, rows, rows)
simple("add_slices", lambda a: a[:, :512] + a[:, 512:], rows)
simple("mul_number", lambda a: a * 2.0, rows)
simple("gelu", F.gelu, half_rows)
simple("silu", F.silu, half_rows)
simple("where", lambda a: torch.where(a > 0, a, 0.0), rows)
simple(
    "masked_fill", lambda a, m: a.masked_fill(m, 0.0), lambda: x(8, 16, 256, 256), lambda: x(256, 256, dtype=torch.bool)
)
simple("expanded", lambda a: a.expand(4096, 1024) * 2.0, lambda: x(4096, 1))
simple("dropout", lambda a: torch.native_dropout(a, 0.1, True), rows)
simple("clamp", lambda a: a.clamp(0, 1), rows)
simple("tril", lambda a: a.tril(), lambda: x(2048, 2048))
simple("pow_scalar_base", lambda a: torch.pow(2.0, a), rows)
gradient("gelu_backward", F.gelu, half_rows)
gradient("glu_backward", F.glu, rows)

# ---- copies ----
simple("clone", torch.clone, rows)
simple("transpose", lambda a: a.t().contiguous(), rows)
simple("heads_first", lambda a: a.view(8, 512, 16, 64).transpose(1, 2).contiguous(), half_rows)
simple("to_float", lambda a: a.float(), half_rows)
simple("to_half", lambda a: a.bfloat16(), rows)
simple("cast_transposed", lambda a: a.t().to(torch.bfloat16, memory_format=torch.contiguous_format), rows)
simple("to_channels_last", lambda a: a.contiguous(memory_format=torch.channels_last), image)
simple("expanded_clone", lambda a: a.expand(4096, 1024).contiguous(), lambda: x(1024))
simple("to_host", lambda a: a.cpu(), rows)
simple("from_host", lambda: torch.zeros(4096, 64).cuda())
simple("cat", lambda a, b: torch.cat([a, b]), rows, rows)
simple("cat_last", lambda a, b: torch.cat([a, b], -1), rows, rows)
simple("stack", lambda a, b: torch.stack([a, b]), rows, rows)
simple("flip", lambda a: a.flip(0), rows)
simple("roll", lambda a: a.roll(3, 0), rows)

# ---- fills ----
simple("zeros", lambda: x(4096, 1024))
simple("fill", lambda a: a.fill_(3.0), rows)
simple("zero", lambda a: a.zero_(), rows)
simple("randn", lambda: torch.randn(4096, 1024, device="cuda"))
simple("rand", lambda: torch.rand(4096, 1024, device="cuda"))
simple("arange", lambda: torch.arange(100_000, device="cuda"))
simple("eye", lambda: torch.eye(1024, device="cuda"))
simple("randperm", lambda: torch.randperm(100_000, device="cuda"))

# ---- reductions ----
simple("sum", torch.sum, rows)
simple("sum_last", lambda a: a.sum(-1), rows)
simple("sum_first", lambda a: a.sum(0), rows)
simple("sum_first_halves", lambda a: a.sum(0), half_rows)
simple("sum_middle", lambda a: a.sum(1), lambda: x(32, 512, 256))
simple("sum_integers", torch.sum, lambda: x(4096, 1024, dtype=torch.int32))
simple("mean", torch.mean, rows)
simple("max", torch.max, rows)
simple("max_last", lambda a: a.max(-1), rows)
simple("argmax", lambda a: a.argmax(-1), rows)
simple("norm", torch.linalg.vector_norm, rows)
simple("var", torch.var, rows)
simple("all", lambda a: a.all(), lambda: x(4096, 1024, dtype=torch.bool))

# ---- softmax and normalization ----
simple("softmax", lambda a: a.softmax(-1), rows)
simple("softmax_long", lambda a: a.softmax(-1), lambda: x(512, 50000))
simple("softmax_first", lambda a: a.softmax(0), rows)
simple("softmax_transposed", lambda a: a.t().softmax(-1), rows)
simple("log_softmax", lambda a: a.log_softmax(-1), rows)
gradient("softmax_backward", lambda a: a.softmax(-1), rows)
gradient("log_softmax_backward", lambda a: a.log_softmax(-1), rows)
simple("layer_norm", lambda a, w, b: F.layer_norm(a, (1024,), w, b), rows, lambda: x(1024), lambda: x(1024))
simple("layer_norm_odd", lambda a: F.layer_norm(a, (1023,)), lambda: x(4096, 1023))
gradient("layer_norm_backward", lambda a, w, b: F.layer_norm(a, (1024,), w, b), rows, lambda: x(1024), lambda: x(1024))
gradient(
    "layer_norm_backward_tall",
    lambda a, w, b: F.layer_norm(a, (256,), w, b),
    lambda: x(100_000, 256),
    lambda: x(256),
    lambda: x(256),
)
simple("rms_norm", lambda a, w: F.rms_norm(a, (1024,), w), rows, lambda: x(1024))
gradient("rms_norm_backward", lambda a, w: F.rms_norm(a, (1024,), w), rows, lambda: x(1024))
simple("group_norm", lambda a, w, b: F.group_norm(a, 8, w, b), image, lambda: x(64), lambda: x(64))
gradient("group_norm_backward", lambda a, w, b: F.group_norm(a, 8, w, b), image, lambda: x(64), lambda: x(64))


def batch_norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        return F.batch_norm(a, x(64), x(64), w, b, training=True)


def last() -> torch.Tensor:
    return image().contiguous(memory_format=torch.channels_last)


simple("batch_norm", batch_norm, image, lambda: x(64), lambda: x(64))
simple("batch_norm_last", batch_norm, last, lambda: x(64), lambda: x(64))
gradient("batch_norm_backward", batch_norm, image, lambda: x(64), lambda: x(64))
gradient("batch_norm_backward_last", batch_norm, last, lambda: x(64), lambda: x(64))

# ---- losses ----
simple("cross_entropy", F.cross_entropy, tall, lambda: index(512))
gradient("cross_entropy_backward", F.cross_entropy, tall, lambda: index(512))
simple("cross_entropy_none", lambda a, i: F.cross_entropy(a, i, reduction="none"), tall, lambda: index(512))
simple("cross_entropy_images", F.cross_entropy, lambda: x(4, 21, 65, 65), lambda: index(4, 65, 65))
gradient("cross_entropy_images_backward", F.cross_entropy, lambda: x(4, 21, 65, 65), lambda: index(4, 65, 65))
simple("mse_loss", F.mse_loss, rows, rows)
gradient("mse_loss_backward", F.mse_loss, rows, rows)
simple("smooth_l1_loss", F.smooth_l1_loss, rows, rows)
simple("huber_loss", F.huber_loss, rows, rows)
simple("bce_loss", F.binary_cross_entropy, rows, rows)
gradient("bce_loss_backward", F.binary_cross_entropy, rows, rows)

# ---- products ----
simple("mm", torch.mm, lambda: half(4096, 1024), lambda: half(1024, 512))
simple("linear", F.linear, half_rows, lambda: half(3072, 1024), lambda: half(3072))
simple("linear_float", F.linear, rows, lambda: x(3072, 1024))
gradient("linear_backward", F.linear, half_rows, lambda: half(3072, 1024), lambda: half(3072))
simple("addmm_matrix", torch.addmm, lambda: half(4096, 512), lambda: half(4096, 1024), lambda: half(1024, 512))
simple("bmm", torch.bmm, lambda: half(32, 256, 64), lambda: half(32, 64, 128))
simple("baddbmm", torch.baddbmm, lambda: half(32, 256, 128), lambda: half(32, 256, 64), lambda: half(32, 64, 128))
simple("mm_strided", lambda a, b: a[:, ::2] @ b, lambda: half(4096, 2048), lambda: half(1024, 512))
simple(
    "einsum",
    lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b),
    lambda: half(4, 128, 8, 64),
    lambda: half(4, 128, 8, 64),
)
simple("mv", torch.mv, rows, lambda: x(1024))
simple("dot", torch.dot, lambda: x(100_000), lambda: x(100_000))

# ---- gathering and scattering ----
simple("embedding", F.embedding, lambda: index(4, 1024), lambda: x(50000, 512))
gradient("embedding_backward", lambda i, w: F.embedding(i, w), lambda: index(8, 1024), lambda: x(50000, 512))
gradient("embedding_backward_small", lambda i, w: F.embedding(i, w), lambda: index(2, 1024), lambda: x(50000, 512))
simple("index_select", lambda a, i: a.index_select(0, i), rows, lambda: index(2048))
simple("index_rows", lambda a, i: a[i], rows, lambda: index(2048))
simple("gather", lambda a, i: a.gather(1, i), rows, lambda: index(4096, 64))
gradient("gather_backward", lambda a, i: a.gather(1, i), rows, lambda: index(4096, 64))
simple("scatter_add", lambda a, i, s: a.scatter_add(1, i, s), rows, lambda: index(4096, 64), lambda: x(4096, 64))
simple("scatter", lambda a, i, s: a.scatter(1, i, s), rows, lambda: index(4096, 64), lambda: x(4096, 64))
simple("index_add", lambda a, i, s: a.index_add(0, i, s), rows, lambda: index(2048), lambda: x(2048, 1024))
simple("index_copy", lambda a, i, s: a.index_copy(0, i, s), rows, lambda: index(2048), lambda: x(2048, 1024))
simple("index_put", lambda a, i, s: a.index_put_((i,), s), rows, lambda: index(2048), lambda: x(2048, 1024))
simple(
    "index_put_adding",
    lambda a, i, s: a.index_put_((i,), s, accumulate=True),
    rows,
    lambda: index(2048),
    lambda: x(2048, 1024),
)
simple(
    "index_put_adding_many",
    lambda a, i, s: a.index_put_((i,), s, accumulate=True),
    rows,
    lambda: index(20000),
    lambda: x(20000, 1024),
)

# ---- sorting ----
simple("sort_short", lambda a: a.sort(-1), lambda: x(512, 1000))
simple("sort_long", lambda a: a.sort(-1), lambda: x(100_000))
simple("sort_segments", lambda a: a.sort(-1), tall)
simple("topk", lambda a: a.topk(8), rows)
simple("topk_long", lambda a: a.topk(8), lambda: x(4, 50000))
simple("cumsum", lambda a: a.cumsum(-1), rows)
simple("cumsum_flat", lambda a: a.cumsum(-1), lambda: x(100_000))
simple("multinomial", lambda a: a.multinomial(1), lambda: x(64, 500))

# ---- lists ----
PARAMETERS = [(1024, 1024), (1024,), (50000, 512), (4096, 1024)]


def tensors() -> list[torch.Tensor]:
    return [x(*sizes) for sizes in PARAMETERS]


simple("foreach_add", lambda a, b: torch._foreach_add(a, b), tensors, tensors)
simple("foreach_mul_in_place", lambda a: torch._foreach_mul_(a, 0.9), tensors)
simple("foreach_lerp", lambda a, b: torch._foreach_lerp_(a, b, 0.1), tensors, tensors)
simple("foreach_addcdiv", lambda a, b, c: torch._foreach_addcdiv_(a, b, c, -0.1), tensors, tensors, tensors)
simple(
    "foreach_addcmul_numbers",
    lambda a, b, c: torch._foreach_addcmul_(a, b, c),
    tensors,
    tensors,
    lambda: [x() for _ in PARAMETERS],
)
simple("foreach_sqrt", torch._foreach_sqrt, tensors)
simple("foreach_norm", torch._foreach_norm, tensors)
simple("foreach_zero", torch._foreach_zero_, tensors)
simple("foreach_copy", torch._foreach_copy_, tensors, tensors)
simple("foreach_mixed", torch._foreach_mul, tensors, lambda: [x(*sizes).bfloat16() for sizes in PARAMETERS])


@case
def fused_adamw() -> Callable[[], object]:
    parameters = [each.requires_grad_() for each in tensors()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    return optimizer.step


# ---- attention (which backend runs is chosen by the caller) ----
def heads() -> torch.Tensor:
    return half(4, 512, 8, 64).transpose(1, 2)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)


def efficient_with_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return efficient(q, k, v, dropout=0.1)


simple("flash", causal, heads, heads, heads)
gradient("flash_backward", causal, heads, heads, heads)
simple("efficient", efficient, heads, heads, heads)
gradient("efficient_backward", efficient, heads, heads, heads)
simple("efficient_dropout", efficient_with_dropout, heads, heads, heads)
gradient("efficient_dropout_backward", efficient_with_dropout, heads, heads, heads)

# ---- images ----
simple("max_pool", lambda a: F.max_pool2d(a, 3, 2, 1), image)
gradient("max_pool_backward", lambda a: F.max_pool2d(a, 3, 2, 1), image)
simple("avg_pool", lambda a: F.avg_pool2d(a, 2), image)
gradient("avg_pool_backward", lambda a: F.avg_pool2d(a, 2), image)
simple("adaptive_pool", lambda a: F.adaptive_avg_pool2d(a, 7), image)
gradient("adaptive_pool_backward", lambda a: F.adaptive_avg_pool2d(a, 7), image)
simple("upsample_nearest", lambda a: F.interpolate(a, scale_factor=2), image)
gradient("upsample_nearest_backward", lambda a: F.interpolate(a, scale_factor=2), image)
simple("upsample_bilinear", lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), image)
gradient("upsample_bilinear_backward", lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), image)

# ---- reads by the host ----
simple("item", lambda a: a.item(), lambda: x())
simple(
    "masked_select",
    lambda a, m: a.masked_select(m),
    rows,
    lambda: torch.ones(4096, 1024, dtype=torch.bool, device="cuda"),
)
