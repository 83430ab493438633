"""Which published runs are reproduced: for every source one rule that turns a row of the measurements into a cluster, a
command and the figures to compare with, or says why the row is skipped. No row has a rule of its own.

The columns are those of e2e/e2e.csv in the folder of measurements (its README says where each source came from).
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maya_core.hardware.cluster import Cluster, cluster

Half = Literal["fit", "judge"]
MemoryMetric = Literal["allocated", "reserved", "device"]  # device: what nvidia-smi shows, reserved and outside of it

GPUS = {
    "A100-SXM-80GB": "a100",
    "A100-SXM-40GB": "a100-40gb",
    "A100-PCIe-80GB": "a100-pcie",
    "A100-PCIe-40GB": "a100-pcie-40gb",
    "A800-80GB": "a100",  # an A100 with slower NVLink; only its memory is compared
    "H100-SXM-80GB": "h100",
    "V100-SXM-16GB": "v100-16gb",
    "V100-SXM-32GB": "v100",
    "V100-PCIe-32GB": "v100-pcie",
    "L4": "l4",
    "T4": "t4",
}

# What a row says about the network: kind of port, and ports of a node.
NETWORKS = {
    "RoCE 1600 Gbps/node": ("roce-200", 8),
    "NVLink + 4x100Gb RoCE/node": ("roce-100", 4),
    "400 Gbps": ("roce-100", 4),
    "NVLink + 8x200Gb HDR IB (Selene)": ("infiniband-hdr", 8),
}


# The measurements have no dimensions for this one; these are fms-fsdp's own (fms_fsdp/utils/config_utils.py).
FMS_LLAMA_34B: dict[str, object] = {
    "layers": 48, "width": 8192, "heads": 64, "kv-heads": 8, "inner": 22016, "vocabulary": 32000,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of the measurements; an empty cell is None."""

    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells[column]

    def number(self, column: str) -> float:
        if not self.cells[column]:
            raise KeyError(column)
        return float(self.cells[column])

    def whole(self, column: str) -> int:
        return round(self.number(column))

    def has(self, column: str) -> bool:
        return bool(self.cells[column])

    @property
    def id(self) -> int:
        return int(self.cells["row_id"])


@dataclass(frozen=True)
class PublishedMemory:
    bytes: float
    metric: MemoryMetric


@dataclass(frozen=True)
class Run:
    """One published run, and how it is reproduced."""

    row: int
    source: str
    label: str
    provenance: str
    gpu: str
    nodes: int
    gpus_per_node: int
    network: tuple[str, int] | None
    script: str
    arguments: tuple[str, ...]
    step_s: float | None = None
    memory: PublishedMemory | None = None
    differs: str = ""  # what the emulated program does otherwise than the measured one
    attention: str = "flash2"  # generation of the flash kernels that ran
    steps: int = 3  # to emulate: the first allocates the optimizer's state, the last is what is predicted

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def cluster(self) -> Cluster:
        if self.network is None:
            return cluster(self.gpu, self.gpus_per_node, self.nodes)
        kind, ports = self.network
        found = cluster(self.gpu, self.gpus_per_node, self.nodes, network=kind)
        return found.model_copy(update={"node": found.node.model_copy(update={"nics": ports})})


@dataclass(frozen=True)
class SkippedRow:
    row: int
    source: str
    reason: str


@dataclass(frozen=True)
class Source:
    half: Half
    rule: Callable[[Row], Run | str]


def tokens_step_s(row: Row) -> float:
    """A step's time from tokens per second and GPU."""
    tokens = row.number("global_batch") * row.number("seq_len")
    return tokens / row.number("gpus") / row.number("tokens_per_s_per_gpu")


def make(row: Row, script: str, arguments: dict[str, object], label: str, **rest: Any) -> Run:
    """A run on the row's GPUs. Of arguments, True is a flag, False and None are omitted."""
    gpus = row.whole("gpus")
    per_node = min(gpus, row.whole("gpus_per_node") if row.has("gpus_per_node") else 8)
    given: list[str] = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            given += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    nodes = gpus // per_node
    return Run(
        row=row.id,
        source=row.text("source"),
        label=f"{label}, {gpus} x {row.text('gpu')}",
        provenance=f"{row.text('source_repo')}@{row.text('source_commit')}, {row.text('source_path')}",
        gpu=GPUS[row.text("gpu")],
        nodes=nodes,
        gpus_per_node=per_node,
        network=NETWORKS.get(row.text("interconnect")) if nodes > 1 else None,
        script=script,
        arguments=tuple(given),
        **rest,
    )


