"""Compiled training on the device `cuda`: training.py NAME [LAYERS]. Prints the peaks of each step as a JSON line; before the last step, a
copy of MARK bytes tells whoever looks at the kernels where it begins.
"""

import gc
import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MARK = 7919
STEPS = 3
SETTLE = 1.0  # s: a real NCCL's watchdog looks ten times a second for collectives that are over, and lets go of their tensors
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def llama_layers(count: int, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=count, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, attn_implementation="sdpa", use_cache=False, **settings,
    )  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length)).cuda()


def gpt2(layers: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, vocab_size=50304, attn_implementation="sdpa")).cuda()
    compiled, ids = torch.compile(model), tokens(50304, 8, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(_: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(model: nn.Module, forward, learning_rate: float = 1e-3, **options):
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, **options)

    def step(number: int) -> None:
        forward(number).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def llama(layers: int):
    model, ids = llama_layers(layers), tokens(32000, 4, 1024)
    model.compile()
    return train(model, lambda _: model(input_ids=ids, labels=ids).loss, fused=True)


def dynamic(layers: int):
    """Lengths that change from step to step: the second one is compiled again, for any length."""
    model, lengths = llama_layers(layers), (512, 768, 1024)
    compiled, ids = torch.compile(model), [tokens(32000, 4, length) for length in lengths]
    return train(model, lambda i: compiled(input_ids=ids[i], labels=ids[i]).loss, fused=True)


class Block(nn.Module):
    def __init__(self, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.skip = nn.Identity() if inner == out and stride == 1 else nn.Conv2d(inner, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet(layers: int):
    widths = [64, 64, 128, 256, 512][: layers + 1]
    blocks = [Block(inner, out, 1 if inner == out else 2) for inner, out in itertools.pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000),
    ).cuda()  # fmt: skip
    compiled = torch.compile(model)
    images, labels = torch.randn(32, 3, 224, 224).cuda(), torch.randint(0, 1000, (32,)).cuda()
    return train(model, lambda _: F.cross_entropy(compiled(images), labels), foreach=True)


class Decoder(nn.Module):
    """A decoder without a library: norms, attention, a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, layers: int, width: int = 1024, vocabulary: int = 16384, block: type = Decoder) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(block(width, 16) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def ddp(layers: int):
    from torch.nn.parallel import DistributedDataParallel

    model, ids = Model(layers).to(**BF16), tokens(16384, 4, 1024)
    compiled = torch.compile(DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]))
    return train(model, lambda _: compiled(ids), fused=True)


def fsdp2(layers: int):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, ids = Model(layers).cuda(), tokens(16384, 4, 1024)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return train(model, lambda _: model(ids), fused=True)


def adamw(layers: int):
    """The optimizer is compiled, the model is not."""
    model, ids = Model(layers).to(**BF16), tokens(16384, 4, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimize = torch.compile(optimizer.step)

    def step(_: int) -> None:
        model(ids).backward()
        optimize()
        optimizer.zero_grad()

    return step


def flex_attention(layers: int):
    from torch.nn.attention import flex_attention as flex

    def causal(b, h, q, kv):
        return q >= kv

    mask = flex.create_block_mask(causal, None, None, 1024, 1024, device="cuda")

    class Flexible(Decoder):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flex.flex_attention(q, k, v, block_mask=mask)

    model, ids = Model(layers, block=Flexible).to(**BF16), tokens(16384, 4, 1024)
    compiled = torch.compile(model)
    return train(model, lambda _: compiled(ids), fused=True)


def main() -> None:
    name, layers = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    torch.manual_seed(0)
    if name in ("ddp", "fsdp2"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    step = globals()[name](layers)
    for number in range(STEPS):
        gc.collect()  # what Python has not collected yet is not the step's; when it does is by chance
        torch.cuda.reset_peak_memory_stats()
        if number == STEPS - 1:
            torch.zeros(MARK, dtype=torch.uint8).cuda()
        step(number)
        torch.cuda.synchronize()
        time.sleep(SETTLE if dist.is_initialized() else 0)
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        print(json.dumps({"step": number, **peaks}), flush=True)


main()
