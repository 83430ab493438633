"""Four stages of torch.distributed.pipelining, one layer each, by one forward and one backward in turn."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH, MICROBATCHES = 1024, 16, 1024, 32000, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.inner(self.norm2(x))


def stage_of(place: int, stages: int) -> nn.Sequential:
    first = [nn.Embedding(VOCABULARY, WIDTH)] if place == 0 else []
    last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)] if place == stages - 1 else []
    return nn.Sequential(*first, Block(), *last)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)  # which thread frees the last gradient, and when, is by chance
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    place, stages = dist.get_rank(), dist.get_world_size()
    module = stage_of(place, stages).to(device, torch.float16)
    stage = PipelineStage(module, place, stages, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    for _ in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1)).to(device)
        if stage.is_first:
            schedule.step(batch[:, :-1].contiguous())
        elif stage.is_last:
            schedule.step(target=batch[:, 1:])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
