"""torch.distributed.pipelining over a Llama, with data and tensor parallelism or without: `pipeline.py SCHEDULE [DP] [TP]`."""

import os
import sys

import torch
import torch.distributed as dist
from llama import Args, Llama
from tensor_parallel import apply_tp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules
from torch.nn import functional as F

STEPS, MICROBATCHES, BATCH, LAYERS = 2, 8, 8, 8


def stage_module(index: int, stages: int) -> Llama:
    """The model with only that stage's layers, as torchtitan cuts it."""
    model = Llama(Args(layers=LAYERS))
    first, last = LAYERS * index // stages, LAYERS * (index + 1) // stages
    for name in list(model.layers):
        if not first <= int(name) < last:
            del model.layers[name]
    if index > 0:
        model.tok_embeddings = None
    if index < stages - 1:
        model.norm = None
        model.output = None
    return model


def loss_function(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main(name: str, dp: int, tp: int) -> None:
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if name.endswith("Eager") else None)
    name = name.removesuffix("Eager")
    torch.manual_seed(0)
    pp = dist.get_world_size() // dp // tp
    mesh = init_device_mesh("cuda", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    if name == "Tracer":
        model = Llama(Args(layers=LAYERS))
        example = torch.randint(0, 1024, (BATCH // MICROBATCHES, 128))
        split = {f"layers.{LAYERS * index // pp}": SplitPoint.BEGINNING for index in range(1, pp)}
        pipe = pipeline(model, mb_args=(example,), split_spec=split)
        stages = [pipe.build_stage(rank, device, group)]
        schedule = schedules.ScheduleGPipe(stages[0], MICROBATCHES, loss_fn=loss_function)
    else:
        kind = schedules.get_schedule_class(name)
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        count = 2 * pp if several else pp
        if name in ("ZBVZeroBubble", "DualPipeV"):
            mine = [rank, count - 1 - rank]
        else:
            mine = [rank, rank + pp] if several else [rank]
        stages = []
        for index in mine:
            module = stage_module(index, count).to(device)
            if tp > 1:
                apply_tp(module, mesh["tp"], sequence=False, loss_is_parallel=False)
            if dp > 1:
                for layer in module.layers.values():
                    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
            stages.append(PipelineStage(module, index, count, device, group=group))
        schedule = kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss_function)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    for step in range(STEPS):
        tokens = torch.randint(0, 1024, (BATCH, 129), device=device)
        losses: list[torch.Tensor] = []
        arguments = (tokens[:, :-1],) if first else ()
        if last:
            schedule.step(*arguments, target=tokens[:, 1:], losses=losses)
        else:
            schedule.step(*arguments)
        optimizer.step()
        optimizer.zero_grad()
        if last:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *(int(value) for value in sys.argv[2:] or (1, 1)))
