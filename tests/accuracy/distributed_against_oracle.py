"""Memory and launches of ranks of distributed training scripts, emulated, beside what real CUDA PyTorch does.

    python tests/accuracy/distributed_against_oracle.py ORACLE [--only SCRIPT] [--write FIGURES.csv]

ORACLE is a command that runs a Python script on real CUDA PyTorch over a fake CUDA runtime and NCCL (docs/memory.md), as
`ORACLE script.py arguments`. With ORACLE_TRACE=file it writes what reached the runtime, a line each: L kernel, G matrix
product, P copy, Z memset, C collective; ORACLE_SM and ORACLE_SMS tell it the GPU, ORACLE_NDEV their number.
Exits with 1 if allocated memory is off by more than 1 %.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ranks import Figures, Rank, emulated
from rich.console import Console
from rich.progress import track
from rich.table import Table

from maya_core.hardware.catalog import find_gpu

ALONE = str(Path(__file__).parent / "alone.py")
LIMIT = 1.0  # percent, of allocated memory
VARIANTS = {
    "ddp": ["default", "bucket_view", "static_graph", "unused", "small_buckets", "bf16_hook", "autocast", "no_sync", "clipped"],
    "fsdp2": [
        "default", "kept", "resharded_by_4", "bf16", "bf16_all", "meta", "offloaded", "offloaded_pinned", "accumulated",
        "hybrid", "hybrid_accumulated", "checkpointed", "prefetched", "fused", "foreach", "clipped",
    ],
    "fsdp1": ["full", "grad_op", "not_sharded", "bf16", "original", "original_bf16", "synced", "offloaded"],
    "tensor_parallel": ["plain", "sequence", "with_fsdp"],
    "collectives": ["all"],
    "hugging_face": ["gpt2_ddp", "llama_fsdp2"],
}  # fmt: skip
# Other worlds: a group of one, shards that are not even (first and last rank), several nodes, a rank in the middle; A100.
OTHERS = [
    Rank("ddp", "default", ranks=1), Rank("fsdp2", "default", ranks=1), Rank("fsdp2", "bf16", ranks=7),
    Rank("fsdp2", "bf16", ranks=7, rank=6), Rank("fsdp1", "original", ranks=3), Rank("fsdp2", "default", ranks=64),
    Rank("tensor_parallel", "with_fsdp", rank=5), Rank("ddp", "default", "a100"), Rank("fsdp2", "bf16", "a100"),
    Rank("fsdp1", "full", "a100"), Rank("tensor_parallel", "sequence", "a100"),
]  # fmt: skip
COLUMNS = [
    "script", "variant", "gpu", "ranks", "rank", "first_allocated", "first_reserved", "allocated", "reserved", "launches",
]  # fmt: skip


def cases(only: str | None) -> list[Rank]:
    every = [Rank(script, variant) for script, variants in VARIANTS.items() for variant in variants]
    return [rank for rank in every + OTHERS if only in (None, rank.script)]


def on_oracle(oracle: str, rank: Rank) -> Figures:
    gpu = find_gpu(rank.gpu)
    major, minor = gpu.compute_capability
    with tempfile.NamedTemporaryFile("r") as trace:
        settings = {
            "ORACLE_TRACE": trace.name,
            "ORACLE_NDEV": "8",
            "ORACLE_SM": str(major * 10 + minor),
            "ORACLE_SMS": str(gpu.sms),
        }
        done = subprocess.run(
            [oracle, ALONE, *rank.command],
            env={**rank.environment, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{rank} failed on the oracle:\n{done.stderr[-3000:]}")
        return Figures.of(done.stdout, launches(trace))


def launches(trace: Iterator[str]) -> int:
    """What the program launched. A collective that is not in place is followed by copies that the fake NCCL made."""
    count = 0
    pending, copy = 0, ""
    for line in trace:
        kind, *fields = line.rstrip().split(",")
        if kind == "C":
            pending = 0
            if fields[0] in ("AllGather", "ReduceScatter", "Broadcast"):
                pending = int(fields[2]) if fields[0] == "AllGather" else 1
                copy = f"P,3,{fields[1]}"
        elif pending and line.startswith(copy):
            pending -= 1
        elif kind in ("L", "G", "P", "Z", "N"):
            pending = 0
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle")
    parser.add_argument("--only", choices=VARIANTS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    table = Table(title="Emulated against real CUDA PyTorch")
    for heading in ("script", "variant", "GPU", "rank", "allocated", "", "reserved", "", "launches", ""):
        table.add_column(heading, justify="left" if heading in ("script", "variant", "GPU") else "right")
    rows, worst = [], 0.0
    for rank in track(cases(options.only), "Running", console=Console(stderr=True)):
        theirs, ours = on_oracle(options.oracle, rank), emulated(rank)
        worst = max(worst, *(off(a[0], b[0]) for a, b in ((ours.first, theirs.first), (ours.last, theirs.last))))
        cells = [rank.script, rank.variant, rank.gpu, f"{rank.rank} of {rank.ranks}"]
        for mine, real in (*zip(ours.last, theirs.last, strict=True), (ours.launches, theirs.launches)):
            cells += [f"{mine:,}", f"{mine - real:+,}"]
        table.add_row(*cells)
        where = [rank.script, rank.variant, rank.gpu, rank.ranks, rank.rank]
        rows.append([*where, *theirs.first, *theirs.last, theirs.launches])
    console = Console(width=140)
    console.print(table)
    console.print(f"Worst allocated peak: {worst:.3f} % (limit {LIMIT} %)")
    if options.write:
        with options.write.open("w") as file:
            file.write(
                f"# real CUDA torch 2.13: python tests/accuracy/distributed_against_oracle.py ORACLE --write {options.write}\n"
            )
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    sys.exit(worst > LIMIT)


def off(mine: int, real: int) -> float:
    return abs(100 * (mine - real) / real)


if __name__ == "__main__":
    main()
