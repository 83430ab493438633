"""A pipeline of Megatron Core under torchrun, in processes of its own: the stages of one pipeline are emulated, and agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
PROGRAM = Path(__file__).with_name("megatron_gpt.py")


def test_one_rank_of_each_stage_is_emulated(tmp_path: Path) -> None:
    settings = json.dumps({"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True})
    command = [BIN / "maya", "run", "--gpu", "a100", "--steps", "2", "--json", "found.json", "--"]
    command += ["torchrun", "--nproc-per-node", "8", PROGRAM, settings]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    # Names of parameter groups are gathered from all ranks, and no rank is emulated for that.
    assert found["world"]["emulated_ranks"] == [0, 4]
    assert not found["hangs"]
    first, last = (rank["by_category_bytes"]["optimizer_state"] for rank in found["memory"]["ranks"])
    assert first != last  # embedding and output layer are not on the same stage
