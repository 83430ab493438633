"""Collectives of Python objects, over NCCL and gloo. Every rank checks what it got: `objects.py nccl|gloo`."""

import os
import sys

import torch
import torch.distributed as dist


def main(backend: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()

    settings = [{"lr": 0.1, "name": "run"}, "seed", 17] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(settings, src=0)
    assert settings == [{"lr": 0.1, "name": "run"}, "seed", 17]

    last = [None] if rank != world - 1 else ["x" * 3_000_000]
    dist.broadcast_object_list(last, src=world - 1, device=torch.device("cuda" if backend == "nccl" else "cpu"))
    assert len(last[0]) == 3_000_000

    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "host": "node" * rank})
    assert everyone == [{"rank": r, "host": "node" * r} for r in range(world)]

    at_root = [None] * world if rank == 1 else None
    dist.gather_object(("from", rank), at_root, dst=1)
    assert at_root == ([("from", r) for r in range(world)] if rank == 1 else None)

    mine = [None]
    dist.scatter_object_list(mine, [f"part {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert mine == [f"part {rank}"]

    if rank == 0:
        dist.send_object_list(["hello", {"to": 1}], dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello", {"to": 1}]

    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1], use_local_synchronization=True)
    both = [None, None]
    dist.all_gather_object(both, rank, group=pair)
    assert both == [rank - rank % 2, rank - rank % 2 + 1]
    print(f"rank {rank}: all objects right")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
