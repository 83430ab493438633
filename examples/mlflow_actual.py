"""A small language model that records itself for MLflow: predicted by Maya, then trained for real, and compared.

    maya run --gpu h100 --mlflow -- python examples/mlflow_actual.py
    python examples/mlflow_actual.py            # on the GPUs; without a GPU, give --gpu h100
    maya compare

docs/mlflow.md explains every step.
"""

from __future__ import annotations

import argparse

import maya_mlflow
import torch
from torch import nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def train(width: int, layers: int, batch: int, length: int, steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Embedding(1024, width), *(Block(width, width // 32) for _ in range(layers)), nn.Linear(width, 1024)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 1024, (batch * steps, length + 1))
    for rows in DataLoader(tokens, batch_size=batch):
        rows = rows.to(device)
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 128), ("layers", 2), ("batch", 4), ("length", 64), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpu", help="the GPU that this machine represents, if the driver does not report one")
    asked = parser.parse_args()
    with maya_mlflow.record_actual(gpu=asked.gpu, steps=asked.steps - 5, warm_up=5):
        train(asked.width, asked.layers, asked.batch, asked.length, asked.steps)
