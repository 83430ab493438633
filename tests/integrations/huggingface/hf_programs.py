"""Programs the tests run: a small Llama under Trainer or in a loop of accelerate's, as users write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        ids = torch.arange(64) % 7 + i % 5
        return {"input_ids": ids, "labels": ids}

def model(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, **settings))
"""

TRAINER = (
    """import sys
from transformers import HfArgumentParser, Trainer, TrainingArguments"""
    + MODEL
    + """
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model(), args, train_dataset=Tokens(), eval_dataset=Tokens())
result = trainer.train()
trainer.save_model()
trainer.save_state()
print("trained", sorted(result.metrics), trainer.evaluate()["eval_loss"])
trainer.predict(Tokens())
print("predicted")
"""
)

LOOP = (
    """import argparse
from accelerate import Accelerator, DataLoaderConfiguration"""
    + MODEL
    + """
parser = argparse.ArgumentParser()
parser.add_argument("--dispatch", action="store_true")
parser.add_argument("--split", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--emulate", action="store_true")  # the script's own, nothing to do with Maya
parser.add_argument("--out")
options = parser.parse_args()
accelerator = Accelerator(
    mixed_precision="bf16",
    gradient_accumulation_steps=options.accumulate,
    dataloader_config=DataLoaderConfiguration(split_batches=options.split, dispatch_batches=options.dispatch or None),
)
model = model()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(Tokens(), batch_size=16 if options.split else 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
print("world", accelerator.num_processes, accelerator.distributed_type.value, "emulate", options.emulate)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    if options.out:
        accelerator.save_state(options.out)
        accelerator.unwrap_model(model).save_pretrained(options.out)
"""
)

AHEAD = (
    """from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch.utils.data import default_collate"""
    + MODEL
    + """
def preferences(examples):  # as TRL's collator: the chosen texts, and below them the rejected ones
    return default_collate([*examples, *examples])

accelerator = Accelerator(gradient_accumulation_steps=3)
loader = torch.utils.data.DataLoader(Tokens(), batch_size=2, collate_fn=preferences)
model = model()
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
batches = iter(loader)
with LocalSGD(accelerator, model, local_sgd_steps=9) as local_sgd:
    while step := [next(batches) for _ in range(3)]:  # all of a step, before the first is trained on
        for batch in step:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
"""
)


def write(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as typed in a shell where Maya's environment is active."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def predicted(*command: str, cwd: Path, options: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """The prediction of a command under `maya run`, with what was printed under "output"."""
    done = run("maya", "run", "--json", "prediction.json", *options, "--", *command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((cwd / "prediction.json").read_text())
    return {**found, "output": done.stdout + done.stderr}


def figures(prediction: dict[str, Any]) -> dict[str, Any]:
    """All that is predicted, without what was printed, and without how long this machine took."""
    found = {name: value for name, value in prediction.items() if name not in ("output", "trace", "data_loading")}
    return found | {"caveats": [each for each in found["caveats"] if not each.startswith("Between calls of the GPU")]}
