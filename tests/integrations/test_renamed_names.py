"""A framework that has renamed what Maya replaces, or whose version Maya was not checked on: one line, and a note in the prediction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAINING = """
import importlib, torch, maya_core
{before}
with maya_core.emulate("h100") as job:
    {inside}
    weight = torch.ones(8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
print("NOTES", *job.prediction.caveats, sep="\\n")
"""
RENAMED = {
    "huggingface": ("transformers.trainer", "Trainer", "evaluation_loop"),
    "lightning": ("lightning.fabric.plugins.io.torch_io", "", "_atomic_save"),
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine", "_take_model_step"),
    "megatron": ("megatron.core.parallel_state", "", "initialize_model_parallel"),
}


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("integration", RENAMED)
def test_a_renamed_function_is_told_once_and_noted(integration: str) -> None:
    module, owner, name = RENAMED[integration]
    where = ".".join(filter(None, (module, owner, name)))
    imported = f"module = importlib.import_module({module!r})"
    done = run(
        TRAINING.format(before=f"{imported}\ndel {'.'.join(filter(None, ('module', owner, name)))}", inside="pass")
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "has no" in line]
    assert len(told) == 1, done.stderr
    assert where in told[0]
    assert "the prediction may be wrong" in told[0]
    assert told[0].removeprefix("maya: ") in done.stdout.splitlines()


def test_a_renamed_function_that_would_send_the_users_data_stops_the_program() -> None:
    before = (
        "import mlflow.tracking._tracking_service.registry as registry\ndel registry.TrackingStoreRegistry.get_store"
    )
    done = run(TRAINING.format(before=before, inside="pass"))
    assert done.returncode != 0
    assert "TrackingStoreRegistry.get_store, which Maya replaces" in done.stderr
    assert "maya help versions" in done.stderr


@pytest.mark.parametrize(
    ("project", "module", "checked"),
    [
        ("transformers", "transformers", ">=4.50,<6"),
        ("accelerate", "accelerate", ">=1,<2"),
        ("lightning", "lightning", ">=2.4,<2.7"),
        ("deepspeed", "deepspeed", ">=0.16,<0.20"),
        ("megatron-core", "megatron.core", ">=0.14,<0.17"),
        ("mlflow", "mlflow", ">=3,<4"),
    ],
)
def test_a_version_that_was_not_checked_is_told_once_and_noted(
    project: str, module: str, checked: str, tmp_path: Path
) -> None:
    info = tmp_path / f"{project.replace('-', '_')}-0.1.dist-info"  # Python finds it before the installed one
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 0.1\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run(TRAINING.format(before="", inside=f"importlib.import_module({module!r})"), PYTHONPATH=path)
    expected = f"{project} 0.1 is installed, and Maya was checked on {project} {checked}: it may miss what changed in {project}."
    assert done.stderr.count(expected) == 1, done.stderr
    if done.returncode == 0:  # packages may themselves refuse such a version of another
        assert expected in done.stdout.splitlines()