def shape(row: Row) -> dict[str, object]:
    """Dimensions that all language models have."""
    columns = {"layers": "n_layers", "width": "hidden", "heads": "heads", "vocabulary": "vocab", "context": "seq_len"}
    return {name: row.whole(column) for name, column in columns.items()}


def batches(row: Row) -> dict[str, object]:
    return {"micro-batch": row.whole("micro_batch"), "accumulate": row.whole("grad_accum")}


def mpt(row: Row) -> Run | str:
    arguments = shape(row) | batches(row) | {"recompute": row.text("recompute")}
    arguments["mixed-precision"] = row.text("zero_fsdp").rpartition("mp=")[2]
    label = (
        f"{row.text('model')}, {row.whole('seq_len')} tokens, {row.whole('micro_batch')} x {row.whole('grad_accum')}"
    )
    # submit_benchmarks.py set attn_impl "triton" when either table was made: a kernel of FlashAttention-1's time.
    return make(row, "mpt_fsdp.py", arguments, label, step_s=tokens_step_s(row), attention="flash1")


def internevo(row: Row) -> Run | str:
    within = row.text("zero_fsdp").removeprefix("ZeRO-1 ").removeprefix("within ").removesuffix(" GPUs")
    tp, zero = row.whole("tp"), None if within == "over all DP" else int(within)
    arguments = shape(row) | {"inner": row.whole("ffn")} | batches(row) | {"tp": tp, "zero": zero}
    arguments["recompute"] = row.text("recompute")
    label = f"InternLM-7B, tp {tp}, ZeRO-1 over {zero or 'all'}, {row.whole('micro_batch')} x {row.whole('grad_accum')}"
    label += ", recomputed" if row.text("recompute") == "full" else ""
    # doc/install.md of the time: flash-attn 1.0.5.
    return make(row, "internevo.py", arguments, label, step_s=tokens_step_s(row), attention="flash1")


# The memory table names models only; these are InternEvo's own (configs/_base_/models/internlm_*.py).
INTERNLM: dict[str, dict[str, object]] = {
    "InternLM-7B": {"layers": 32, "width": 4096, "heads": 32, "inner": 11008, "vocabulary": 103168},
    "InternLM-20B": {"layers": 60, "width": 5120, "heads": 40, "inner": 13824, "vocabulary": 103168},
}


def internevo_memory(row: Row) -> Run | str:
    """What was read is not stated. It can only be what the GPU had in use: nvidia-smi shows that, in units of 2^30 bytes."""
    tp, pp, kind = row.whole("tp"), row.whole("pp"), row.text("zero_fsdp")
    arguments = INTERNLM[row.text("model")] | {"context": row.whole("seq_len")} | batches(row)
    arguments["recompute"] = row.text("recompute")
    script = "internevo_fsdp.py" if kind == "FSDP" else "internevo_pipeline.py" if pp > 1 else "internevo.py"
    arguments |= {"pp": pp} if pp > 1 else {"tp": tp}
    label = f"{row.text('model')}, {kind}, tp {tp}, pp {pp}"
    return make(row, script, arguments, label, memory=PublishedMemory(row.number("peak_mem") * 2**30, "device"))


def megatron(row: Row) -> Run | str:
    if row.text("framework") != "Megatron-LM":
        return "DeepSpeed's ZeRO-3 of 2021: what it fetched ahead of time and what it overlapped is not published"
    layers, width, vocabulary = row.whole("n_layers"), row.whole("hidden"), row.whole("vocab")
    context, samples, gpus = row.whole("seq_len"), row.whole("global_batch"), row.whole("gpus")
    # The paper's own count, recomputing included; throughput is published as FLOPs by it.
    flops = 96.0 * samples * context * layers * width**2
    flops *= 1 + context / (6 * width) + vocabulary / (16 * layers * width)
    tp, pp = row.whole("tp"), row.whole("pp")
    microbatches = samples // (gpus // (tp * pp)) // row.whole("micro_batch")
    arguments = shape(row) | {"micro-batch": row.whole("micro_batch"), "microbatches": microbatches, "tp": tp, "pp": pp}
    label = f"{row.text('model')}, tp {tp}, pp {pp}, {microbatches} microbatches"
    step_s = flops / (row.number("tflops_per_gpu") * 1e12 * gpus)
    return make(row, "megatron_gpt.py", arguments, label, step_s=step_s, steps=2)


