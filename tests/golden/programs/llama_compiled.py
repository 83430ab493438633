"""A Llama of two layers under torch.compile, in bfloat16 with a fused AdamW."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, LAYERS, CONTEXT, VOCABULARY, BATCH = 1024, 16, 2816, 2, 1024, 32000, 4
HEAD = WIDTH // HEADS


def rotated(x: torch.Tensor) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2, device=x.device).float() / HEAD)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), frequencies)
    one, two = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).type_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(tokens))))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    torch.manual_seed(0)
    model = Llama().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled = torch.compile(model)
    for _ in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1)).cuda()
        compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
