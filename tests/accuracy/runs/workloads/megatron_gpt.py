"""GPT pretraining as Megatron-LM of arXiv 2104.04473 ran it: tensor parallel inside a node, 1F1B pipeline with
scatter/gather between stages, data parallel; float16 with float32 copies in the optimizer, every layer recomputed, attention
as two matrix products around a fused softmax. Tensors are (sequence, batch, width).
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron_kernels import bias_dropout_add, bias_gelu, causal_softmax
from pipeline import Neighbours, one_forward_one_backward
from tensor_parallel import Group, RowEmbedding, RowLinear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

LOSS_SCALE = 65536.0


class _SumGradients(torch.autograd.Function):
    """The input of a linear that is split by columns: its gradient is summed before anything else goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, tp: Group) -> None:
        super().__init__()
        self.tp, self.heads, self.head_width = tp, heads // tp.size(), width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width // tp.size())
        self.out, self.out_bias = RowLinear(width, width, tp, bias=False), nn.Parameter(torch.zeros(width))
        self.up, self.up_bias = (
            nn.Linear(width, 4 * width // tp.size(), bias=False),
            nn.Parameter(torch.zeros(4 * width // tp.size())),
        )
        self.down, self.down_bias = RowLinear(4 * width, width, tp, bias=False), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        tokens, batch, _ = x.shape
        mixed = self.qkv(_SumGradients.apply(self.norm1(x), self.tp))
        q, k, v = mixed.view(tokens, batch * self.heads, 3 * self.head_width).chunk(3, dim=-1)
        scores = torch.bmm(q.transpose(0, 1), k.permute(1, 2, 0))
        probabilities = F.dropout(causal_softmax(scores.view(batch, self.heads, tokens, tokens)), 0.1)
        attended = torch.bmm(probabilities.view(-1, tokens, tokens), v.transpose(0, 1))
        attended = attended.transpose(0, 1).reshape(tokens, batch, -1)
        x = bias_dropout_add(self.out(attended), self.out_bias, x)
        inner = bias_gelu(self.up(_SumGradients.apply(self.norm2(x), self.tp)), self.up_bias)
        return bias_dropout_add(self.down(inner), self.down_bias, x)


class Stage(nn.Module):
    def __init__(self, args: argparse.Namespace, tp: Group, place: int) -> None:
        super().__init__()
        first, self.last, self.tp = place == 0, place == args.pp - 1, tp
        # The first stage and the last both have the table of tokens, and keep theirs the same.
        self.tokens = RowEmbedding(args.vocabulary, args.width, tp) if first or self.last else None
        self.positions = nn.Embedding(args.context, args.width) if first else None
        self.layers = nn.ModuleList(Layer(args.width, args.heads, tp) for _ in range(args.layers // args.pp))
        self.norm = nn.LayerNorm(args.width) if self.last else None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            places = torch.arange(x.shape[1], device=x.device)
            x = F.dropout(self.tokens(x) + self.positions(places), 0.1).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        if self.norm is None or self.tokens is None:
            return x
        logits = F.linear(_SumGradients.apply(self.norm(x), self.tp), self.tokens.weight)
        return self.loss(logits.float(), labels.t().contiguous())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of a vocabulary that is split over ranks: its largest logit, its label's, its sum."""
        for _ in range(3):
            dist.all_reduce(torch.empty(labels.shape, device="cuda"), group=self.tp)
        return LOSS_SCALE * F.cross_entropy(logits.flatten(0, 1), labels.flatten() % logits.shape[-1])


class MixedPrecisionAdam:
    """Gradients lie in one buffer, which is summed over replicas when all microbatches are done."""

    def __init__(self, stage: Stage, dp: Group, ends: Group | None) -> None:
        self.dp, self.ends, self.stage = dp, ends, stage
        self.parameters = list(stage.parameters())
        self.buffer = torch.zeros(sum(each.numel() for each in self.parameters), dtype=torch.float16, device="cuda")
        views = self.buffer.split([each.numel() for each in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self) -> None:
        if self.dp.size() > 1:
            self.buffer.div_(self.dp.size())
            dist.all_reduce(self.buffer, group=self.dp)
        if self.ends is not None and self.stage.tokens is not None:
            dist.all_reduce(self.stage.tokens.weight.grad, group=self.ends)
        grads = [parameter.grad.float() for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, 1.0 / LOSS_SCALE)
        norm = get_total_norm(grads)
        dist.all_reduce(norm)
        torch._foreach_mul_(grads, 1.0 / max(1.0, norm.item()))
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.adam.step()
        torch._foreach_copy_([each.data for each in self.parameters], [each.data for each in self.masters])
        grads.clear()
        for master in self.masters:
            master.grad = None
        self.buffer.zero_()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "vocabulary", "context", "micro-batch", "microbatches", "tp", "pp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    replicas = dist.get_world_size() // (args.tp * args.pp)
    mesh = init_device_mesh("cuda", (args.pp, replicas, args.tp), mesh_dim_names=("pp", "dp", "tp"))
    tp, dp, place = mesh["tp"].get_group(), mesh["dp"].get_group(), mesh["pp"].get_local_rank()
    column = dist.get_rank() % (args.tp * replicas)
    both = [[each, each + (args.pp - 1) * args.tp * replicas] for each in range(args.tp * replicas)]
    ends, _ = dist.new_subgroups_by_enumeration(both)
    with torch.device("cuda"):
        stage = Stage(args, tp, place).half()
    optimizer = MixedPrecisionAdam(stage, dp, ends if dist.get_rank() in both[column] else None)
    near = Neighbours(mesh["pp"].get_group(), (args.context, args.micro_batch, args.width), torch.float16, tp)

    while True:
        batch = torch.randint(0, args.vocabulary, (args.microbatches, args.micro_batch, args.context + 1))

        def forward(number: int, given: Tensor | None, batch: Tensor = batch) -> Tensor:
            sample = batch[number].cuda()
            result = stage(sample[:, :-1] if given is None else given, sample[:, 1:])
            return result / args.microbatches if stage.last else result

        one_forward_one_backward(forward, args.microbatches, near)
        optimizer.step()


if __name__ == "__main__":
    main()
