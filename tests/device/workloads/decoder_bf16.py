"""A decoder written in plain torch, in bfloat16: RMS norm, rotary positions, grouped heads, SwiGLU, tied weights, checkpointed layers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).type_as(x)


class Layer(nn.Module):
    def __init__(self, width: int = 768, heads: int = 6, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.head = heads, shared, width // heads
        self.before, self.between = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.head, bias=False)
        self.out, self.up, self.down = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 4096, bias=False),
            nn.Linear(2048, width, bias=False),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.before(x)).unflatten(-1, (-1, self.head)).transpose(1, 2)
        query, key, value = qkv.split([self.heads, self.shared, self.shared], 1)
        attended = scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


embedding, layers, norm = nn.Embedding(16000, 768), nn.ModuleList(Layer() for _ in range(3)), RMSNorm(768)
model = nn.ModuleList([embedding, layers, norm]).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    tokens = torch.randint(0, 16000, (3, 777)).cuda()
    angles = torch.outer(
        torch.arange(777, device="cuda").float(), 10000.0 ** (-torch.arange(0, 128, 2, device="cuda").float() / 128)
    )
    x = embedding(tokens)
    for layer in layers:
        x = checkpoint(layer, x, angles.cos(), angles.sin(), use_reentrant=False)
    logits = norm(x) @ embedding.weight.t()
    cross_entropy(logits[:, :-1].float().reshape(-1, 16000), tokens[:, 1:].reshape(-1)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
