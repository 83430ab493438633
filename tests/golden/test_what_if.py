"""What-if on a trace of one GPU gives the same prediction as a run on the other GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import what_if_pairs
from what_if_pairs import MEMORY_WITHIN, TIME_WITHIN

from maya_core.api import what_if
from maya_core.errors import MayaError
from maya_core.trace.job import read_job

pytestmark = pytest.mark.slow

# Attention in bfloat16, or with key heads that queries share, runs as separate ops on a V100 and as one kernel everywhere else: a trace of the
# one does not tell of the other.
SEPARATE_ON_V100 = {"llama_compiled", "llama_fsdp2", "lora", "moe", "zero3"}
# Transformer Engine looks at the GPU: before Hopper it takes FlashAttention, with copies of its inputs, from Hopper on cuDNN's.
LOOKS_AT_ITS_GPU = {"megatron_tp_pp": (0.012, 0.02)}


def refused(pair: what_if_pairs.Pair) -> bool:
    if pair.program == "megatron_tp_pp":  # FlashAttention itself, which no V100 runs
        return pair.priced == "v100"
    return pair.program in SEPARATE_ON_V100 and "v100" in (pair.recorded, pair.priced)


@pytest.mark.parametrize("program", sorted(golden.recorded()))
def test_what_if_is_what_a_run_there_says(program: str) -> None:
    time_within, memory_within = LOOKS_AT_ITS_GPU.get(program, (TIME_WITHIN, MEMORY_WITHIN))
    for pair in what_if_pairs.pairs(program):
        if refused(pair):
            assert math.isnan(pair.time), pair
        else:
            assert pair.time == pytest.approx(1.0, abs=time_within), pair
            assert pair.memory == pytest.approx(1.0, abs=memory_within), pair


def on(program: str, recorded: str, gpu: str) -> list[str]:
    job = golden.read(program, recorded)
    return what_if(job, gpu=gpu).caveats


def test_what_cannot_be_told_is_refused_with_the_command_that_tells() -> None:
    with pytest.raises(MayaError) as refused:
        on("zero3", "h100", "v100")
    assert refused.value.problem == (
        "a trace recorded on h100 cannot predict v100: attention of 2x16x1024x128 BFloat16 ran by its cudnn kernel "
        "where it was recorded, and there it runs as separate ops."
    )
    assert refused.value.advice.startswith("Emulate it there: maya run --gpu v100 -- torchrun")


def test_a_program_that_looks_at_its_gpu_is_named() -> None:
    assert any("queries which GPU it runs on" in caveat for caveat in on("megatron_tp_pp", "a100", "h100"))
    assert not any("queries which GPU" in caveat for caveat in on("resnet_float32", "a100", "h100"))


LIVE = """
import sys
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)

    def forward(self, x):
        query, key, value = self.qkv(x).view(8, 256, 3, 16, 64).permute(2, 0, 3, 1, 4)
        if "copied" in sys.argv:  # head by head
            query = query.contiguous()
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


model = nn.Sequential(Block(), Block()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(8, 256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def live(folder: Path, gpu: str, *arguments: str) -> Path:
    program = folder / "live.py"
    program.write_text(LIVE)
    maya = Path(sys.executable).parent / "maya"
    command = [maya, "run", "--gpu", gpu, "--out", folder / gpu, "--", sys.executable, program, *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return folder / gpu


def test_live_runs_agree_too(tmp_path: Path) -> None:
    jobs = {gpu: read_job(live(tmp_path, gpu)) for gpu in ("v100", "a100", "h100")}
    own = {gpu: what_if_pairs.outcome(job, gpu) for gpu, job in jobs.items()}
    for recorded, job in jobs.items():
        for gpu in own.keys() - {recorded}:
            time, memory = what_if_pairs.outcome(job, gpu)
            assert time == pytest.approx(own[gpu][0], rel=TIME_WITHIN), (recorded, gpu)
            assert memory == pytest.approx(own[gpu][1], rel=MEMORY_WITHIN), (recorded, gpu)


def test_attention_that_leaves_another_layout_is_told(tmp_path: Path) -> None:
    job = read_job(live(tmp_path, "v100", "copied"))
    [told] = [caveat for caveat in what_if(job, gpu="a100").caveats if "different memory layout" in caveat]
    assert told.startswith("On a100, 2 attention calls per step return a different memory layout")
