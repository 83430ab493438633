"""Programs the tests run, as users write them, and the commands they type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from maya_deepspeed.launch import launch

from maya_core.cpp_build import cache_folder
from maya_core.launch.coordinator import Coordinator
from maya_core.launch.link import Link
from maya_core.launch.ranks import RankLauncher
from maya_core.launch.run import collect
from maya_core.launch.settings import ProcessSettings
from maya_core.launch.world import World
from maya_core.request import Request
from maya_core.trace.job import JobTrace

BIN = Path(sys.executable).parent

TRAIN = """
import argparse, os
import deepspeed
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--emulate", action="store_true")  # the script's own, nothing to do with Maya
parser.add_argument("--save")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
told = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT")
print("told", *(os.environ.get(name) for name in told), args.local_rank, args.emulate)
deepspeed.init_distributed()
torch.manual_seed(0)
class Net(nn.Sequential):
    def forward(self, tokens):
        return nn.functional.cross_entropy(super().forward(tokens).flatten(0, 1).float(), tokens.flatten())

model = Net(nn.Embedding(128, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 128))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
while True:
    tokens = torch.arange(64 * engine.train_micro_batch_size_per_gpu()).view(-1, 64) % 7
    engine.backward(engine(tokens.to(engine.device)))
    engine.step()
    if args.save:
        engine.save_checkpoint(args.save)
"""

PIPELINE = """
import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

deepspeed.init_distributed()
layers = [LayerSpec(torch.nn.Linear, 64, 64) for _ in range(4)]
net = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.CrossEntropyLoss())
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "steps_per_print": 1,
          "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
data = [(torch.ones(64), torch.tensor(1))] * 4096
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=data, config=config)
while True:
    engine.train_batch()
"""

BF16 = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3},
}


def write(folder: Path, config: dict[str, Any] | None = None, **programs: str) -> None:
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "ds.json").write_text(json.dumps(config or BF16))


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as typed in a shell where Maya's environment is active."""
    env = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": without_mlflow(cwd),
        "HOME": str(cwd / "home"),
        "MAYA_CACHE_DIR": str(cache_folder()),  # that the device is compiled is not what is tested
        "COLUMNS": "160",
        **environment,
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def without_mlflow(folder: Path) -> str:
    """A folder for PYTHONPATH: deepspeed imports MLflow where it is, which takes 2 s in each process."""
    without = folder / "without"
    without.mkdir(exist_ok=True)
    (without / "mlflow.py").write_text('raise ImportError("not in this test")')
    return str(without)


def launched(*words: str, out: Path, gpu: str = "h100", steps: int = 3) -> JobTrace | None:
    """What `maya run -- deepspeed WORDS` emulates; the launcher itself runs here. None if it failed."""
    from deepspeed.launcher import runner

    args = runner.parse_args(list(words))
    with pytest.MonkeyPatch.context() as patch, Coordinator() as coordinator:
        patch.setenv("PYTHONPATH", without_mlflow(coordinator.socket.parent))
        settings = ProcessSettings(
            request=Request(gpu=gpu, steps=steps), folder=out, rank=None, coordinator=coordinator.socket
        )
        link = Link(coordinator.socket, frozenset())
        try:
            code = launch(RankLauncher(link, settings), runner, args)
        finally:
            link.close()
    return None if code else collect(out, World(1, 1), code)


def figures(prediction: dict[str, Any]) -> dict[str, Any]:
    """All that is predicted."""
    return {name: value for name, value in prediction.items() if name != "trace"}
