"""Data parallel: ddp.py VARIANT"""

import sys
from contextlib import nullcontext

import torch
from gpt import GPT, let_the_watchdog_look, loss_of, report, start
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

variant = sys.argv[1]
start()
model = GPT().cuda()
if variant == "unused":
    model.spare = torch.nn.Linear(1024, 1024).cuda()
options = {
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "small_buckets": {"bucket_cap_mb": 5, "gradient_as_bucket_view": True},
}
ddp = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], **options.get(variant, {}))


def compress(group: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    let_the_watchdog_look()
    return default_hooks.bf16_compress_hook(group, bucket)


if variant == "bf16_hook":
    ddp.register_comm_hook(None, compress)
optimizer = torch.optim.AdamW(ddp.parameters(), fused=variant == "autocast")
for step in range(3):
    for micro in range(3 if variant == "no_sync" else 1):
        with ddp.no_sync() if variant == "no_sync" and micro < 2 else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=variant == "autocast"):
                loss = loss_of(ddp)
            loss.backward()
    if variant == "clipped":
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    report(step)
