"""Triton kernels, Liger's own and inductor's, as Liger-Kernel's authors measured them, beside what is predicted of them.

    pip install --no-deps liger-kernel
    python tests/accuracy/triton_kernels.py DATA

DATA has ops/liger_kernel_fwd_bwd.csv.gz, the benchmark data of the Liger-Kernel repository. Every operation is run as its benchmark runs it, on
the emulated GPU; compared is the time of its kernels with the measured median. Below SHORTEST the host was measured, not the GPU.
Not all versions of Liger that measured are the one that is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.experimental.embedding import LigerEmbedding
from liger_kernel.transformers.kl_div import LigerKLDIVLoss
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from liger_kernel.transformers.softmax import LigerSoftmax
from liger_kernel.transformers.tvd import LigerTVDLoss
from rich.console import Console
from rich.table import Table
from torch import nn

import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.predictor.pricing import Predictor
from maya_core.trace.schema import EventKind

SHORTEST = 0.1  # ms
GPUS = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200"}
LIGER = ("liger", "liger_triton")
Operation = Callable[[], Any]


class Measured:
    """A row of the table."""

    def __init__(self, row: Any) -> None:
        self.gpu, self.kernel, self.provider = GPUS[row.gpu_name], row.kernel_name, row.kernel_provider
        self.mode, self.ms = row.kernel_operation_mode, row.p50
        self.sizes: dict[str, Any] = json.loads(row.config) | {row.x_name: row.x_value}
        self.dtype = getattr(torch, self.sizes.get("dtype", "torch.float32").removeprefix("torch."))
        self.inputs: list[torch.Tensor] = []  # whose gradients the benchmark throws away

    def __getitem__(self, names: str) -> int:
        """The first of these sizes that is given, or the product of two: "N|hidden_size", "B*T"."""
        for name in names.split("|"):
            parts = [self.sizes.get(part) for part in name.split("*")]
            if None not in parts:
                return int(parts[0]) * (int(parts[1]) if len(parts) > 1 else 1)
        raise KeyError(names)

    def matrix(self, rows: str, columns: str, grad: bool = True) -> torch.Tensor:
        made = torch.empty(self[rows], self[columns], device="cuda", dtype=self.dtype, requires_grad=grad)
        self.inputs.append(made)
        return made


def norm(kind: Any) -> Callable[[Measured], Operation]:
    def make(one: Measured) -> Operation:
        module = kind(one["N|H|hidden_size"]).to("cuda", one.dtype)
        rows = one.matrix("M|T", "N|H|hidden_size")
        return lambda: module(rows)

    return make


def softmax(one: Measured) -> Operation:
    module, rows = LigerSoftmax(), one.matrix("BT", "hidden_size")
    return lambda: module(rows)


def distance(make_loss: Callable[[], nn.Module]) -> Callable[[Measured], Operation]:
    def make(one: Measured) -> Operation:
        loss = make_loss()
        rows, target = one.matrix("BT|B*T", "vocab_size|V"), one.matrix("BT|B*T", "vocab_size|V", grad=False)
        return lambda: loss(rows, target)

    return make


def cross_entropy(one: Measured) -> Operation:
    loss, rows = LigerCrossEntropyLoss(), one.matrix("BT|B*T", "vocab_size|V")
    target = torch.zeros(len(rows), dtype=torch.long).cuda()
    return lambda: loss(rows, target)


def rope(one: Measured) -> Operation:
    length, width = one["T|seq_len"], one["H|hidden_size"]
    head = width // one["num_q_heads|num_attention_heads"]
    heads = (one["num_q_heads|num_attention_heads"], one["num_kv_heads|num_key_value_heads"])
    query, key = (
        torch.empty(1, length, count, head, device="cuda", dtype=one.dtype).transpose(1, 2).requires_grad_()
        for count in heads
    )
    one.inputs += [query, key]
    cos, sin = (torch.empty(1, length, head, device="cuda", dtype=one.dtype) for _ in range(2))
    return lambda: liger_rotary_pos_emb(query, key, cos, sin)


def embedding(one: Measured) -> Operation:
    module = LigerEmbedding(one["V"], one["D"]) if one.provider == "liger" else nn.Embedding(one["V"], one["D"])
    module = module.to("cuda", one.dtype)
    ids = torch.randint(0, one["V"], (one["B"], one["T"])).cuda()
    if one.provider == "torch_compile":
        module.compile()
    return lambda: module(ids)


CASES: dict[str, Callable[[Measured], Operation]] = {
    "rms_norm": norm(LigerRMSNorm),
    "layer_norm": norm(LigerLayerNorm),
    "softmax": softmax,
    "kl_div": distance(lambda: LigerKLDIVLoss(reduction="batchmean")),
    "tvd": distance(LigerTVDLoss),
    "cross_entropy": cross_entropy,
    "rope": rope,
    "embedding": embedding,
}


def predicted_ms(one: Measured) -> float:
    """Of the third time: the first compiles, the second is as all others."""
    with maya_core.emulate(one.gpu) as job:
        operation = CASES[one.kernel](one)
        count = job.emulation.device.native.event_count
        for _ in range(3):
            for tensor in one.inputs:
                tensor.grad = None
            begin = count()
            result = operation()
            middle = count()
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            gradients = [torch.ones_like(each) if each.dim() == 0 else torch.randn_like(each) for each in results]
            if one.mode == "backward":
                begin = count()
            if one.mode != "forward":
                torch.autograd.backward(results, gradients, retain_graph=one.mode == "backward")
            end = middle if one.mode == "forward" else count()
    events = job.trace.events[begin:end]
    ops = events[events["kind"] == EventKind.OP]["subject"]
    return 1e3 * float(Predictor(find_gpu(one.gpu)).ops(job.trace.calls).seconds[ops].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    table = pd.read_csv(parser.parse_args().data / "ops/liger_kernel_fwd_bwd.csv.gz")
    table = table[(table.metric_name == "speed") & table.gpu_name.isin(GPUS) & table.kernel_name.isin(CASES)]
    table = table[table.kernel_provider.isin((*LIGER, "torch_compile")) & (table.p50 > SHORTEST)]
    table = table[table.x_name != "model_config"]
    errors: dict[tuple[str, str, str, str], list[float]] = {}
    for row in table.itertuples():
        one = Measured(row)
        if one.mode not in ("forward", "backward") and one.kernel != "embedding":
            continue  # the two together
        whose = "inductor" if one.provider == "torch_compile" else "Liger"
        errors.setdefault((one.kernel, whose, one.mode, one.gpu), []).append(predicted_ms(one) / one.ms - 1)
    shown = Table(title=f"Triton kernels that took more than {SHORTEST} ms: predicted against measured")
    for heading in ("operation", "whose", "", "GPU", "rows", "median", "lowest", "highest"):
        shown.add_column(heading, justify="right" if heading in ("rows", "median", "lowest", "highest") else "left")
    for key, found in sorted(errors.items()):
        shown.add_row(*key, str(len(found)), *(f"{value:+.0%}" for value in (median(found), min(found), max(found))))
    console = Console(width=110)
    console.print(shown)
    every = [abs(value) for found in errors.values() for value in found]
    console.print(f"All {len(every)}: median error {median(every):.0%}.")


if __name__ == "__main__":
    main()
