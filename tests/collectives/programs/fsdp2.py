"""fully_shard: `fsdp2.py VARIANT`."""

import os
import sys
from itertools import pairwise

import torch
import torch.distributed as dist
from llama import Args, Llama
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


def sharded_model(variant: str, mesh: DeviceMesh) -> Llama:
    world = dist.get_world_size()
    options: dict = {"mesh": mesh}
    match variant:
        case "zero2":
            options["reshard_after_forward"] = False
        case "reshard_node":
            options["reshard_after_forward"] = 8
        case "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        case "offload":
            options["offload_policy"] = CPUOffloadPolicy()
        case "hsdp":
            options["mesh"] = init_device_mesh("cuda", (world // 8, 8), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta" if variant == "meta" else "cuda"):
        model = Llama(Args())
    if variant == "recompute":
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    for layer in model.layers.values():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    layers = list(model.layers.values())
    if variant == "prefetch":
        for one, following in pairwise(layers):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])
        model.set_modules_to_forward_prefetch([layers[0]])
    if variant == "meta":
        model.to_empty(device="cuda")
        with torch.no_grad():
            model.init_weights()
    return model


def exchange_state(variant: str, model: Llama, optimizer: torch.optim.Optimizer) -> None:
    if variant in ("full", "full_cpu"):
        full = StateDictOptions(full_state_dict=True, cpu_offload=variant == "full_cpu")
        state = get_model_state_dict(model, options=full)
        get_optimizer_state_dict(model, optimizer, options=full)
        if dist.get_rank() == 0:
            print(sum(value.numel() for value in state.values()), "elements in the full state")
    elif variant == "sharded":
        state = get_model_state_dict(model)
        get_optimizer_state_dict(model, optimizer)
        set_model_state_dict(model, state)
    elif variant == "broadcast":
        full = (
            {name: torch.zeros(value.shape) for name, value in get_model_state_dict(model).items()}
            if dist.get_rank() == 0
            else {}
        )
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def main(variant: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if variant in ("offload", "full_cpu") else "nccl"
    dist.init_process_group(backend, device_id=torch.device("cuda", local) if variant == "eager" else None)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = sharded_model(variant, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=variant == "fused", foreach=variant != "fused")
    for step in range(3):
        micros = 3 if variant == "accumulate" else 1
        for micro in range(micros):
            if variant == "accumulate":
                model.set_requires_gradient_sync(micro == micros - 1)
                model.set_is_last_backward(micro == micros - 1)
            if variant == "unshard":
                model.unshard(async_op=True)
            tokens = torch.randint(0, 1024, (2, 129), device="cuda")
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if variant == "clip":
            print(f"gradient norm {norm.full_tensor().item():.3f}")
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    exchange_state(variant, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
