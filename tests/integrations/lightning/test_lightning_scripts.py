"""Lightning programs in their own processes: `maya run` with unmodified scripts, the plugin in a script, ranks that differ, Fabric, a
notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"

TRAIN = """
import sys
import lightning as L
import lightning.pytorch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from integrations.lightning.lightning_net import loader, net

plugins = []
if "--plugin" in sys.argv:
    from maya_lightning import MayaEmulator
    plugins = [MayaEmulator("h100", json="plugin.json")]
callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(every_n_train_steps=1)]
trainer = L.Trainer(devices=4, num_nodes=2, strategy="ddp", precision="bf16-mixed", max_epochs=2, plugins=plugins, callbacks=callbacks)
model = net(lightning.pytorch)
trainer.fit(model, loader(), loader())
print("after fit, on", model.device, "with", plugins[0].prediction.world.size, "ranks")
"""

STAGES = """
import torch, torch.distributed as dist
import lightning as L
from maya_lightning import MayaEmulator
from torch.utils.data import DataLoader, TensorDataset

class Stages(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
    def configure_model(self):
        self.stage = torch.nn.Linear(64, 64 if self.global_rank == 0 else 4096)
    def training_step(self, batch, index):
        optimizer, x = self.optimizers(), batch[0]
        if self.global_rank == 0:
            out = self.stage(x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            got = torch.empty(x.shape[0], 64, device=self.device)
            dist.recv(got, 0)
            self.stage(got.requires_grad_()).square().mean().backward()
            dist.send(got.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class NoDDP(L.pytorch.strategies.DDPStrategy):
    def configure_ddp(self):
        pass

emulator = MayaEmulator("a100", gpus_per_node=2)
trainer = L.Trainer(max_epochs=1, strategy=NoDDP(), plugins=[emulator], logger=False, enable_checkpointing=False)
trainer.fit(Stages(), DataLoader(TensorDataset(torch.randn(512, 64)), 32))
print("emulated", emulator.prediction.world.emulated_ranks, "hangs", emulator.prediction.hangs)
"""

FABRIC = """
import torch
from lightning.fabric import Fabric

fabric = Fabric(precision="bf16-mixed")
module = torch.nn.Linear(64, 64)
model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))
for _ in range(100):
    fabric.backward(model(torch.ones(8, 64, device=fabric.device)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("never")
"""

WORKERS = """
import torch, torch.distributed as dist
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

fabric = L.Fabric(devices=2, strategy="fsdp")
fabric.launch()
model = fabric.setup_module(torch.nn.Linear(64, 64))
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(32, 64)), batch_size=8, num_workers=1))
for epoch in range(4):
    for x, in loader:
        fabric.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        fabric.save("saved.ckpt", {"model": model})
    names = [None] * 2
    dist.all_gather_object(names, f"rank {fabric.global_rank}")
    fabric.print("met", names)
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_plugin_and_torchrun_and_no_edit_at_all_give_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    plugin = run(tmp_path, "python", "train.py", "--plugin")
    assert "after fit, on cpu with 8 ranks" in plugin.stdout
    launch = ("--nnodes", "2", "--nproc-per-node", "4")
    torchrun = run(tmp_path, "maya", "run", "--json", "torchrun.json", "--", "torchrun", *launch, "train.py")
    bare = run(tmp_path, "maya", "run", "--json", "bare.json", "--", "python", "train.py")
    for done in (torchrun, bare):
        assert "after fit" not in done.stdout
        assert "it/s" not in done.stderr + done.stdout
    predicted = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plugin", "torchrun", "bare")]
    for each in predicted:  # how long this machine took is another thing each time
        del each["data_loading"]
        each["caveats"] = [caveat for caveat in each["caveats"] if not caveat.startswith("Between calls of the GPU")]
    assert predicted[0]["world"] == {
        "size": 8, "nodes": 2, "gpus_per_node": 4, "emulated_ranks": [0], "idle_gpus": 0, "stands_for": {"0": "0-7"},
    }  # fmt: skip
    assert predicted[0]["step_time_s"] > 0
    assert predicted[0] == predicted[1] == predicted[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bare.json", "maya-out", "plugin.json", "torchrun.json", "train.py",
    ]  # fmt: skip


def test_ranks_that_exchange_messages_run_the_script_again(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    done = run(tmp_path, "python", "stages.py")
    assert "emulated [0, 1] hangs []" in done.stdout
    assert done.stdout.count("emulated [0, 1] hangs") == 1  # the other rank ends with its steps


def test_fabric_run(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FABRIC)
    command = ("fabric", "run", "--devices", "4", "--num-nodes", "2", "--strategy", "ddp", "loop.py")
    done = run(tmp_path, "maya", "run", "--gpu", "a100", "--json", "p.json", "--", *command)
    assert "never" not in done.stdout
    prediction = json.loads((tmp_path / "p.json").read_text())
    assert prediction["world"]["size"] == 8
    assert prediction["trace"]["steps"] == 3


def test_a_rank_that_waits_for_its_workers_is_not_stuck(tmp_path: Path) -> None:
    """The other rank is started where the first gathers from it, and ends its loader's worker while that one waits."""
    (tmp_path / "workers.py").write_text(WORKERS)
    done = run(tmp_path, "maya", "run", "--steps", "5", "--json", "p.json", "--", "python", "workers.py")
    assert "met ['rank 0', 'rank 1']" in done.stdout
    assert done.stderr.count("maya: under emulation fabric.save writes nothing: saved.ckpt") == 1
    prediction = json.loads((tmp_path / "p.json").read_text())
    assert prediction["world"]["emulated_ranks"] == [0, 1] and not prediction["hangs"]
    # Forward and backward of one unit, and what the program gathers: weights are not gathered for a checkpoint.
    calls = {row["op"]: row["calls"] for row in prediction["communication"]}
    assert calls["all_gather_into_tensor"] <= 2
    assert not (tmp_path / "saved.ckpt").exists()


def test_the_example(tmp_path: Path) -> None:
    small = ("--layers", "2", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--intermediate", "512")
    example = str(ROOT / "examples" / "lightning_llama.py")
    done = run(tmp_path, "python", example, *small, "--sequence", "128", "--vocabulary", "1000", "--nodes", "2")
    assert "16 x NVIDIA H100" in done.stdout
    assert "tokens/s" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_notebook() -> None:
    notebook = nbformat.read(ROOT / "examples" / "lightning_notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    told = "".join(
        output.get("text", "") + str(output.get("data", {}).get("text/plain", ""))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "2 nodes of 8" in told
    assert "real loss" in told