def fms(row: Row) -> Run | str:
    dimensions = shape(row) if row.has("n_layers") else FMS_LLAMA_34B | {"context": row.whole("seq_len")}
    if row.has("n_layers"):
        dimensions |= {"kv-heads": row.whole("kv_heads"), "inner": row.whole("ffn")}
    # Which share of the blocks was recomputed is not published, but follows from what recomputing adds to the FLOPs of a
    # step: a third of them where it is all blocks.
    share = min(1.0, round(3 * (row.number("hfu_pct") / row.number("mfu_pct") - 1), 2))
    arguments = dimensions | {"micro-batch": row.whole("micro_batch"), "sharding": row.text("zero_fsdp")}
    label = f"{row.text('model')}, {row.text('zero_fsdp')}, {share:.0%} of blocks recomputed"
    differs = "compiled; here single kernels stand for what fuses in a block"
    step_s = tokens_step_s(row)
    return make(row, "fms_llama.py", arguments | {"recompute": share or None}, label, step_s=step_s, differs=differs)


def neusight(row: Row) -> Run | str:
    model = row.text("model").removeprefix("neusight:")
    family = model.partition("_")[0].rstrip("23")
    if row.text("framework").startswith("accelerate"):
        return "Megatron-LM under accelerate: precision and recomputation are not stated"
    if family not in ("bert", "gpt", "opt"):
        return "Switch Transformer: routed by code of transformers that has been rewritten since"
    if row.text("compile") == "True":
        return "compiled, and inference: what was fused is not known"
    train = row.text("task").startswith("train")
    arguments: dict[str, object] = {"model": family} | shape(row)
    arguments |= {"inner": row.whole("ffn") if row.has("ffn") else None, "batch": row.whole("global_batch")}
    label = f"{model}, {'forward and backward' if train else 'forward'}, batch {row.whole('global_batch')}, float32"
    return make(row, "neusight.py", arguments | {"train": train}, label, step_s=row.number("iteration_s"))


# Per GPU on the 16 and the 32 GB board, and per optimizer step, of PyTorch/Classification/ConvNets/configs.yml.
CONVNET_BATCHES: dict[tuple[str, str], tuple[int, int, int]] = {
    ("resnet50", "AMP fp16"): (256, 256, 2048),
    ("resnet50", "FP32"): (112, 112, 896),
    ("resnext101-32x4d", "AMP fp16"): (128, 128, 1024),
    ("resnext101-32x4d", "FP32"): (64, 64, 1024),
    ("se-resnext101-32x4d", "AMP fp16"): (112, 112, 896),
    ("se-resnext101-32x4d", "FP32"): (64, 64, 1024),
    ("efficientnet-b0", "AMP fp16"): (128, 256, 4096),
    ("efficientnet-b0", "FP32"): (64, 128, 4096),
    ("efficientnet-b4", "AMP fp16"): (32, 64, 4096),
    ("efficientnet-b4", "FP32"): (16, 32, 4096),
}


