"""A framework that Maya has never heard of: its integration is one package with an entry point, and no line of the core names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAYA = str(Path(sys.executable).with_name("maya"))

FRAMEWORK = """
import torch

class Trainer:
    def __init__(self, model):
        self.model = model
        self.parts = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]

    def step(self):
        for part in self.parts:
            part.step()

    def save(self, path):
        open(path, "w").write("weights")

def start(gpus):
    return gpus
"""

INTEGRATION = """
import functools
from maya_core.integration import Integration, World

def install(integration: Integration) -> None:
    integration.patches.when_imported("toyframework", functools.partial(_toyframework, integration))

def _toyframework(integration, module):
    step = module.Trainer.step

    @functools.wraps(step)
    def one_step(self):
        with integration.steps.one_step_of(self):
            return step(self)

    def start(gpus):
        integration.become_world(World(integration.request.nodes or 1, gpus))
        return integration.gpus

    integration.patches.set(module.Trainer, "step", one_step)
    integration.patches.set(module.Trainer, "save", lambda self, path: integration.skip("ToyFramework writes no weights"))
    integration.patches.set(module, "start", start)
"""

SCRIPT = """
import torch, toyframework
print("gpus", toyframework.start(4))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
trainer = toyframework.Trainer(model)
for step in range(10):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    trainer.step()
    trainer.save("weights.bin")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metadata = tmp_path / "site" / "maya_toy-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: maya-toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[maya.integrations]\ntoy = maya_toy:install\n")
    (tmp_path / "site" / "maya_toy.py").write_text(INTEGRATION)
    (tmp_path / "site" / "toyframework.py").write_text(FRAMEWORK)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_an_integration_of_ones_own(folder: Path) -> None:
    done = subprocess.run(
        [MAYA, "run", "--gpu", "a100", "--json", "p.json", "--", "python", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prediction = json.loads((folder / "p.json").read_text())
    assert prediction["trace"]["steps"] == 3  # four optimizers are one step of the training
    assert prediction["world"]["size"] == 4
    assert "gpus 4" in done.stdout
    assert done.stderr.count("under emulation ToyFramework writes no weights") == 1
    assert not (folder / "weights.bin").exists()
