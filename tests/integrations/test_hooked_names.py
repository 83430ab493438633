"""Every name that an integration replaces exists in the installed version of its framework, and every version is inside its range."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import importlib, json
import maya_core

with maya_core.emulate("h100", rerun=True) as job:
    watched = sorted(job.emulation.device.patches._watch.actions)
    imported = []
    for name in watched:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:  # Megatron-LM is no package; an old version lacks what a newer one has
            continue
        imported.append(name)
    notes = job.emulation.notes.sentences
print(json.dumps({"imported": imported, "notes": notes}))
"""
CENTRAL = {
    "accelerate.commands.launch",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "deepspeed.launcher.runner",
    "deepspeed.runtime.engine",
    "lightning.fabric.fabric",
    "lightning.pytorch.trainer.trainer",
    "megatron.core.optimizer.optimizer",
    "mlflow.tracking._tracking_service.registry",
    "pytorch_lightning.trainer.trainer",
    "transformers.modeling_utils",
    "transformers.trainer",
}


def test_no_name_is_missing() -> None:
    """In a process of its own, because the hooks run when a module is first imported. With `rerun`, those of launchers are included."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["imported"]) >= CENTRAL
    assert found["notes"] == []
