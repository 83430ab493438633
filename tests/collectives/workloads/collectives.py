"""Every collective, blocking and not, on tensors of some megabytes."""

import torch
import torch.distributed as dist
from gpt import let_the_watchdog_look, report, start

start()
world, rank = dist.get_world_size(), dist.get_rank()
MILLION = 1 << 20


def new(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(elements, device="cuda", dtype=dtype)


for step in range(2):
    dist.all_reduce(new(8 * MILLION))
    works = [dist.all_reduce(new(4 * MILLION), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    del works
    forgotten = dist.all_reduce(new(3 * MILLION), async_op=True)
    del forgotten
    let_the_watchdog_look()
    dist.all_gather([torch.empty(MILLION, device="cuda") for _ in range(world)], new(MILLION))
    pieces = [torch.empty(MILLION, device="cuda") for _ in range(world)]
    work = dist.all_gather(pieces, new(MILLION), async_op=True)
    more = new(5 * MILLION)
    work.wait()
    del pieces, more, work
    dist.all_gather_into_tensor(torch.empty(world * MILLION, device="cuda"), new(MILLION))
    dist.all_gather([torch.empty(MILLION + 1000 * i, device="cuda") for i in range(world)], new(MILLION + 1000 * rank))
    dist.reduce_scatter(new(MILLION), [new(MILLION) for _ in range(world)])
    work = dist.reduce_scatter(new(MILLION), [new(MILLION) for _ in range(world)], async_op=True)
    work.wait()
    dist.reduce_scatter(new(MILLION + 1000 * rank), [new(MILLION + 1000 * i) for i in range(world)])
    dist.reduce_scatter_tensor(new(MILLION), new(world * MILLION))
    dist.all_to_all([new(MILLION) for _ in range(world)], [new(MILLION) for _ in range(world)])
    dist.all_to_all_single(new(world * MILLION), new(world * MILLION))
    rows = [MILLION // 8 * (i + 1) for i in range(world)]
    dist.all_to_all_single(new(sum(rows)), new(sum(rows)), rows, rows)
    dist.broadcast(new(2 * MILLION), 0)
    dist.reduce(new(2 * MILLION), 0)
    dist.gather(new(MILLION), [new(MILLION) for _ in range(world)] if rank == 0 else None, 0)
    dist.scatter(new(MILLION), [new(MILLION) for _ in range(world)] if rank == 0 else None, 0)
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    beyond, before = (rank + 1) % world, (rank - 1) % world
    out, into = new(6 * MILLION), new(6 * MILLION)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, beyond), dist.P2POp(dist.irecv, into, before)]):
        work.wait()
    del out, into, work
    with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device()), async_ops=True) as manager:
        for _ in range(3):
            dist.all_reduce(new(MILLION))
    manager.wait()
    let_the_watchdog_look()
    with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
        for _ in range(3):
            dist.all_gather_into_tensor(torch.empty(world * MILLION, device="cuda"), new(MILLION))
    del manager
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "data": list(range(100))})
    names = ["a" * 1000, 2, {"c": 3}]
    dist.broadcast_object_list(names, 0)
    torch.cuda.synchronize()
    report(step)
