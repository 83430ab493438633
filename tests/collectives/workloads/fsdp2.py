"""Fully sharded, with fully_shard: fsdp2.py VARIANT"""

import sys

import torch
from gpt import GPT, loss_of, report, start
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

variant = sys.argv[1]
start()
options = {
    "kept": {"reshard_after_forward": False},
    "resharded_by_4": {"reshard_after_forward": 4},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16_all": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "meta": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded_pinned": {"offload_policy": CPUOffloadPolicy()},
    "accumulated": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}.get(variant, {})
if variant.startswith("hybrid"):
    options["mesh"] = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicas", "shards"))
with torch.device("meta" if variant in ("meta", "checkpointed") else "cuda"):
    model = GPT()
for block in model.blocks:
    if variant == "checkpointed":
        checkpoint(block)
    fully_shard(block, **options)
fully_shard(model, **options)
if variant in ("meta", "checkpointed"):
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
if variant == "prefetched":
    blocks = list(model.blocks)
    for here, after in zip(blocks, blocks[2:], strict=False):
        here.set_modules_to_forward_prefetch([after])
    for here, before in zip(blocks[2:], blocks, strict=False):
        here.set_modules_to_backward_prefetch([before])
optimizer = torch.optim.AdamW(
    model.parameters(), **{"fused": {"fused": True}, "foreach": {"foreach": True}}.get(variant, {})
)
micros = 3 if variant in ("accumulated", "hybrid_accumulated") else 1
for step in range(3):
    for micro in range(micros):
        if micros > 1:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(micro == micros - 1)
        loss_of(model).backward()
    if variant in ("clipped", "hybrid", "meta"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step)
