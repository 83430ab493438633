"""Fully sharded, with FullyShardedDataParallel: fsdp1.py VARIANT"""

import functools
import sys

import torch
from gpt import GPT, Block, loss_of, report, start
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

variant = sys.argv[1]
start()
bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
options = {
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "not_sharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": bf16},
    "original": {"use_orig_params": True},
    "original_bf16": {"use_orig_params": True, "mixed_precision": bf16, "forward_prefetch": True},
    "synced": {"sync_module_states": True, "limit_all_gathers": False},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
}.get(variant, {})
wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
fsdp = FSDP(GPT().cuda(), auto_wrap_policy=wrap, device_id=torch.cuda.current_device(), **options)
optimizer = torch.optim.AdamW(fsdp.parameters())
for step in range(3):
    loss_of(fsdp).backward()
    if variant in ("full", "bf16", "original"):
        fsdp.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step)
