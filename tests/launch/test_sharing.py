"""CUDA tensors that processes of a program send to each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")
PROGRAM = """
import json, sys, torch
import torch.multiprocessing as mp

def describe(tensor):
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), str(tensor.device), tensor.requires_grad]

def receive(queue, answers):
    first, again = queue.get(), queue.get()
    same = first.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    answers.put([describe(first), describe(again), first.tolist(), same, torch.cuda.memory_allocated()])

def given(tensor, answers):
    answers.put([describe(tensor), torch.cuda.memory_allocated()])

def piped(end):
    tensor = end.recv()
    end.send(describe(tensor))
    end.send(tensor * 2)
    end.recv()

def send(queue):
    for number in range(3):
        queue.put(torch.full((4,), number, device="cuda"))
    import time
    time.sleep(60)

def forked(answers):
    try:
        torch.ones(1, device="cuda")
        answers.put("no error")
    except RuntimeError as error:
        answers.put(str(error))

def queue_to_child(context):
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=receive, args=(queue, answers))
    child.start()
    tensor = torch.arange(12).cuda().view(3, 4)
    queue.put(tensor.t())
    queue.put(tensor[1:])
    result = answers.get(timeout=100)
    child.join()
    return result

def argument(context):
    answers = context.Queue()
    child = context.Process(target=given, args=(torch.nn.Parameter(torch.randn(300, 5, device="cuda")), answers))
    child.start()
    result = answers.get(timeout=100)
    child.join()
    return result

def pipe(context):
    here, there = context.Pipe()
    child = context.Process(target=piped, args=(there,))
    child.start()
    here.send(torch.ones(2, 6, device="cuda", dtype=torch.bfloat16))
    result = [here.recv(), here.recv().tolist()]
    here.send("done")
    child.join()
    return result

def daemon(context):
    queue = context.Queue()
    child = context.Process(target=send, args=(queue,), daemon=True)
    child.start()
    return [queue.get(timeout=100).tolist() for _ in range(3)]

def fork(context):
    torch.ones(1, device="cuda")
    answers = context.Queue()
    child = context.Process(target=forked, args=(answers,))
    child.start()
    result = answers.get(timeout=100)
    child.join()
    return result

if __name__ == "__main__":
    case, method = sys.argv[1:]
    print("RESULT " + json.dumps(globals()[case](mp.get_context(method))), flush=True)
    layer = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        layer(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


def result_of(folder: Path, case: str, method: str) -> Any:
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [MAYA, "run", "--", "python", "program.py", case, method],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_a_queue_hands_over_the_same_memory_with_its_values(tmp_path: Path) -> None:
    first, again, values, same, allocated = result_of(tmp_path, "queue_to_child", "spawn")
    assert first == [[4, 3], [1, 4], "torch.int64", "cuda:0", False]
    assert again == [[2, 4], [4, 1], "torch.int64", "cuda:0", False]
    assert values == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert same
    assert allocated == 0  # the sender's allocator counts it


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_parameter_as_an_argument(tmp_path: Path, method: str) -> None:
    assert result_of(tmp_path, "argument", method) == [[[300, 5], [5, 1], "torch.float32", "cuda:0", True], 0]


def test_a_pipe_in_both_directions(tmp_path: Path) -> None:
    received, doubled = result_of(tmp_path, "pipe", "spawn")
    assert received == [[2, 6], [6, 1], "torch.bfloat16", "cuda:0", False]
    assert doubled == [[2.0] * 6] * 2


def test_a_daemon_that_makes_tensors(tmp_path: Path) -> None:
    assert result_of(tmp_path, "daemon", "spawn") == [[number] * 4 for number in range(3)]


def test_a_fork_of_a_process_that_has_used_the_gpu_is_refused_as_torch_does(tmp_path: Path) -> None:
    assert "Cannot re-initialize CUDA in forked subprocess" in result_of(tmp_path, "fork", "fork")
