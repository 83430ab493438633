"""Jobs of many ranks as users run them: torchrun and mp.spawn under `maya run`, broken programs, killed ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from maya_here import refused

from maya_core.errors import MayaError
from maya_core.launch import torchrun
from maya_core.launch.world import World
from maya_core.trace.job import read_job

pytestmark = pytest.mark.slow

MAYA = str(Path(sys.executable).parent / "maya")

BEGIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def maya(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(
        [MAYA, "run", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def program(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def test_ranks_find_what_torchrun_gives_them(tmp_path: Path) -> None:
    train = program(tmp_path, "import json, os\nimport torch\nprint(json.dumps(dict(os.environ)))")
    done = maya("--ranks", "0,5,15", "--", "torchrun", "--nnodes=2", "--nproc-per-node=8", train, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = {}
    for line in done.stdout.splitlines():
        if "{" in line:
            environment = json.loads(line[line.index("{") :])
            told[int(environment["RANK"])] = environment
            assert line.startswith("{" if environment["RANK"] == "0" else f"[rank {environment['RANK']}] ")
    assert sorted(told) == [0, 5, 15]
    for rank, environment in told.items():
        node, local = (rank // 8, rank % 8)
        for name, value in {"LOCAL_RANK": local, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": 8, "WORLD_SIZE": 16}.items():
            assert environment[name] == str(value), name
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MASTER_PORT"] == "29500"
    assert list(read_job(tmp_path / "maya-out").ranks) == [0, 5, 15]


def test_a_cluster_given_to_maya_itself(tmp_path: Path) -> None:
    train = program(tmp_path, BEGIN + "dist.all_reduce(model.weight.data)\nprint('world', world)")
    done = maya("--nodes", "4", "--gpus-per-node", "2", "--", "python", train, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "world 8" in done.stdout
    job = read_job(tmp_path / "maya-out")
    assert (job.world_size, job.nodes, job.gpus_per_node) == (8, 4, 2)
    assert list(job.ranks) == [0]  # the others are met in collectives only


SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = torch.zeros(4, device="cuda")
    if rank == 0:
        dist.send(message, 2)
    elif rank == 2:
        dist.recv(message, 0)
    for step in range(10):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("never reached: stopped after three steps")

if __name__ == "__main__":
    mp.spawn(main, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
    print("all joined")
"""


