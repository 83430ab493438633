"""How emulation time depends on the size of the world, where the ranks to emulate stay the same number.

    make bench-worlds        (or: python tests/benchmarks/bench_worlds.py [--plot docs/images/worlds.svg])

The same script runs at 8, 64, 1,024 and 16,384 ranks, in turn, several times over; what counts is the ratio to 8 ranks
in the same run. Then a GPT-3 175B on 1,024 GPUs. Not a test: nothing here fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
MAYA = Path(sys.executable).parent / "maya"
NODES = (1, 8, 128, 2048)  # of 8 GPUs
KINDS = ("ddp", "hsdp", "fsdp2")

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {examples!r})
from train_gpt import GPT

kind = sys.argv[1]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
with torch.device("cuda"):
    model = GPT(layers=12, width=768, heads=12, vocabulary=50304, context=512)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
else:
    world = dist.get_world_size()
    flat = kind == "fsdp2"
    shape, names = ((world,), ("shard",)) if flat else ((world // 8, 8), ("replicate", "shard"))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(100):
    tokens = torch.randint(0, 50304, (8, 512), device="cuda")
    model(tokens).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall-clock time of a run, and the most memory its processes held at once in GB."""
    started = time.monotonic()
    output = folder / "output"
    with output.open("w") as to:
        run = subprocess.Popen(command, cwd=folder, stdout=to, stderr=to)
    most = 0
    while run.poll() is None:
        most = max(most, _resident_bytes(run.pid))
        time.sleep(0.25)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}:\n{output.read_text()}")
    return time.monotonic() - started, most / 1e9


def _resident_bytes(parent: int) -> int:
    """Of a process and all below it; memory shared between them counts for each."""
    below: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            below.setdefault(int(fields[1]), []).append(int(entry.name))
            resident[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    total, waiting = 0, [parent]
    while waiting:
        process = waiting.pop()
        total += resident.get(process, 0)
        waiting += below.get(process, [])
    return total


def command(script: Path, nodes: int, *arguments: str) -> list[str]:
    return [str(MAYA), "run", "--", "torchrun", f"--nnodes={nodes}", "--nproc-per-node=8", str(script), *arguments]


def plot(times: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhspan(0.8, 1.2, color="#e8eef7", label="within 20 %")
    for kind, by_nodes in times.items():
        worlds = [8 * nodes for nodes in by_nodes]
        axes.plot(worlds, [by_nodes[nodes] / by_nodes[1] for nodes in by_nodes], marker="o", label=kind)
    axes.set(xscale="log", xlabel="GPUs in the emulated world", ylabel="emulation time, against 8 GPUs", ylim=(0, 2))
    axes.set_xticks([8 * nodes for nodes in NODES], [f"{8 * nodes:,}" for nodes in NODES], minor=False)
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--skip-large", action="store_true", help="leave out GPT-3 on 1,024 GPUs")
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(PROGRAM.format(examples=str(ROOT / "examples")))
        taken: dict[str, dict[int, list[float]]] = {kind: {nodes: [] for nodes in NODES} for kind in KINDS}
        seconds(command(script, 1, "ddp"), folder)  # compiles the device, warms the disk
        cases = [(kind, nodes) for _ in range(args.rounds) for kind in KINDS for nodes in NODES]
        for kind, nodes in track(cases, "runs", console=Console(stderr=True)):
            taken[kind][nodes].append(seconds(command(script, nodes, kind), folder)[0])
        times = {kind: {nodes: statistics.median(all_) for nodes, all_ in rows.items()} for kind, rows in taken.items()}
        table = Table(title=f"Emulation time in seconds (ratio to 8 GPUs), median of {args.rounds}")
        for heading in ("", *(f"{8 * nodes:,} GPUs" for nodes in NODES)):
            table.add_column(heading, justify="right")
        for kind, row in times.items():
            table.add_row(kind, *(f"{row[nodes]:.1f} ({row[nodes] / row[1]:.2f})" for nodes in NODES))
        console.print(table)
        if args.plot:
            plot(times, args.plot)
        if not args.skip_large:
            elapsed, memory = seconds(command(ROOT / "examples" / "train_gpt_3d.py", 128), folder)
            console.print(f"GPT-3 175B, TP 8 x PP 8 x DP 16 on 1,024 GPUs, 3 steps: {elapsed:.0f} s, {memory:.1f} GB")


if __name__ == "__main__":
    main()
