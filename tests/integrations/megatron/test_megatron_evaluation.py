"""Evaluation of Megatron-LM's training script, which is in no package: a script with the same functions, called in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MAYA = Path(sys.executable).parent / "maya"
TRAINING = """
import argparse
import torch

OPTIONS = argparse.Namespace(do_valid=True, eval_iters=10, eval_interval=2, train_iters=1000)

def get_args():
    return OPTIONS

def should_disable_forward_pre_hook(args):
    return False

def save_checkpoint(*args): pass
def load_checkpoint(*args): pass
def num_floating_point_operations(args, batch): return 0
def print_rank_0(message): print(message)
def print_rank_last(message): print(message)

def train_step(forward_step_func, data_iterator, model, optimizer):
    forward_step_func(data_iterator, model).backward()
    optimizer.step()
    optimizer.zero_grad()

def evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose=False, non_loss_data_func=None,
             eval_iters=None):
    with torch.no_grad():
        for _ in range(eval_iters):
            print("evaluated", float(forward_step_func(data_iterator, model)) > 0)
    return {}, None, False

def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, process_non_loss_data_func, config):
    evaluate(forward_step_func, data_iterator, model, process_non_loss_data_func, config, eval_iters=OPTIONS.eval_iters)

def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator,
          process_non_loss_data_func, config, checkpointing_context, non_loss_data_func):
    for iteration in range(1, OPTIONS.train_iters + 1):
        train_step(forward_step_func, train_data_iterator, model, optimizer)
        if iteration % OPTIONS.eval_interval == 0 and OPTIONS.do_valid:
            evaluate_and_print_results("", forward_step_func, valid_data_iterator, model, iteration, None, config)

def pretrain(trained, validated):
    model = torch.nn.Linear(1024, 65_536).cuda()
    def forward(data, model):
        return model(torch.ones(next(data), 1024, device="cuda")).square().mean()
    def batches(size):
        while True:
            yield size
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(forward, model, optimizer, None, batches(trained), batches(validated), None, None, {}, None)
    if OPTIONS.do_valid:
        evaluate_and_print_results("", forward, batches(validated), model, OPTIONS.train_iters, None, None)
"""
SCRIPT = """
import sys
from megatron.training import training
training.OPTIONS.do_valid, training.OPTIONS.train_iters = sys.argv[2] == "valid", int(sys.argv[3])
training.pretrain(8, int(sys.argv[1]))
"""


def predicted(folder: Path, *arguments: str, options: tuple[str, ...] = (), status: int = 0) -> dict[str, Any]:
    package = folder / "megatron" / "training"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "training.py").write_text(TRAINING)
    (folder / "pretrain.py").write_text(SCRIPT)
    command = [str(MAYA), "run", "--json", "p.json", *options, "--", sys.executable, "pretrain.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return {**json.loads((folder / "p.json").read_text()), "output": done.stdout}


def test_an_iteration_counts(tmp_path: Path) -> None:
    alone = predicted(tmp_path, "8", "no", "1000")
    both = predicted(tmp_path, "8", "valid", "1000")
    assert both["step_time_s"] == alone["step_time_s"]
    assert both["memory"]["ranks"][0]["peak_allocated_bytes"] == alone["memory"]["ranks"][0]["peak_allocated_bytes"]
    assert alone["validation"] == [] and both["output"].count("evaluated") == 1
    (loop,) = both["validation"]
    assert (loop["name"], loop["batches"], loop["every_steps"]) == ("validation", 10, 2)
    assert loop["loop_s"] > 9 * loop["batch_s"] > 0


def test_at_the_end_of_the_training(tmp_path: Path) -> None:
    found = predicted(tmp_path, "8", "valid", "4", options=("--steps", "all"))
    assert found["trace"]["steps"] == 4 and found["output"].count("evaluated") == 1
    assert len(found["validation"]) == 1


def test_an_iteration_that_does_not_fit(tmp_path: Path) -> None:
    """400,000 rows of 65,536 numbers are 97.7 GiB."""
    found = predicted(tmp_path, "400000", "valid", "1000", status=1)
    assert found["memory"]["fits"] is False
    assert found["memory"]["ranks"][0]["out_of_memory_phase"] == "validation"
