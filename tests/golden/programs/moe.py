"""A mixture of experts on one GPU: tokens go to the best two of eight experts, sorted by expert, in grouped products."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, INNER, HEADS, EXPERTS, TOP_K, LAYERS, CONTEXT, VOCABULARY, BATCH = 1024, 2816, 16, 8, 2, 2, 1024, 32000, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(0.02 * torch.randn(EXPERTS, INNER, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        weights, chosen = scores.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ones = torch.ones_like(weights.flatten())
        counts = torch.zeros(EXPERTS, device=x.device).scatter_add(0, chosen.flatten(), ones)
        ends = counts.cumsum(0).to(torch.int32)
        given = tokens[order // TOP_K]
        gate = torch._grouped_mm(given, self.gate.transpose(1, 2), offs=ends)
        up = torch._grouped_mm(given, self.up.transpose(1, 2), offs=ends)
        done = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        done = done * weights.flatten()[order].unsqueeze(-1).type_as(done)
        out = torch.zeros_like(tokens).index_add(0, order // TOP_K, done)
        balance = EXPERTS * (scores.mean(0) * counts / counts.sum()).sum()
        return out.view_as(x), balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        done, balance = self.experts(self.norm2(x))
        return x + done, balance


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, balances = self.tokens(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).sum()


def main() -> None:
    torch.manual_seed(0)
    model = Moe().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1)).cuda()
        logits, balance = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) + 0.01 * balance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
