"""Runs scripts on real CUDA PyTorch over a fake CUDA runtime, by a command RUN that is given the path of a script."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from maya_core.torch_seam.version import installed, numbers


def on_cuda(run: str, script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with these environment variables. Ends with what it printed if it fails."""
    done = subprocess.run([run, str(script)], env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{run} {script.name} failed:\n{done.stderr[-3000:]}")
    return done


def check_version(run: str) -> None:
    """Ends if RUN has another version of torch than this environment: their figures cannot be compared."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "version.py")
        script.write_text("import torch; print(torch.__version__)")
        version = on_cuda(run, script).stdout.split()[-1]
    if numbers(version) != installed().version:
        raise SystemExit(f"{run} runs torch {version}, but {installed().text} is installed here.")