def test_mp_spawn_starts_the_ranks_that_are_needed(tmp_path: Path) -> None:
    done = maya("--gpus-per-node", "4", "--", "python", program(tmp_path, SPAWN), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all joined" in done.stdout
    assert "never reached" not in done.stdout
    job = read_job(tmp_path / "maya-out")
    assert job.world_size == 4
    assert list(job.ranks) == [0, 1, 2]  # 1 stands for 3, which neither sends nor receives
    assert all(trace.steps == 3 for trace in job.ranks.values())


BY_HAND = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def run(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    print(f"rank {rank} has {tensor.item()}", flush=True)

if __name__ == "__main__":
    mp.set_start_method(sys.argv[1])
    processes = [mp.Process(target=run, args=(rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_started_by_hand(tmp_path: Path, method: str) -> None:
    done = maya("--", "python", program(tmp_path, BY_HAND), method, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 has 1.0" in done.stdout
    assert "rank 1 has 1.0" in done.stdout
    assert list(read_job(tmp_path / "maya-out").ranks) == [0, 1]


# ---- programs that would hang ----

STEPS = """
for step in range(3):
    loss = model(torch.randn(64, 1024, device="cuda")).sum()
    loss.backward()
    {communication}
    optimizer.step()
    optimizer.zero_grad()
"""

SKIPPED = """
    if not (rank == 3 and step == 1):
        dist.all_reduce(loss.detach())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
"""
SHAPES = """
    tensor = torch.zeros(2048 if rank < 2 else 1024, 1024, device="cuda")
    if rank > 0:
        dist.recv(tensor, rank - 1)
    if rank < world - 1:
        dist.send(tensor, rank + 1)
"""
UNSENT = """
    if rank == 0 and step == 1:
        dist.recv(torch.zeros(64, device="cuda"), 1)
"""
UNSENT_AND_READ = """
    if rank == 0 and step == 1:
        count = torch.zeros(1, dtype=torch.long, device="cuda")
        dist.recv(count, 1)
        print("count", count.item())
"""
LEAVES_EARLY = """
    if rank == 2 and step == 2:
        raise SystemExit(0)
    dist.all_reduce(loss.detach())
"""
CROSSED = """
    first, second = (groups if rank == 0 else groups[::-1])
    dist.all_reduce(loss.detach(), group=first)
    dist.all_reduce(loss.detach(), group=second)
"""

BROKEN = {
    "rank 3 skips an all_reduce": (SKIPPED, "all", ["call 4", "ranks 0-2: in all_reduce", "rank 3: in all_reduce"]),
    "shapes differ on one stage": (SHAPES, "auto", ["message 1 from rank 1 to rank 2", "2,097,152 Float", "1,048,576 Float"]),
    "recv without send": (UNSENT, "auto", ["message 1 from rank 1 to rank 0", "is never sent", "rank 0: in recv from rank 1"]),
    "recv without send, and read": (UNSENT_AND_READ, "auto", ["is never sent", "rank 0: in recv from rank 1"]),
    "a rank leaves early": (LEAVES_EARLY, "all", ["rank 2", "its program has ended", "in all_reduce"]),
    "groups in crossed order": (CROSSED, "all", ["rank 0", "rank 1", "all_reduce"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_hang_is_diagnosed(tmp_path: Path, case: str) -> None:
    communication, ranks, said = BROKEN[case]
    ranks_of_world = "2" if "crossed" in case else "4"
    groups = "groups = [dist.new_group(list(range(world))) for _ in range(2)]\n" if "crossed" in case else ""
    train = program(tmp_path, BEGIN + groups + STEPS.format(communication=communication.strip()))
    done = maya("--ranks", ranks, "--", "torchrun", "--nproc-per-node", ranks_of_world, train, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    report = done.stdout[done.stdout.index("This job would hang") :]
    flat = " ".join(report.split())
    for phrase in said:
        assert phrase in flat, report
    assert "train.py:" in flat  # where, on each side
    assert "Traceback" not in done.stderr


# ---- ranks that die ----


def _running(marker: str) -> list[int]:
    """Processes with that in the environment they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in environment and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def _parent(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", ["a rank", "maya itself"])
def test_a_killed_process_ends_the_run(tmp_path: Path, victim: str) -> None:
    marker = f"marker-{os.getpid()}-{victim[-4:]}"
    loader = "loader = iter(torch.utils.data.DataLoader(torch.randn(100000, 8), num_workers=2))\nimport time\n"
    steps = """
for step in range(100000):
    next(loader)
    tensor = model(torch.randn(64, 1024, device="cuda"))
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    tensor.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""
    train = program(tmp_path, BEGIN + loader + steps)
    command = [MAYA, "run", "--steps", "all", "--", "torchrun", "--nproc-per-node", "2", train]
    env = {**os.environ, "MARKER": marker}
    run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while (
        len(_running(marker)) < 8
    ):  # the command, two ranks with two workers each, and what the second was forked from
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.2)
    ranks = [pid for pid in _running(marker) if os.getpgid(pid) == pid and _parent(pid) not in (run.pid, os.getpid())]
    assert len(ranks) == 1  # the forked one
    os.kill(ranks[0] if victim == "a rank" else run.pid, signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while _running(marker):
        assert time.monotonic() < deadline, "processes were left behind"
        time.sleep(0.2)
    if victim == "a rank":
        assert run.returncode == 2
        assert "was killed by signal 9 (SIGKILL)" in errors
    with pytest.raises(MayaError, match="holds no finished run"):
        read_job(tmp_path / "maya-out")


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "9", "--", "torchrun", "--nproc-per-node", "4", "train.py"], "the world has 4 ranks, 0 to 3"),
        (["--ranks", "first", "--", "torchrun", "--nproc-per-node", "4", "train.py"], "--ranks first: not ranks"),
        (["--nodes", "2", "--", "torchrun", "--nnodes", "3", "train.py"], "--nodes 2 for Maya, --nnodes 3 for torchrun"),
        (["--", "torchrun", "--nproc-per-node", "gpu", "train.py"], "Maya does not know how many GPUs a node has"),
        (["--", "torchrun", "--nproc-per-node", "2", "missing.py"], "no such script: missing.py"),
        (["--", "torchrun", "--nproc-per-node", "many", "train.py"], "--nproc-per-node many"),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    tmp_path: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(tmp_path, BEGIN)
    done = refused("run", *arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.exit_code == 2
    assert said in done.stderr


def test_torchrun_is_recognised_in_all_its_forms() -> None:
    script = __file__
    for command in (
        ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", script, "--x", "1"],
        ["/usr/bin/python3", "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=4", script, "--x", "1"],
        ["python", "-u", "-m", "torch.distributed.launch", "--nnodes=2", "--nproc_per_node=4", script, "--x", "1"],
    ):
        args = torchrun.parse(command)
        assert args is not None
        assert torchrun.world_of(args, None) == World(2, 4)
        launched = torchrun.program_of(args, local_rank=3)
        assert launched[1:3] == ["-u", script]
        assert launched[-2:] == ["--x", "1"]
        assert ("--local-rank=3" in launched) == ("torch.distributed.launch" in command)
    assert torchrun.parse(["python", "train.py"]) is None
    assert torchrun.world_of(torchrun.parse(["torchrun", "--nproc-per-node", "gpu", script]), 8) == World(1, 8)  # type: ignore[arg-type]
