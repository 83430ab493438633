"""How fast the emulated device is, against torch's own FakeTensorMode in the same run, and how much host memory it takes.

    make bench        (or: python tests/benchmarks/bench_device.py)

Ratios, not wall-clock times, are what to compare between machines. Not a test: nothing here fails.
"""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import maya_core
from maya_core.trace import read_trace
from maya_core.trace.schema import EventKind

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (p(normed).view(batch, tokens, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., self.size // 2 :], t[..., : self.size // 2]), -1) * sin for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, tokens, -1))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, inner: int, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.size = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * torch.ones(
            self.size, device=tokens.device
        )
        x, cos, sin = self.embed(tokens), angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def stepper(model: nn.Module, tokens: torch.Tensor, **optimizer: bool) -> Callable[[], None]:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], None], times: int) -> float:
    step()
    step()
    gc.collect()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def gpt2_step(times: int) -> float:
    with torch.device("cuda"):
        model = GPT(12, 768, 12, vocabulary=50304, context=1024)
        tokens = torch.randint(0, 50304, (8, 1025))
    return seconds(stepper(model, tokens, foreach=True), times)


def compare_with_fake_tensors(table: Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with maya_core.emulate("h100", out=folder) as job:
            ours = gpt2_step(times=15)
        ops = int((job.trace.step(job.trace.steps)["kind"] == EventKind.OP).sum())
        path = next(Path(folder, "latest").glob("*.trace"))
        per_op = path.stat().st_size / len(read_trace(path).ops)
    with maya_core.emulate("h100"), FakeTensorMode():
        fake = gpt2_step(times=5)
    table.add_row("GPT-2 step, emulated", f"{ours * 1e3:.1f} ms", f"{ops} ops, {ours / ops * 1e6:.1f} us an op")
    table.add_row("GPT-2 step, FakeTensorMode", f"{fake * 1e3:.1f} ms", f"[bold]{fake / ours:.0f} times slower[/bold]")
    table.add_row("trace on disk", f"{per_op:.0f} bytes", "per op, all its events included")


def llama_7b_step(table: Table) -> None:
    with maya_core.emulate("h100", gpus_per_node=1), torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Llama(32, 4096, 32, 32, 11008)
        torch.set_default_dtype(torch.float32)
        tokens = torch.randint(0, 32000, (1, 2049))
        taken = seconds(stepper(model, tokens, fused=True), times=5)
    table.add_row("Llama-7B step, emulated", f"{taken * 1e3:.0f} ms", "32 layers, 2048 tokens, fused AdamW")


SEVENTY_B = """
import resource, sys
sys.path.insert(0, {here!r})
from bench_device import *
from maya_core.hardware import catalog
huge = catalog.find_gpu("h100").model_copy(update={{"name": "huge", "memory_bytes": 2 * 2**40}})
catalog.gpus()["huge"] = huge
with maya_core.emulate("huge"), torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = Llama(80, 8192, 64, 8, 28672, vocabulary=128256)
    step = stepper(model, torch.randint(0, 128256, (1, 4097)), fused=True)
    step(); step()
print(sum(p.numel() for p in model.parameters()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def seventy_b_memory(table: Table) -> None:
    """In a process of its own, on a GPU large enough to hold it whole."""
    code = SEVENTY_B.format(here=str(Path(__file__).parent))
    parameters, rss = map(
        int, subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    table.add_row(
        "Llama-70B, two steps", f"{rss / 1e9:.2f} GB", f"host memory, {parameters / 1e9:.1f} B parameters, 80 layers"
    )


def main() -> None:
    table = Table(title=f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    for heading in ("what", "measured", ""):
        table.add_column(heading)
    compare_with_fake_tensors(table)
    llama_7b_step(table)
    seventy_b_memory(table)
    table.add_row(
        "this process", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB", "host memory at most"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
