"""Ranks that do different work are found in the sources of the program, emulated, and told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maya_core.recording import rank_differences
from maya_core.recording.value_uses import source_of

MAYA = str(Path(sys.executable).with_name("maya"))

# What stands in a training loop, and the classes of 8 ranks on 2 nodes that it makes. Answers by hand.
ALIKE = [list(range(8))]
MAIN_AND_OTHERS = [[0], [1, 2, 3, 4, 5, 6, 7]]
PROGRAMS = [
    ("if rank == 3: net(x)", [[0, 1, 2, 4, 5, 6, 7], [3]]),
    ("if rank % 2 == 0: net(x)\nelse: net(x[:8])", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("step(64 if dist.get_rank() < 4 else 8)", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("if int(os.environ['LOCAL_RANK']) == 0: dist.barrier()", [[0, 4], [1, 2, 3, 5, 6, 7]]),
    ("if os.environ.get('RANK') == '5': raise ValueError('five')", [[0, 1, 2, 3, 4, 6, 7], [5]]),
    ("if rank == 0 and step == 1: dist.barrier()", MAIN_AND_OTHERS),
    ("if not accelerator.is_main_process: evaluate(net)", MAIN_AND_OTHERS),
    ("if rank in (2, 6): net(x)", [[0, 1, 3, 4, 5, 7], [2, 6]]),
    ("node = rank // 4\nif node == world_size // 8: net(x)", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("x = torch.ones(8 + rank // 4, 16)", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("for _ in range(10 - min_of(rank)): net(x)", ALIKE),  # nobody knows what min_of is
    ("if rank != 0:\n    return\nnet(x)", MAIN_AND_OTHERS),
    ("for _ in range(rank % 2): net(x)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    # What every healthy program does.
    ("if rank == 0: print('loss', loss.item())", ALIKE),
    ("if rank == 0:\n    os.makedirs('out', exist_ok=True)\n    torch.save(net.state_dict(), 'out/net.pt')", ALIKE),
    ("if dist.get_rank() == 0: writer.add_scalar('loss', torch.stack(losses).mean(), step)", ALIKE),
    ("torch.cuda.set_device(rank)\ntorch.manual_seed(7 + rank)", ALIKE),
    ("sampler = DistributedSampler(data, rank=rank, num_replicas=world_size)", ALIKE),
    ("bar = tqdm(loader, disable=rank != 0)", ALIKE),
    ("files = names[rank::world_size]", ALIKE),
    ("if rank != 0:\n    return\ntorch.save(net, 'net.pt')", ALIKE),
    ("objects = [config if rank == 0 else None]", ALIKE),
    ("if lora.rank == 8: net(x)", ALIKE),
    ("part = mesh.get_local_rank()\nif part == 0: net(x)", ALIKE),  # of a mesh, whose shape nobody knows here
    ("if rank == 0 and wandb is not None: wandb.log({'loss': loss})", ALIKE),
    ("device = f'cuda:{local_rank}'", ALIKE),
]
SCRIPT = "import os, torch, torch.distributed as dist\ndef main(rank, world_size, local_rank=0):\n{body}\n"


@pytest.mark.parametrize(("body", "classes"), PROGRAMS)
def test_classes_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, classes: list[list[int]]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines())))
    monkeypatch.setattr(rank_differences, "program_files", lambda: [str(script)])
    source_of.cache_clear()
    found = rank_differences.rank_differences(8, 4)
    assert found.classes == classes
    assert found.needed == [alike[0] for alike in classes]
    assert found.differ == bool(found.lines)


def test_many_classes_are_not_all_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(body="    x = torch.ones(rank + 1)\n    if rank == 700: net(x)"))
    monkeypatch.setattr(rank_differences, "program_files", lambda: [str(script)])
    found = rank_differences.rank_differences(16384, 8)
    assert len(found.classes) == 16384
    assert len(found.needed) == rank_differences.MOST_CLASSES and {0, 16383} <= set(found.needed)


TRAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = torch.nn.Linear(2048, 2048).cuda()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4096, 2048, device="cuda")
for step in range(3):
    BODY
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print("done", step)
"""


def predicted(folder: Path, body: str, *options: str, code: int = 0) -> dict[str, Any]:
    (folder / "train.py").write_text(TRAIN.replace("BODY", body))
    command = [MAYA, "run", "--json", "p.json", *options, "--", "torchrun", "--nproc-per-node", "4", "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads((folder / "p.json").read_text())
    return found


@pytest.mark.slow
def test_a_straggler_makes_the_job_wait(tmp_path: Path) -> None:
    alike = predicted(tmp_path, "pass")
    assert alike["world"]["emulated_ranks"] == [0] and alike["world"]["stands_for"] == {"0": "0-3"}
    assert not any("different work" in caveat for caveat in alike["caveats"])
    slow = predicted(tmp_path, "[net(x) for _ in range(10 if rank == 3 else 0)]")
    assert slow["world"]["emulated_ranks"] == [0, 3] and slow["world"]["stands_for"] == {"0": "0-2", "3": "3"}
    assert slow["step_time_s"] > 2 * alike["step_time_s"]
    every = predicted(tmp_path, "[net(x) for _ in range(10 if rank == 3 else 0)]", "--ranks", "all")
    assert slow["step_time_s"] == pytest.approx(every["step_time_s"], rel=1e-6)
    assert slow["flops"]["model"] == every["flops"]["model"]  # one slow rank of four
    [told] = [caveat for caveat in slow["caveats"] if "different work" in caveat]
    assert "train.py:12" in told and "ranks 0, 3 were emulated" in told


@pytest.mark.slow
def test_a_collective_that_one_rank_makes_alone_hangs(tmp_path: Path) -> None:
    found = predicted(tmp_path, "dist.all_reduce(torch.ones(1, device='cuda')) if rank == 2 else None", code=3)
    assert "rank" in found["hangs"][0] and found["world"]["emulated_ranks"] == [0, 2]
