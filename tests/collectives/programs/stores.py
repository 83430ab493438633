"""Stores that a program creates and uses itself."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tcp = dist.TCPStore(
        "localhost", 29600, world, is_master=rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False
    )
    file = dist.FileStore(os.path.join(tempfile.gettempdir(), "maya-store"), world)
    for name, store in (("tcp", dist.PrefixStore("tcp", tcp)), ("file", dist.PrefixStore("file", file))):
        if rank == 0:
            store.set("greeting", f"hello from {name}")
        assert store.get("greeting").decode() == f"hello from {name}"
        store.wait(["greeting"], timedelta(seconds=5))
        assert store.check(["greeting"]) and not store.check(["nothing"])
        store.add("arrived", 1)
        if rank == 0:
            while store.add("arrived", 0) < world:
                pass
            store.set("all", "here")
        store.wait(["all"])
        assert store.add("arrived", 0) == world
    assert tcp.get("tcp/greeting") == b"hello from tcp"
    mine = dist.PrefixStore(f"rank{rank}", tcp)
    assert mine.compare_set("lock", "", "taken") == b"taken"
    assert mine.compare_set("lock", "free", "mine") == b"taken"
    assert mine.compare_set("lock", "taken", "free") == b"free"
    mine.append("log", "one ")
    mine.append("log", "two")
    assert mine.get("log") == b"one two"
    mine.multi_set(["a", "b"], ["1", "2"])
    assert mine.multi_get(["a", "b"]) == [b"1", b"2"]
    assert mine.delete_key("a") and not mine.check(["a"])
    assert tcp.num_keys() > 0
    local = dist.HashStore()
    local.set("key", "value")
    assert local.get("key") == b"value" and local.add("n", 2) == 2
    try:
        local.wait(["never"], timedelta(milliseconds=50))
        raise AssertionError("nobody sets that key")
    except dist.DistStoreError:
        pass
    dist.init_process_group("nccl", store=dist.PrefixStore("job", tcp), rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1, device="cuda"))
    print(f"rank {rank}: all keys right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
