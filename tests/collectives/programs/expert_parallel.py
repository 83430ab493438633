"""A mixture of experts over all ranks: ranks exchange token counts, the host reads them, and tokens are sent unevenly.
`expert_parallel.py names`: ranks exchange their names first, as many programs do."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

DIM, EXPERTS_PER_RANK, TOP_K, TOKENS = 128, 2, 2, 256


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = nn.Linear(DIM, EXPERTS_PER_RANK * self.ranks, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(EXPERTS_PER_RANK)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        per_expert = torch.bincount(chosen.flatten(), minlength=EXPERTS_PER_RANK * self.ranks)
        incoming = torch.empty_like(per_expert)
        dist.all_to_all_single(incoming, per_expert)
        send = per_expert.view(self.ranks, -1).sum(1).tolist()
        receive = incoming.view(self.ranks, -1).sum(1).tolist()
        tokens = x[order // TOP_K]
        arrived = all_to_all_single(tokens.new_empty(sum(receive), DIM), tokens, receive, send)
        counts = incoming.view(self.ranks, EXPERTS_PER_RANK)
        owner = torch.arange(EXPERTS_PER_RANK, device=x.device).repeat(self.ranks).repeat_interleave(counts.flatten())
        done = torch.empty_like(arrived)
        for number, expert in enumerate(self.experts):
            mine = (owner == number).nonzero().squeeze(-1)
            done = done.index_copy(0, mine, expert(arrived[mine]))
        back = all_to_all_single(tokens.new_empty(sum(send), DIM), done, send, receive)
        out = torch.zeros_like(back).index_copy(0, order, back)
        return (out.view(-1, TOP_K, DIM) * weights.unsqueeze(-1)).sum(1)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    if sys.argv[1:] == ["names"]:
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, f"worker-{dist.get_rank()}")
    model = nn.Sequential(nn.Linear(DIM, DIM), MoE(), nn.Linear(DIM, DIM)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        x = torch.randn(TOKENS, DIM, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
