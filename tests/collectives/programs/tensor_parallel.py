"""DTensor's tensor and sequence parallelism over a Llama, alone or with fully_shard: `tensor_parallel.py VARIANT`."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from llama import Args, Llama
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F


def apply_tp(model: nn.Module, mesh: DeviceMesh, sequence: bool, loss_is_parallel: bool) -> None:
    """As torchtitan's apply_tp; without `sequence`, activations between blocks are replicated."""
    between = Shard(1) if sequence else Replicate()
    top = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_is_parallel else Replicate(),
            use_local_output=not loss_is_parallel,
        ),
    }
    if sequence:
        top["norm"] = SequenceParallel()
    parallelize_module(model, mesh, {name: plan for name, plan in top.items() if getattr(model, name) is not None})
    for block in model.layers.values():
        plan = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
            "feed_forward.w3": ColwiseParallel(),
        }
        if sequence:
            plan |= {
                "attention_norm": SequenceParallel(),
                "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(block, mesh, plan)


def main(variant: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    torch.manual_seed(42)
    world = dist.get_world_size()
    tp = 8 if variant in ("tp", "sp", "loss", "redistribute") else 2 if variant.startswith("hsdp") else 4
    match variant:
        case "hsdp_tp":
            mesh = init_device_mesh("cuda", (2, world // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
        case _:
            mesh = init_device_mesh("cuda", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if variant == "redistribute":
        return redistribute(mesh["tp"])
    loss_is_parallel = variant in ("loss", "fsdp_tp", "hsdp_tp", "meta")
    with torch.device("meta" if variant == "meta" else "cuda"):
        model = Llama(Args())
    apply_tp(model, mesh["tp"], variant not in ("tp",), loss_is_parallel)
    if variant in ("fsdp_tp", "hsdp_tp", "meta"):
        data = mesh["replicate", "shard"] if variant == "hsdp_tp" else mesh["dp"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers.values():
            fully_shard(layer, mesh=data, mp_policy=policy)
        fully_shard(model, mesh=data, mp_policy=policy)
    if variant == "meta":
        model.to_empty(device="cuda")
        with torch.no_grad():
            model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=variant != "tp")
    for step in range(3):
        tokens = torch.randint(0, 1024, (2, 129), device="cuda")
        with loss_parallel() if loss_is_parallel else nullcontext():
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        # foreach takes no mixture; without sequence parallelism norms are plain tensors
        split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        norm = torch.nn.utils.clip_grad_norm_(split, 1.0, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {(loss.full_tensor() if isinstance(loss, DTensor) else loss).item():.3f}, norm {norm.item():.3f}"
            )
    dist.destroy_process_group()


def redistribute(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(64.0, device="cuda").view(8, 8), mesh, [Shard(0)])
    assert x.to_local().shape == (1, 8)
    assert x.redistribute(mesh, [Shard(1)]).to_local().shape == (8, 1)
    assert x.full_tensor().shape == (8, 8)
    y = distribute_tensor(torch.randn(8, 8, device="cuda"), mesh, [Replicate()])
    z = x @ y
    assert z.placements == (Shard(0),)
    z.sum().full_tensor()
    uneven = distribute_tensor(torch.randn(13, 4, device="cuda"), mesh, [Shard(0)])
    assert uneven.full_tensor().shape == (13, 4)
    torch.distributed.tensor.rand(16, 4, device_mesh=mesh, placements=[Shard(0)])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
