"""Programs that between them use every part of the seam to torch, and what they are predicted to do on one H100 or several.

python tests/torch_seam/seam_programs.py record runs them with the installed torch and writes figures.json, which the tests on every version of torch
compare with. Time and launches are those of the recorded ops as the compared version executes them: what an op launches in each version is tested
op by op (tests/ops/oracle).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import maya_core
from maya_core.torch_seam.version import COMPARED, FIRST, Version, text

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden" / "programs"
FIGURES = HERE / "figures.json"
RECORDED = "maya-out"
STEPS = 3
# Since torch 2.15, cuBLAS's workspaces are not kept, unless they are asked for: then all versions do the same.
SETTINGS = {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}


@dataclass(frozen=True)
class Program:
    path: Path
    gpus: int = 1
    launcher: str = "torchrun"

    @property
    def name(self) -> str:
        return self.path.stem

    def command(self) -> list[str]:
        """Writes the traces to `maya-out` in the current folder."""
        if self.launcher == "plugin":
            return ["python", str(self.path), RECORDED]
        if self.launcher == "deepspeed":
            emulate = ["--emulate", "--emulate-gpu", "h100", "--emulate-steps", str(STEPS), "--emulate-out", RECORDED]
            return ["deepspeed", *emulate, "--num_gpus", str(self.gpus), str(self.path)]
        start = ["torchrun", "--nproc-per-node", str(self.gpus)] if self.gpus > 1 else ["python"]
        return ["maya", "run", "--gpu", "h100", "--steps", str(STEPS), "--out", RECORDED, "--", *start, str(self.path)]


PROGRAMS = {
    program.name: program
    for program in (
        Program(GOLDEN / "gpt2_ddp.py", 8),  # DDP, autocast, foreach
        Program(GOLDEN / "llama_fsdp2.py", 8),  # FSDP2, fused attention, checkpointing, fused AdamW
        Program(GOLDEN / "pipeline.py", 4),  # torch.distributed.pipelining
        Program(GOLDEN / "llama_compiled.py"),
        Program(GOLDEN / "flex_attention.py"),
        Program(GOLDEN / "resnet_amp.py"),  # cuDNN
        Program(GOLDEN / "lstm.py"),
        Program(HERE / "programs/tensor_parallel.py", 4),
        Program(HERE / "programs/cuda_graphs.py"),
        Program(HERE / "programs/gpt2_transformers.py"),
        Program(HERE / "programs/lightning_plugin.py", 8, "plugin"),
        Program(GOLDEN / "zero3.py", 4, "deepspeed"),
    )
}


@dataclass(frozen=True)
class Difference:
    """What torch itself does otherwise in some versions, and what is predicted there."""

    program: str
    figures: dict[str, float]
    why: str
    since: Version = FIRST
    until: Version | None = None  # the first version without the difference


DIFFERENCES = (
    Difference(
        "flex_attention",
        {"kernels_per_step": 69, "step_time_s": 0.00234486},
        "inductor fills a gradient with zeros in a kernel of its own",
        until=(2, 12),
    ),
    Difference(
        "cuda_graphs",
        {"allocated_bytes": 533022208},
        "make_graphed_callables warms up and captures on one stream, so that there are two fewer workspaces of cuBLAS",
        since=(2, 14),
    ),
    Difference(
        "pipeline",
        {"allocated_bytes": 665479680},
        "torch.distributed.pipelining releases the output of a stage once it is sent",
        since=(2, 15),
    ),
)


def expected_figures(program: str, torch: Version) -> dict[str, float]:
    """What the program is predicted to do with a version of torch."""
    figures: dict[str, float] = json.loads(FIGURES.read_text())[program]
    for each in DIFFERENCES:
        if each.program == program and each.since <= torch and (each.until is None or torch < each.until):
            figures |= each.figures
    return figures


def figures_of(program: Program) -> dict[str, float]:
    """Runs a program as its user would, and returns what is predicted."""
    with tempfile.TemporaryDirectory() as folder:
        ours = {name: value for name, value in os.environ.items() if name not in ("MAYA_HARDWARE", "MAYA_PROFILES")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**ours, **SETTINGS, "PATH": path, "XDG_CONFIG_HOME": folder}
        done = subprocess.run(program.command(), cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        job = maya_core.read_job(Path(folder, RECORDED))
    for trace in job.ranks.values():
        trace.meta["torch"] = text(COMPARED)
    prediction = maya_core.predict(job)
    return {
        "step_time_s": float(f"{prediction.step_time_s:.6g}"),
        "kernels_per_step": prediction.trace.kernels_per_step,
        "allocated_bytes": prediction.memory.ranks[0].peak_allocated_bytes,
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit("usage: seam_programs.py record")
    FIGURES.write_text(json.dumps({name: figures_of(program) for name, program in PROGRAMS.items()}, indent=1) + "\n")
