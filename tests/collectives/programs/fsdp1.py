"""FullyShardedDataParallel, the first one: `fsdp1.py VARIANT`."""

import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

DIM, LAYERS = 256, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(variant: str) -> FSDP:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    options: dict = {"auto_wrap_policy": policy, "device_id": torch.cuda.current_device()}
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    match variant:
        case "shard_grad_op":
            options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
        case "no_shard":
            options["sharding_strategy"] = ShardingStrategy.NO_SHARD
        case "hybrid":
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        case "hybrid_zero2":
            options["sharding_strategy"] = ShardingStrategy._HYBRID_SHARD_ZERO2
        case "hybrid_mesh":
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
            options["device_mesh"] = init_device_mesh(
                "cuda", (dist.get_world_size() // 8, 8), mesh_dim_names=("replicate", "shard")
            )
        case "bf16":
            options["mixed_precision"] = bf16
        case "orig":
            options["use_orig_params"] = True
        case "orig_bf16":
            options |= {"use_orig_params": True, "mixed_precision": bf16}
        case "offload":
            options["cpu_offload"] = CPUOffload(offload_params=True)
        case "sync":
            options["sync_module_states"] = True
        case "size":
            options["auto_wrap_policy"] = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)
        case "prefetch":
            options |= {
                "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
                "forward_prefetch": True,
                "limit_all_gathers": False,
            }
        case "meta":
            with torch.device("meta"):
                model = Net()
            options |= {
                "sync_module_states": True,
                "param_init_fn": lambda module: module.to_empty(device="cuda", recurse=False),
            }
            return FSDP(model, **options)
    return FSDP(Net(), **options)


def main(variant: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if variant == "offload" else "nccl")
    model = wrapped(variant)
    if variant == "recompute":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        micros = 2 if variant == "no_sync" else 1
        for micro in range(micros):
            tokens = torch.randint(0, 1000, (4, 65), device="cuda")
            if micro < micros - 1:
                with model.no_sync():
                    loss = nn.functional.cross_entropy(
                        model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
                    )
                    loss.backward()
            else:
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
        if variant == "clip":
            norm = model.clip_grad_norm_(1.0)
            print(f"gradient norm {norm.item():.3f}")
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if variant == "state_full":
        with FSDP.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ):
            state = model.state_dict()
            FSDP.optim_state_dict(model, optimizer)
        print(len(state), "parameters in the full state")
    elif variant == "state_sharded":
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)):
            state = model.state_dict()
            optim = FSDP.optim_state_dict(model, optimizer)
            model.load_state_dict(state)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim))
    elif variant == "state_local":
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
            model.load_state_dict(model.state_dict())
    elif variant == "summon":
        with FSDP.summon_full_params(model):
            print(sum(p.numel() for p in model.parameters()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
