"""Context parallelism by torch's experimental context_parallel: `context_parallel.py allgather|alltoall`."""

import os
import sys

import torch
import torch.distributed as dist
from llama import Args, Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def main(method: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world // 4, 4), mesh_dim_names=("dp", "cp"))
    set_rotate_method(method)
    model = Llama(Args(length=256)).cuda().bfloat16()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    fully_shard(model, mesh=mesh["dp_cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        tokens = torch.randint(0, 1024, (2, 257), device="cuda")
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            with context_parallel(
                mesh["cp"],
                buffers=[inputs, labels, model.freqs_cis],
                buffer_seq_dims=[1, 1, 0],
                no_restore_buffers={inputs, labels},
            ):
                assert inputs.shape == (2, 64)
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    (whole,) = context_parallel_unshard(mesh["cp"], [logits.detach()], [1])
    assert whole.shape == (2, 256, 1024)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
