"""DistributedDataParallel in the ways people use it: `ddp.py VARIANT`."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

WIDTH = 256


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, 10)
        self.spare = nn.Linear(WIDTH, 10) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def register_hook(ddp: DDP, variant: str) -> None:
    if variant == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif variant == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif variant == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif variant == "custom":

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            tensor = bucket.buffer().div_(dist.get_world_size())
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0])

        ddp.register_comm_hook(None, hook)


def make_optimizer(ddp: DDP, variant: str) -> torch.optim.Optimizer:
    if variant == "zero":
        return ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    if variant == "zero_buckets":
        return ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, parameters_as_bucket_view=True
        )
    if variant == "zero_overlap":
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3
        )
        ddp.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer))
        return optimizer
    if variant == "local_sgd":
        return PostLocalSGDOptimizer(
            torch.optim.SGD(ddp.parameters(), lr=1e-3), PeriodicModelAverager(period=2, warmup_steps=1)
        )
    return torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def main(variant: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local) if variant == "eager" else None)
    model = Net(unused=variant == "unused").cuda()
    options = {
        "static": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
    }.get(variant, {})
    if variant == "syncbn":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp = DDP(model, device_ids=[local], **options)
    register_hook(ddp, variant)
    optimizer = make_optimizer(ddp, variant)
    joining = Join([ddp]) if variant == "join" else nullcontext()
    scaler = torch.amp.GradScaler("cuda", enabled=variant == "amp")
    with joining:
        for step in range(4 + dist.get_rank() if variant == "join" else 4):  # joining: ranks have more or less to do
            for micro in range(2 if variant == "no_sync" else 1):
                x = torch.randn(32, WIDTH, device="cuda")
                y = torch.randint(0, 10, (32,), device="cuda")
                quiet = ddp.no_sync() if variant == "no_sync" and micro == 0 else nullcontext()
                with quiet, torch.autocast("cuda", torch.float16, enabled=variant == "amp"):
                    loss = nn.functional.cross_entropy(ddp(x), y)
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if variant != "join":
                dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    if variant == "zero":
        optimizer.consolidate_state_dict()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
