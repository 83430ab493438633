"""NCCL's collectives through every function of torch.distributed. Tensors are small, so that every rank can check its results."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnn
from torch.distributed.device_mesh import init_device_mesh


def own(rank: int) -> torch.Tensor:
    return torch.tensor([rank, 10 * rank], device="cuda")


def plain(rank: int, world: int) -> None:
    everyone = range(world)
    x = own(rank)
    dist.all_reduce(x)
    assert x.tolist() == [sum(everyone), 10 * sum(everyone)]
    work = dist.all_reduce(y := own(rank), op=dist.ReduceOp.MIN, async_op=True)
    work.wait()
    assert y.tolist() == [0, 0]
    parts = [torch.empty_like(x) for _ in everyone]
    dist.all_gather(parts, own(rank))
    assert [part[0].item() for part in parts] == list(everyone)
    whole = torch.empty(2 * world, dtype=torch.long, device="cuda")
    dist.all_gather_into_tensor(whole, own(rank))
    assert whole.tolist() == [n for r in everyone for n in (r, 10 * r)]
    one = torch.empty(2, dtype=torch.long, device="cuda")
    dist.reduce_scatter_tensor(one, torch.arange(2 * world, device="cuda"))
    assert one.tolist() == [2 * rank * world, (2 * rank + 1) * world]
    dist.reduce_scatter(one, [torch.full((2,), r, device="cuda") for r in everyone], op=dist.ReduceOp.MAX)
    assert one.tolist() == [rank, rank]
    dist.broadcast(z := own(rank), src=world - 1)
    assert z[0] == world - 1
    dist.scatter(one, [torch.full((2,), r, device="cuda") for r in everyone] if rank == 0 else None, src=0)
    assert one.tolist() == [rank, rank]
    dist.gather(own(rank), parts if rank == 0 else None, dst=0)
    dist.reduce(x := own(rank), dst=1)
    assert rank != 1 or x[0] == sum(everyone)
    swapped = torch.empty(world, dtype=torch.long, device="cuda")
    dist.all_to_all_single(swapped, torch.arange(world, device="cuda") + 100 * rank)
    assert swapped.tolist() == [100 * r + rank for r in everyone]
    receive, send = (
        [torch.empty(r + 1, dtype=torch.long, device="cuda") for r in everyone],
        [torch.full((rank + 1,), rank, device="cuda")] * world,
    )
    dist.all_to_all(receive, send)
    assert [part.tolist() for part in receive] == [[r] * (r + 1) for r in everyone]
    uneven = torch.empty(sum(r + 1 for r in everyone), dtype=torch.long, device="cuda")
    dist.all_to_all_single(
        uneven, torch.full(((rank + 1) * world,), rank, device="cuda"), [r + 1 for r in everyone], [rank + 1] * world
    )
    assert uneven.tolist() == [r for r in everyone for _ in range(r + 1)]
    sizes = [torch.empty(r + 1, dtype=torch.long, device="cuda") for r in everyone]
    dist.all_gather(sizes, torch.full((rank + 1,), rank, device="cuda"))
    assert [part.tolist() for part in sizes] == [[r] * (r + 1) for r in everyone]


def messages(rank: int, world: int) -> None:
    following, before = (rank + 1) % world, (rank - 1) % world
    incoming = torch.empty(2, dtype=torch.long, device="cuda")
    operations = [dist.P2POp(dist.isend, own(rank), following), dist.P2POp(dist.irecv, incoming, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert incoming.tolist() == [before, 10 * before]
    if rank % 2 == 0:
        dist.send(own(rank), following)
        dist.recv(incoming, following)
        assert incoming[0] == following
    else:
        dist.recv(incoming, before)
        dist.send(own(rank), before)
        assert incoming[0] == before
    if rank < 2:
        works = [dist.isend(own(rank), 1 - rank), dist.irecv(incoming, 1 - rank)][:: 1 if rank else -1]
        for work in works:
            work.wait()
        assert incoming[0] == 1 - rank
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [own(rank), own(rank) + 1]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors] == [sum(range(world)), sum(range(world)) + world]
    with dist._coalescing_manager():
        outs = [torch.empty(2 * world, dtype=torch.long, device="cuda") for _ in range(2)]
        for out in outs:
            dist.all_gather_into_tensor(out, own(rank))
    assert outs[1][-1] == 10 * (world - 1)


def functional(rank: int, world: int) -> None:
    group = dist.group.WORLD
    total = fc.all_reduce(own(rank), "sum", group)
    assert isinstance(total, fc.AsyncCollectiveTensor)
    assert (total + 0)[0].item() == sum(range(world))
    assert fc.wait_tensor(fc.all_gather_tensor(own(rank), 0, group)).tolist()[::2] == list(range(world))
    scattered = fc.reduce_scatter_tensor(torch.arange(world, device="cuda"), "sum", 0, group)
    assert scattered.wait().item() == rank * world
    assert fc.broadcast(own(rank), 1, group).tolist() == [1, 10]
    assert fc.all_to_all_single(torch.arange(world, device="cuda") * 0 + rank, None, None, group).tolist() == list(
        range(world)
    )
    assert [t[0].item() for t in fc.all_reduce_coalesced([own(rank), own(rank)], "max", group)] == [world - 1] * 2
    gathered = fc.all_gather_into_tensor_coalesced([own(rank), own(rank)], group)
    assert [t.shape[0] for t in gathered] == [2 * world] * 2
    following = [(r + 1) % world for r in range(world)]
    assert fc.permute_tensor(own(rank), following, group).tolist()[0] == (rank - 1) % world
    x = torch.ones(4 * world, device="cuda", requires_grad=True)
    y = fc.all_gather_tensor_autograd(x, 0, group)
    z = fc.reduce_scatter_tensor_autograd(y * 2, "sum", 0, group)
    fc.all_to_all_single_autograd(z, [4] * world, [4] * world, group).sum().backward()
    assert x.grad.shape == x.shape


def differentiable(world: int) -> None:
    x = torch.full((world,), 2.0, device="cuda", requires_grad=True)
    total = dnn.all_reduce(x)
    assert total.tolist() == [2.0 * world] * world
    parts = dnn.all_gather(x)
    (
        total.sum()
        + torch.cat(parts).sum()
        + dnn.broadcast(x, 0).sum()
        + dnn.reduce_scatter(torch.empty(1, device="cuda"), list(x.chunk(world))).sum()
    ).backward()
    dnn.all_to_all_single(torch.empty_like(x), x).sum().backward()
    dnn.all_to_all([torch.empty(1, device="cuda") for _ in range(world)], list(x.chunk(world)))[0].sum().backward()
    assert x.grad.shape == x.shape


def groups(rank: int, world: int) -> None:
    half = world // 2
    halves = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))]
    mine = halves[rank // half]
    dist.all_reduce(x := own(rank), group=mine)
    assert x[0] == sum(r for r in range(world) if r // half == rank // half)
    mine, all_of_them = dist.new_subgroups(2)
    assert len(all_of_them) == world // 2 and dist.get_process_group_ranks(mine) == [
        rank - rank % 2,
        rank - rank % 2 + 1,
    ]
    dist.broadcast(x := own(rank), group=mine, group_src=1)
    assert x[0] == rank - rank % 2 + 1
    mine, _ = dist.new_subgroups_by_enumeration([[r, r + half] for r in range(half)])
    dist.all_reduce(x := own(rank), group=mine)
    assert x[0] == 2 * (rank % half) + half
    split = dist.split_group(split_ranks=[list(range(half)), list(range(half, world))], group_desc="halves")
    dist.all_reduce(x := own(rank), group=split)
    assert dist.get_world_size(split) == half and x[0] == sum(r for r in range(world) if r // half == rank // half)
    mesh = init_device_mesh("cuda", (2, half), mesh_dim_names=("outer", "inner"))
    assert list(mesh.get_coordinate()) == [rank // half, rank % half] and mesh["inner"].size() == half
    dist.all_reduce(x := own(rank), group=mesh.get_group("outer"))
    assert x[0] == 2 * (rank % half) + half
    flat = mesh["outer", "inner"]._flatten("all")
    dist.all_reduce(x := own(rank), group=flat.get_group())
    assert x[0] == sum(range(world)) and mesh["all"].size() == world
    dist.destroy_process_group(mine)


def main() -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank, world = dist.get_rank(), dist.get_world_size()
    plain(rank, world)
    messages(rank, world)
    functional(rank, world)
    differentiable(world)
    groups(rank, world)
    dist.barrier()
    print(f"rank {rank}: all right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
