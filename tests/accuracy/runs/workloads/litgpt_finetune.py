"""Fine-tuning on Alpaca as litgpt did when its resource tables were made (commit 8641822): LoRA of queries and values, or
LLaMA-Adapter (v1, v2), in bfloat16, on one GPU or under FSDP with every block recomputed.

The first microbatch holds the longest sample of the data set, so that memory runs out at once if it does; later ones are
as short as Alpaca's usually are. Two microbatches reach the peak: gradients of the first are there in the second.
"""

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

USUAL_TOKENS = 256
CHUNK = 128  # tokens whose logits are computed together


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int  # padded
    rotary: float  # share of a head
    llama: bool  # RMSNorm, gated MLP, no biases, one residual after the other
    shared_norm: bool = False
    head_bias: bool = False


SHAPES = {
    "phi-1.5": Shape(24, 2048, 32, 8192, 51200, 0.5, llama=False, shared_norm=True, head_bias=True),
    "StableLM-Alpha-3B": Shape(16, 4096, 32, 16384, 50688, 0.25, llama=False),
    "Llama-2-7B": Shape(32, 4096, 32, 11008, 32000, 1.0, llama=True),
    "Llama-2-13B": Shape(40, 5120, 40, 13824, 32000, 1.0, llama=True),
}


class RmsNorm(nn.Module):
    """In plain ops and in the precision of its input, as litgpt's was."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5))


class AdapterLinear(nn.Module):
    """Adapter v2: a trained bias and scale."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.adapter_bias, self.adapter_scale = nn.Parameter(torch.zeros(outputs)), nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter_scale * (self.linear(x) + self.adapter_bias)


