"""Programs that are stopped before they come to their own validation: whether the prediction tells it, and only where it may matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAYA = Path(sys.executable).parent / "maya"
PROGRAM = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def data():
    return TensorDataset(torch.ones(512, 64))

def main(trained, validated, every):
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = DataLoader(data(), trained, shuffle=True)
    validation = DataLoader(data(), validated)
    for number, (x,) in enumerate(training):
        model(x.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % every == every - 1:
            with torch.no_grad():
                for (x,) in validation:
                    model(x.cuda())

main(*map(int, sys.argv[1:]))
"""
PREPARED = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
training = DataLoader(TensorDataset(torch.ones(512, 64)), 8)
validation = DataLoader(TensorDataset(torch.ones(512, 64)), 64)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)
for (x,) in training:
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def notes(folder: Path, program: str, *arguments: str, options: tuple[str, ...] = ()) -> list[Any]:
    (folder / "train.py").write_text(program)
    command = [str(MAYA), "run", "--json", "p.json", *options, "--", sys.executable, "train.py", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [one for one in json.loads((folder / "p.json").read_text())["caveats"] if "data loader" in one]


def test_a_larger_batch_that_was_not_reached_is_told(tmp_path: Path) -> None:
    (note,) = notes(tmp_path, PROGRAM, "8", "256", "50")
    assert note.startswith("The data loader made at train.py:13 was not read in the recorded steps. Its batches of 256")
    assert "those that were read (8)" in note and "--steps all" in note


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(("32", "32", "50"), ()), (("8", "256", "1"), ()), (("64", "256", "4"), ("--steps", "all"))],
    ids=["not larger", "read", "to the end"],
)
def test_others_are_not(tmp_path: Path, arguments: tuple[str, ...], options: tuple[str, ...]) -> None:
    assert not notes(tmp_path, PROGRAM, *arguments, options=options)


def test_a_loader_that_accelerate_has_made_again(tmp_path: Path) -> None:
    (note,) = notes(tmp_path, PREPARED)
    assert "made at train.py:10" in note and "batches of 64" in note
