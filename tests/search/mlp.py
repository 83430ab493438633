"""A program for recipes of the tests: a small network whose activations are as large as it is told. Ends at once."""

from __future__ import annotations

import argparse

import torch
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()

if args.fail:
    raise ValueError("this program was told to fail")
layers = torch.nn.ModuleList(
    torch.nn.Sequential(torch.nn.Linear(args.width, args.width), torch.nn.GELU()) for _ in range(6)
).cuda()
optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
for _ in range(4):
    for _ in range(args.accumulate):
        x = torch.ones(args.batch, args.width, device="cuda", requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if args.recompute else layer(x)
        x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
