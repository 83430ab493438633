"""A rank waits for a key that another rank sets in a store, without saying which rank."""

import os

import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
store = dist.TCPStore("localhost", 29600, world, is_master=rank == 0)
if rank == 2:
    store.set("address", "node-2")
assert store.get("address") == b"node-2"
dist.destroy_process_group()
