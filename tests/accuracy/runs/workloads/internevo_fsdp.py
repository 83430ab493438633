"""InternLM under InternEvo's FSDP: the parts of a layer are wrapped one by one, parameters and gradients are bfloat16, and
the optimizer keeps float32 copies of this rank's shards. Adam is torch 2.0's: all tensors at once, with temporaries of all.
"""

import argparse
import os

import torch
import torch.distributed as dist
from fused_kernels import RmsNorm
from internevo import LOSS_SCALE, Attention, FeedForward, InternLm, loss_of
from tensor_parallel import ColumnEmbedding, ColumnLinear, Group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import get_total_norm


class AdamW(torch.optim.Optimizer):
    """The steps of torch 2.0's foreach implementation."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})
        self.steps = 0
        self.means: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        tensors = group["params"]
        grads = [tensor.grad for tensor in tensors]
        if not self.steps:
            self.means = [torch.zeros_like(tensor) for tensor in tensors]
            self.squares = [torch.zeros_like(tensor) for tensor in tensors]
        self.steps += 1
        torch._foreach_mul_(tensors, 1 - group["lr"] * 0.01)
        torch._foreach_mul_(self.means, beta1)
        torch._foreach_add_(self.means, grads, alpha=1 - beta1)
        torch._foreach_mul_(self.squares, beta2)
        torch._foreach_addcmul_(self.squares, grads, grads, 1 - beta2)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, (1 - beta2**self.steps) ** 0.5)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(tensors, self.means, divisors, -group["lr"] / (1 - beta1**self.steps))


class ShardedAdam:
    def __init__(self, model: FullyShardedDataParallel, dp: Group) -> None:
        self.dp = dp
        self.shards = [parameter for parameter in model.parameters() if parameter.numel()]
        self.masters = [nn.Parameter(shard.data.float()) for shard in self.shards]
        self.adam = AdamW(self.masters, lr=1e-4, betas=(0.9, 0.95))

    def step(self) -> None:
        norm = get_total_norm([shard.grad for shard in self.shards if shard.grad is not None])
        dist.all_reduce(norm, group=self.dp)
        scale = LOSS_SCALE * max(1.0, norm.item() / LOSS_SCALE)
        for master, shard in zip(self.masters, self.shards, strict=True):
            master.grad = shard.grad.float() if shard.grad is not None else None
        for master in self.masters:
            if master.grad is not None:
                master.grad.mul_(1.0 / scale)
        self.adam.step()
        for master, shard in zip(self.masters, self.shards, strict=True):
            shard.grad = master.grad = None
            shard.data.copy_(master.data)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "inner", "vocabulary", "context", "micro-batch", "accumulate", "tp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):  # all of it on every GPU, before it is sharded
        model = InternLm(args, tp)
    torch.set_default_dtype(torch.float32)
    sharded = FullyShardedDataParallel(
        model,
        process_group=dp,
        auto_wrap_policy=ModuleWrapPolicy({ColumnEmbedding, Attention, RmsNorm, FeedForward, ColumnLinear}),
        forward_prefetch=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    optimizer = ShardedAdam(sharded, dp)
    while True:
        batch = torch.randint(0, args.vocabulary, (args.accumulate, args.micro_batch, args.context + 1)).cuda()
        for sample in batch:
            loss_of(sharded(sample[:, :-1]), sample[:, 1:], tp).div(args.accumulate).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
