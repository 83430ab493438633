"""A gloo group for CPU tensors beside an NCCL one. Every rank checks its results."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def check_reductions(rank: int, world: int, own: torch.Tensor) -> None:
    total = own.clone()
    dist.all_reduce(total)
    assert total.tolist() == [world * (world - 1) / 2, world]
    work = dist.all_reduce(largest := own.clone(), op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert largest.tolist() == [world - 1, 1]
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert bits.item() == (1 << world) - 1

    reduced = own.clone()
    dist.reduce(reduced, dst=3)
    assert rank != 3 or reduced.tolist() == [world * (world - 1) / 2, world]


def check_gathers_and_broadcasts(rank: int, world: int, own: torch.Tensor) -> None:
    gathered = [torch.empty(2) for _ in range(world)]
    dist.all_gather(gathered, own)
    assert [int(part[0]) for part in gathered] == list(range(world))
    whole = torch.empty(2 * world)
    dist.all_gather_into_tensor(whole, own)
    assert whole[::2].tolist() == list(range(world))

    table = torch.arange(6) if rank == 2 else torch.zeros(6, dtype=torch.long)
    dist.broadcast(table, src=2)
    assert table.tolist() == list(range(6))

    part = torch.empty(1)
    dist.scatter(part, [torch.tensor([10.0 * r]) for r in range(world)] if rank == 1 else None, src=1)
    assert part.item() == 10 * rank

    parts = [torch.empty(2) for _ in range(world)] if rank == 0 else None
    dist.gather(own, parts, dst=0)
    assert parts is None or [int(part[0]) for part in parts] == list(range(world))


def check_exchanges(rank: int, world: int) -> None:
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.arange(world).float() + 100 * rank)
    assert out.tolist() == [100 * r + rank for r in range(world)]
    send, receive = [rank + 1] * world, [r + 1 for r in range(world)]
    uneven = torch.empty(sum(receive))
    dist.all_to_all_single(uneven, torch.full((sum(send),), float(rank)), receive, send)
    assert uneven.tolist() == [r for r in range(world) for _ in range(r + 1)]

    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.arange(world).float())
    assert scattered.item() == rank * world


def check_messages(rank: int, world: int) -> None:
    following, before = (rank + 1) % world, (rank - 1) % world
    first, second = torch.empty(1), torch.empty(1)
    works = [
        dist.isend(torch.tensor([1.0 + rank]), following, tag=1),
        dist.isend(torch.tensor([100.0 + rank]), following, tag=2),
        dist.irecv(second, before, tag=2),  # by tag, not by order
        dist.irecv(first, before, tag=1),
    ]
    for work in works:
        work.wait()
    assert (first.item(), second.item()) == (1 + before, 100 + before)
    if rank == 0:
        dist.send(torch.tensor([7]), 1)
    elif rank == 1:
        dist.recv(seven := torch.zeros(1, dtype=torch.long), 0)
        assert seven.item() == 7


def check_control_group(rank: int) -> None:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    dist.monitored_barrier(control)
    dist.barrier(control)
    stop = torch.tensor([rank == 3])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=control)
    assert stop.item()


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([float(rank), 1.0])
    check_reductions(rank, world, own)
    check_gathers_and_broadcasts(rank, world, own)
    check_exchanges(rank, world)
    check_messages(rank, world)
    check_control_group(rank)
    print(f"rank {rank}: all tensors right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