def convnet(row: Row, model: str) -> Run | str:
    precision, gpus, board = row.text("precision"), row.whole("gpus"), row.text("gpu")
    if model.startswith("efficientnet") and board == "V100-SXM-32GB" and gpus == 1:
        return "contradicts its own table: 8 GPUs are said to be more than 14 times as fast, of three models of four"
    small, large, per_step = CONVNET_BATCHES[model.replace("widese-", ""), precision]
    batch = small if board == "V100-SXM-16GB" else large
    accumulate = max(1, per_step // (batch * gpus))
    arguments = {"model": model, "batch": batch, "accumulate": accumulate, "size": 380 if model.endswith("b4") else 224}
    label = f"{model}, {precision}, {batch} x {accumulate}"
    step_s = batch * accumulate * gpus / row.number("samples_per_s_total")
    return make(row, "convnets.py", arguments | {"amp": precision == "AMP fp16"}, label, step_s=step_s)


def bert(row: Row) -> Run | str:
    squad = row.text("task") == "finetune SQuAD"
    if not squad and row.whole("seq_len") > 128:
        return "sequences were sorted by length and cut short (lddl); how long they were is not published"
    accumulate = 1 if squad else row.whole("grad_accum")
    arguments = {"task": "squad" if squad else "pretrain"} | shape(row)
    arguments |= {"micro-batch": row.whole("micro_batch"), "accumulate": accumulate}
    label = f"BERT-large, {arguments['task']}, {row.text('precision')}, {row.whole('micro_batch')} x {accumulate}"
    step_s = row.whole("micro_batch") * accumulate * row.number("gpus") / row.number("samples_per_s_total")
    half = row.text("precision") == "AMP fp16"
    return make(row, "bert.py", arguments | {"half": half}, label, step_s=step_s)


def deep_learning_examples(row: Row) -> Run | str:
    model = row.text("model").removeprefix("DLE:")
    if row.has("gpus_per_node") and row.whole("gpus_per_node") == 16:
        return "DGX-2 and DGX-2H: their V100s have other clocks and power limits than the catalog's"
    if model.startswith("ConvNets:"):
        return "the same measurement stands in the model's own table"
    if model == "BERT":
        return bert(row)
    name = model.removeprefix("efficientnet:").replace("resnet50v1.5", "resnet50")
    if name in {known for known, _ in CONVNET_BATCHES} or "widese" in name:
        return convnet(row, name)
    return "not rewritten: lengths of its sequences, or what its batches hold, are not published"


LITGPT_MODELS = {
    "phi-1.5 1.3 B": "phi-1.5",
    "StableLM Alpha 3 B": "StableLM-Alpha-3B",
    "Llama 2 7 B": "Llama-2-7B",
    "Llama 2 13 B": "Llama-2-13B",
}


def litgpt(row: Row) -> Run | str:
    """Memory only: times are of samples of many lengths. It is max_memory_allocated / 1e9 (finetune/lora.py, 8641822)."""
    if "bnb" in row.text("precision"):
        return "weights quantized by bitsandbytes, whose kernels Maya does not have"
    if not row.has("peak_mem"):
        return "ran out of memory: no figure to compare"
    method = row.text("task").removeprefix("finetune ").lower()
    micro = row.whole("micro_batch")
    model = LITGPT_MODELS[row.text("model")]
    arguments = {"model": model, "method": method, "longest": row.whole("seq_len"), "micro-batch": micro}
    label = f"{model}, {method}, microbatch {micro}{', FSDP' if row.whole('gpus') > 1 else ''}"
    memory = PublishedMemory(row.number("peak_mem") * 1e9, "allocated")
    return make(row, "litgpt_finetune.py", arguments, label, memory=memory)


# A repository is wholly on one side: rows of one source share software, hardware and the habits of whoever measured, so
# constants fitted on half of its rows would know the other half. Both sides have language models on many nodes,
# work on single GPUs, and memory: what is fitted on FSDP under composer is judged on ZeRO, FSDP, tensor and pipeline
# parallelism under others' code; what is fitted on float32 models of one GPU, on mixed precision of other models and GPUs.
SOURCES: dict[str, Source] = {
    "llm-foundry MPT": Source("fit", mpt),
    "NeuSight labels": Source("fit", neusight),
    "litgpt resource tables": Source("fit", litgpt),
    "InternEvo 7B": Source("judge", internevo),
    "InternEvo memory": Source("judge", internevo_memory),
    "fms-fsdp README": Source("judge", fms),
    "arXiv 2104.04473 Table 2": Source("judge", megatron),
    "NVIDIA DeepLearningExamples": Source("judge", deep_learning_examples),
}


ELSEWHERE = {"Megatron-LM CI golden values": "run by Megatron's own scripts, and compared in docs/megatron.md"}


def read(data: Path) -> tuple[list[Run], list[SkippedRow]]:
    """All rows of the sources above: reproduced, or skipped with a reason."""
    runs, skipped = [], []
    with (data / "e2e" / "e2e.csv").open(newline="") as file:
        for cells in csv.DictReader(file):
            row = Row(cells)
            told = row.text("source")
            source = SOURCES.get(told)
            found = source.rule(row) if source else ELSEWHERE.get(told, "of a source that is not reproduced")
            if isinstance(found, Run):
                runs.append(found)
            else:
                skipped.append(SkippedRow(row.id, told, found))
    return runs, skipped
