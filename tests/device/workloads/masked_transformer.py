"""nn.MultiheadAttention with padding and causal masks, in the sequence-first layout; smoothed labels, a padding index."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(512, 8, dropout=0.1, batch_first=True)
        self.first, self.second = nn.LayerNorm(512), nn.LayerNorm(512)
        self.feed = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512))

    def forward(self, x: torch.Tensor, padding: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, attn_mask=causal, need_weights=False)[0]
        return x + self.feed(self.second(x))


embedding, position = nn.Embedding(8000, 512, padding_idx=0).cuda(), nn.Embedding(257, 512).cuda()
layers, head = nn.ModuleList(Layer() for _ in range(2)).cuda(), nn.Linear(512, 8000).cuda()
parameters = [p for module in (embedding, position, layers, head) for p in module.parameters()]
optimizer = torch.optim.AdamW(parameters)
for _ in range(3):
    tokens = torch.randint(1, 8000, (16, 257)).cuda()
    causal = torch.triu(torch.ones(257, 257, dtype=torch.bool, device="cuda"), 1)
    x = embedding(tokens) + position(torch.arange(257, device="cuda").expand(16, -1))
    for layer in layers:
        x = layer(x, tokens == 0, causal)
    loss = nn.functional.cross_entropy(
        head(x)[:, :-1].reshape(-1, 8000), tokens[:, 1:].reshape(-1), ignore_index=0, label_smoothing=0.1
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
