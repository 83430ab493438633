"""Checkpoints of a sharded model, in every way: `checkpoint.py FOLDER`. `precious.pt` there is a real one from before."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import Args, Llama
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class AppState(Stateful):
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def main(folder: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = Llama(Args()).cuda()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saving = None
    for step in range(2):
        tokens = torch.randint(0, 1024, (2, 129), device="cuda")
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        dcp.save({"app": AppState(model, optimizer), "step": step}, checkpoint_id=f"{folder}/step-{step}")
        if saving is not None:
            saving.result()
        saving = dcp.async_save({"app": AppState(model, optimizer)}, checkpoint_id=f"{folder}/async-{step}")
    saving.result()
    state = {"app": AppState(model, optimizer), "step": 1}
    dcp.load(state, checkpoint_id=f"{folder}/step-1")
    assert state["step"] == 1
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/precious.pt")  # host copies of what was never computed
        torch.save(model.state_dict(), f"{folder}/shard.pt")
        with open(f"{folder}/open.pt", "wb") as file:
            torch.save(optimizer.state_dict(), file)
        torch.save({"vocabulary": ["a", "b"], "mean": torch.arange(10.0)}, f"{folder}/host.pt")
        assert torch.load(f"{folder}/host.pt")["mean"][3] == 3
        read = torch.load(f"{folder}/precious.pt", map_location="cuda")  # what was saved, not what was there before
        assert read.keys() == full.keys() and all(read[name].shape == full[name].shape for name in full)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
