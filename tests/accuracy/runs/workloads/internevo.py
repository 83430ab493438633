"""InternLM pretraining as InternEvo ran it when its performance tables were made: Megatron tensor parallelism without
sequence parallelism, and its Hybrid Zero optimizer (whole parameters are dealt out to the ranks of a ZeRO group, gradients
are summed in buckets of 512 Mi elements during the last microbatch's backward, updated parameters are broadcast by their
owners).
"""

import argparse
import os

import torch
import torch.distributed as dist
from fused_kernels import RmsNorm, cross_entropy, rotary
from tensor_parallel import ColumnEmbedding, ColumnLinear, Group, RowLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

BUCKET = 512 * 1024 * 1024  # elements
LOSS_SCALE = 65536.0


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int, tp: Group) -> None:
        super().__init__()
        self.heads, self.head_width = heads // tp.size(), width // heads
        self.qkv, self.out = ColumnLinear(width, 3 * width, tp), RowLinear(width, width, tp)
        angles = torch.empty(context, self.head_width // 2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles, persistent=False)
        self.register_buffer("sin", torch.empty_like(angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, self.head_width).unbind(2)
        q, k = rotary(q, self.cos, self.sin), rotary(k, self.cos, self.sin)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int, tp: Group) -> None:
        super().__init__()
        self.gate, self.up = ColumnLinear(width, inner, tp, bias=False), ColumnLinear(width, inner, tp, bias=False)
        self.down = RowLinear(inner, width, tp, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Where the layer itself is not recomputed, its norms are."""

    def __init__(self, args: argparse.Namespace, tp: Group) -> None:
        super().__init__()
        self.recompute = args.recompute == "full"
        self.norm1, self.norm2 = RmsNorm(args.width), RmsNorm(args.width)
        self.attention = Attention(args.width, args.heads, args.context, tp)
        self.mlp = FeedForward(args.width, args.inner, tp)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=True) if self.recompute else self.layer(x)

    def layer(self, x: Tensor) -> Tensor:
        def normed(residual: Tensor) -> Tensor:
            return self.norm1(residual.float())

        def added_and_normed(residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            residual = x + residual
            return residual, self.norm2(residual.float())

        if self.recompute:
            residual, x = added_and_normed(x, self.attention(normed(x)))
        else:
            attended = self.attention(checkpoint(normed, x, use_reentrant=True))
            residual, x = checkpoint(added_and_normed, x, attended, use_reentrant=True)
        return self.mlp(x) + residual


class InternLm(nn.Module):
    def __init__(self, args: argparse.Namespace, tp: Group) -> None:
        super().__init__()
        self.embedding = ColumnEmbedding(args.vocabulary, args.width, tp)
        self.layers = nn.ModuleList(Layer(args, tp) for _ in range(args.layers))
        self.norm = RmsNorm(args.width)
        self.head = ColumnLinear(args.width, args.vocabulary, tp, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.float()))


class HybridZero:
    """bfloat16 parameters on every rank; float32 copies and Adam's state of those that this rank owns."""

    def __init__(self, model: nn.Module, dp: Group, zero: Group) -> None:
        self.dp, self.zero, self.reducing = dp, zero, False
        self.parameters = list(model.parameters())
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(zero.size())]
        filled = [0] * zero.size()
        for parameter in sorted(self.parameters, key=lambda each: each.numel(), reverse=True):
            owner = filled.index(min(filled))
            self.owned[owner].append(parameter)
            filled[owner] += parameter.numel()
        self.flat = []
        for parameters in filter(None, self.owned):
            flat = torch.cat([parameter.data.flatten() for parameter in parameters])
            views = flat.split([parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                parameter.data = view.view_as(parameter)
            self.flat.append(flat)
        self.mine = zero.rank() if zero.rank() < len(self.flat) else None
        if self.mine is not None:
            self.master = nn.Parameter(self.flat[self.mine].float())
            self.adam = torch.optim.AdamW([self.master], lr=1e-4, betas=(0.9, 0.95), foreach=False)
        self.bucket: list[nn.Parameter] = []
        self.stream = torch.cuda.Stream()
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: nn.Parameter) -> None:
        if not self.reducing:
            return
        if sum(each.numel() for each in self.bucket) + parameter.numel() > BUCKET:
            self._reduce()
        self.bucket.append(parameter)

    def _reduce(self) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            grads = [parameter.grad for parameter in self.bucket if parameter.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            if self.dp.size() > 1:
                dist.all_reduce(flat.div_(self.dp.size()), group=self.dp)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self.bucket = []

    def step(self) -> None:
        self._reduce()
        torch.cuda.synchronize()
        own = self.owned[self.zero.rank()]
        grads = [parameter.grad for parameter in own if parameter.grad is not None]
        norm = get_total_norm(grads) if own else torch.zeros((), device="cuda")
        dist.all_reduce(norm, group=self.dp)
        scale = LOSS_SCALE * max(1.0, norm.item() / LOSS_SCALE)
        for parameter in self.parameters:
            parameter.grad = None
        if self.mine is not None:
            flat = torch.cat([grad.flatten() for grad in grads])
            grads.clear()
            self.master.grad = flat.float()
            del flat
            self.master.grad.mul_(1.0 / scale)
            self.adam.step()
            self.master.grad = None
            self.flat[self.mine].copy_(self.master.data)
        if self.zero.size() > 1:
            sent = [
                dist.broadcast(flat, group=self.zero, group_src=owner, async_op=True)
                for owner, flat in enumerate(self.flat)
            ]
            for handle in sent:
                handle.wait()


def loss_of(logits: Tensor, labels: Tensor, tp: Group) -> Tensor:
    """Scaled; logits go to float32 on leaving the model."""
    losses = cross_entropy(logits.float().flatten(0, -2), labels.flatten())
    if tp.size() > 1:  # the ranks' parts of the vocabulary: sums of exponentials, then the label's logit
        for _ in range(2):
            dist.all_reduce(losses.detach(), group=tp)
    return LOSS_SCALE * losses.mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "inner", "vocabulary", "context", "micro-batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--zero", type=int, help="ranks that share the optimizer's state; all of a replica's by default"
    )
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    replicas = dist.get_world_size() // args.tp
    zero = args.zero or replicas
    mesh = init_device_mesh("cuda", (replicas // zero, zero, args.tp), mesh_dim_names=("outer", "zero", "tp"))
    tp, inner = mesh["tp"].get_group(), mesh["zero"].get_group()
    dp = mesh["outer", "zero"]._flatten("dp").get_group()

    with torch.device("cuda"):
        model = InternLm(args, tp).bfloat16()
    optimizer = HybridZero(model, dp, inner)

    while True:
        batch = torch.randint(0, args.vocabulary, (args.accumulate, args.micro_batch, args.context + 1)).cuda()
        for index, sample in enumerate(batch):
            optimizer.reducing = index == args.accumulate - 1
            loss_of(model(sample[:, :-1]), sample[:, 1:], tp).div(args.accumulate).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
