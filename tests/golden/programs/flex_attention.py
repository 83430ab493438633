"""Attention over a sliding window by a compiled flex_attention, with grouped queries, between layers that are not compiled."""

import gc

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDTH, HEADS, KV_HEADS, CONTEXT, WINDOW, BATCH, LAYERS = 2048, 16, 4, 1024, 256, 4, 2
HEAD = WIDTH // HEADS


def window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q >= kv) & (q - kv < WINDOW)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD)
        self.attend = torch.compile(flex_attention)

    def forward(self, x: torch.Tensor, mask: object) -> torch.Tensor:
        inner = self.norm(x)
        parts = (self.q(inner), *self.kv(inner).chunk(2, -1))
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in parts)
        attended = self.attend(q, k, v, block_mask=mask, enable_gqa=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)  # which thread frees the last gradient, and when, is by chance
    torch.manual_seed(0)
    layers = nn.ModuleList(Attention() for _ in range(LAYERS)).to("cuda", torch.float16)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-4)
    mask = create_block_mask(window, None, None, CONTEXT, CONTEXT, device="cuda")
    for _ in range(3):
        gc.collect()  # what compiling leaves in cycles is freed whenever Python's collector comes by
        x = torch.randn(BATCH, CONTEXT, WIDTH, dtype=torch.float16).cuda()
        for layer in layers:
            x = layer(x, mask)
        x.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