class LoraQkv(nn.Module):
    """Queries and values get an update of rank 8, keys none."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.lora_a, self.lora_b = nn.Parameter(torch.zeros(16, width)), nn.Parameter(torch.zeros(2 * width, 8))
        self.dropout = nn.Dropout(0.05)
        self.places = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x: Tensor) -> Tensor:
        after_a = F.linear(self.dropout(x), self.lora_a)
        update = F.conv1d(after_a.transpose(-2, -1), self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        update = update.transpose(0, 1)
        padded = update.new_zeros((*update.shape[:-1], 3 * x.shape[-1])).view(-1, 3 * x.shape[-1])
        places = torch.tensor(self.places, device=x.device)
        padded = padded.index_copy(1, places, update.reshape(-1, 2 * x.shape[-1]))
        padded = padded.view(*update.shape[:-1], 3 * x.shape[-1]).transpose(0, 1)
        return self.linear(x) + padded * 2.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return ((x * cos) + (torch.cat((-second, first), dim=-1) * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int) -> None:
        super().__init__()
        self.shape, bias = shape, not shape.llama
        linear = AdapterLinear if method == "adapter_v2" else nn.Linear
        self.qkv = LoraQkv(shape.width, bias) if method == "lora" else linear(shape.width, 3 * shape.width, bias=bias)
        self.out = linear(shape.width, shape.width, bias=bias)
        self.adapted = method != "lora" and index >= 2
        if self.adapted:
            self.adapter_prompt = nn.Parameter(torch.empty(10, shape.width))
            self.adapter_gate = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, self.shape.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(batch, self.shape.heads, tokens, -1) for part in qkv.split(1, dim=2))
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads_of(x)
        rotated = cos.shape[-1]
        q = torch.cat((rotate(q[..., :rotated], cos, sin), q[..., rotated:]), dim=-1)
        k = torch.cat((rotate(k[..., :rotated], cos, sin), k[..., rotated:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.adapted:
            _, ak, av = self.heads_of(self.adapter_prompt.unsqueeze(0))
            everything = torch.ones(q.shape[2], ak.shape[2], dtype=torch.bool, device=x.device)
            y = y + self.adapter_gate * F.scaled_dot_product_attention(q, ak, av, attn_mask=everything).transpose(1, 2)
        return self.out(y.reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, shape: Shape, method: str) -> None:
        super().__init__()
        linear = AdapterLinear if method == "adapter_v2" else nn.Linear
        self.up = linear(shape.width, shape.inner, bias=not shape.llama)
        self.gate = linear(shape.width, shape.inner, bias=False) if shape.llama else None
        self.down = linear(shape.inner, shape.width, bias=not shape.llama)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int) -> None:
        super().__init__()
        norm = RmsNorm if shape.llama else nn.LayerNorm
        self.norm1 = norm(shape.width)
        self.norm2 = None if shape.shared_norm else norm(shape.width)
        self.attention, self.mlp, self.llama = Attention(shape, method, index), Mlp(shape, method), shape.llama

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, cos, sin)
        if self.llama and self.norm2 is not None:
            x = x + attended
            return x + self.mlp(self.norm2(x))
        return x + attended + self.mlp(normed if self.norm2 is None else self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, shape: Shape, method: str) -> None:
        super().__init__()
        linear = AdapterLinear if method == "adapter_v2" else nn.Linear
        self.head = linear(shape.width, shape.vocabulary, bias=shape.head_bias)
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, method, index) for index in range(shape.layers))
        self.norm = (RmsNorm if shape.llama else nn.LayerNorm)(shape.width)
        self.rotated = int(shape.rotary * shape.width / shape.heads)

    def forward(self, ids: Tensor) -> list[Tensor]:
        angles = torch.ones(
            2, ids.shape[1], self.rotated, dtype=torch.float32, device=ids.device
        )  # as litgpt's cache was
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, *angles)
        # Fabric gives outputs of a bfloat16 model back in float32.
        return [part.float() for part in [self.head(part) for part in self.norm(x).split(CHUNK, dim=1)]]


def is_trained(name: str, method: str) -> bool:
    if method == "lora":
        return "lora_" in name
    return "adapter_" in name or (method == "adapter_v2" and "norm" in name)


def shard(model: Gpt) -> FullyShardedDataParallel:
    def initialize(module: nn.Module) -> None:
        module.to_empty(device="cuda", recurse=False)

    half = torch.bfloat16
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half),
        device_id=torch.cuda.current_device(),
        param_init_fn=initialize,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    return sharded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--method", choices=["lora", "adapter", "adapter_v2"], required=True)
    for name in ("longest", "micro-batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()

    distributed = "LOCAL_RANK" in os.environ
    if distributed:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta" if distributed else "cuda"):
        module = Gpt(SHAPES[args.model], args.method)
    weights = {
        name: torch.empty(parameter.shape)
        for name, parameter in module.named_parameters()
        if not is_trained(name, args.method)
    }
    for name, parameter in module.named_parameters():
        parameter.requires_grad = is_trained(name, args.method)
    model: Gpt | FullyShardedDataParallel = module
    if distributed:
        model = sharded = shard(module)
        with FullyShardedDataParallel.state_dict_type(
            sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=False)
        ):
            sharded.load_state_dict(weights, strict=False)
    else:
        model.load_state_dict(weights, strict=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)

    microbatches = 2
    while True:
        for index in range(microbatches):
            tokens = args.longest if index == 0 else USUAL_TOKENS
            ids = torch.randint(0, 1000, (args.micro_batch, tokens)).pin_memory().to("cuda", non_blocking=True)
            last = index == microbatches - 1
            with model.no_sync() if isinstance(model, FullyShardedDataParallel) and not last else nullcontext():
                logits = model(ids)
                logits[-1] = logits[-1][..., :-1, :]
                targets = ids[..., 1:].split(CHUNK, dim=1)
                losses = [
                    F.cross_entropy(part.reshape(-1, part.size(-1)), target.reshape(-1), reduction="none")
                    for part, target in zip(logits, targets, strict=True)
                ]
                (torch.cat(losses).mean() / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
