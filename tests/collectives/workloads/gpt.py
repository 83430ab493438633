"""The model of the scripts in this folder, and their output."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

VOCABULARY, LENGTH, BATCH = 16000, 512, 4


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        # as many heads as the projections give: a part of them where they are split over ranks
        split = [
            p(normed).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        ]
        x = x + self.out(scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))

    def reset_parameters(self) -> None:
        pass  # FSDP1 asks for it of modules it takes from the meta device


class GPT(nn.Module):
    def __init__(self, layers: int = 6, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH)).cuda()  # as a data loader brings it: from the host
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def start() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def let_the_watchdog_look() -> None:
    """Ten times a second a thread of NCCL's process groups notes which works have ended; the next call then lets go of
    tensors of works that nobody waits for. Steps without GPUs are shorter than that."""
    time.sleep(0.25)


def report(step: int) -> None:
    let_the_watchdog_look()
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps({"step": step, **peaks}), flush=True)
