"""MPT pretraining as llm-foundry's benchmarks ran it: FSDP of every block, composer's microbatches, DecoupledAdamW.

Positions are learned and linears have biases: that is what the published parameter counts say. Composer reduces gradients
with every microbatch (no `no_sync` for FSDP), in float32 for mixed precision DEFAULT and in bfloat16 for PURE.
"""

import argparse
import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from fused_kernels import cross_entropy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Stays in bfloat16 where autocast would go to float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return super().forward(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = LowPrecisionLayerNorm(width), LowPrecisionLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.transpose(1, 2) for part in self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).unbind(2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mpt(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = LowPrecisionLayerNorm(args.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class DecoupledAdamW(torch.optim.Optimizer):
    """Tensor by tensor, one small kernel after the other, as composer's is."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
                state["step"] += 1
                state["mean"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                root = (state["square"].sqrt() / math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
                parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "vocabulary", "context", "micro-batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mixed-precision", choices=["DEFAULT", "PURE"], required=True)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")

    def initialize(module: nn.Module) -> None:
        module.to_empty(device="cuda", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02)

    with torch.device("meta"):
        model = Mpt(args)
    half = torch.bfloat16
    reduced = torch.float32 if args.mixed_precision == "DEFAULT" else half
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=reduced, buffer_dtype=half),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        param_init_fn=initialize,
        device_id=torch.cuda.current_device(),
    )
    if args.recompute == "full":
        apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    optimizer = DecoupledAdamW(sharded.parameters(), lr=1e-4)

    samples = args.micro_batch * args.accumulate
    while True:
        batch = torch.randint(0, args.vocabulary, (samples, args.context)).pin_memory().to("cuda", non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        for ids in batch.split(args.micro_batch):
            with torch.autocast("cuda", torch.bfloat16):
                logits = sharded(ids)
                labels = torch.roll(ids, shifts=-1)
                labels[:, -1] = -100
                losses = cross_entropy(logits.view(-1, args.vocabulary), labels.view(-1))
                loss = losses.sum() / (labels != -100).sum()
            (loss * (len(ids) / samples)).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
