"""Peak memory against Megatron-LM's own tests on 8 GPUs: python tests/accuracy/megatron_ci.py MEGATRON [--gpu h100] [--all]

MEGATRON is a checkout of Megatron-LM. Its CI keeps with each test what the test logged on real GPUs, torch.cuda.max_memory_allocated of the
last rank among it. Its scripts are run by `maya run` as they are, with the arguments of each test's model_config.yaml. Corpora are
replaced by random tokens, vocabularies by others of the same size, and checkpoints are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

TESTS = Path("tests/functional_tests/test_cases")
GIB = 2**30
GPUS = 8
GPUS_PER_NODE = {"gb200": 4}  # of its nodes; the others: all
STEPS = 3  # and those before CUDA graphs are captured
GRAPH_WARMUP = 3  # Megatron's default
SCRIPTS = {  # by folder; the others: pretrain_gpt.py
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "hybrid": "pretrain_mamba.py",
    "multimodal-llava": "pretrain_vlm.py",
}
GPT2_TOKENS = 50257
VOCABULARY = {"bert": 30522, "t5": 28996}  # bert-large-uncased and -cased
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# A choice that has every kind of parallelism once at least.
CASES = (
    "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
    "gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute",
    "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings",
    "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion",
    "gpt/gpt3_mcore_te_tp1_pp4_sequence_parallel",
    "gpt/gpt3_mcore_te_tp1_pp4_swiglu",
    "gpt/gpt3_mcore_te_tp1_pp4_disable_bias_linear",
    "gpt/gpt3_mcore_te_tp1_pp4_untie_embeddings_and_outputs",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_calculate_per_token_loss",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather",
    "gpt/gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
    "gpt/gpt3_mcore_te_tp2_pp2",
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion",
    "gpt/gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute",
    "gpt/gpt3_mcore_te_tp2_pp2_mla",
    "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist",
    "gpt/gpt3_mcore_te_tp2_pp2_cp2_nondeterministic",
    "gpt/gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
    "gpt/gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode",
    "gpt/gpt3_mcore_tp1_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
    "gpt/gpt3_mcore_tp1_pp2",
    "gpt/gpt3_mcore_tp1_pp4",
    "gpt/gpt3_mcore_tp2_pp2_uninstall_te",
    "gpt/gpt3_mcore_tp4_pp1",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router",
    "moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel",
    "bert/bert_mcore_tp1_pp2",
    "bert/bert_mcore_tp2_pp2",
    "bert/bert_mcore_tp4_pp1",
    "t5/t5_mcore_te_tp2_pp1_vp1",
    "t5/t5_mcore_te_tp4_pp1",
    "t5/t5_mcore_tp2_pp1_vp1",
    # Measured on other GPUs than A100, too.
    "gpt/gpt3_7b_tp4_pp1_memory_speed",
    "gpt/gpt3_7b_tp1_pp4_memory_speed",
    "gpt/gpt3_mcore_reruns_resume_check_grads",
    "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
    "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings",
    "gpt/gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_calculate_per_token_loss",
    "gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
    "gpt/gpt3_mcore_te_tp2_pp1_resume_torch_dist_cp2_nondeterministic",
    "gpt/gpt3_mcore_te_tp2_pp2_cp2",
    "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist_defer_embedding_wgrad_compute",
    "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
    "gpt/gpt3_mcore_te_tp4_pp2_resume_torch_dist_reshard_8x1xNone",
    "gpt/gpt3_mcore_tp4_pp1_resume_torch",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
    "moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel",
    "moe/gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel",
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
    "bert/bert_mcore_tp2_pp2_local_spec",
    "t5/t5_mcore_te_tp2_pp1_vp1_sequence_parallel",
    "t5/t5_11b_mcore_tp4_pp1",
    # FP8, CUDA graphs, multi-token prediction, hybrids, images, Megatron-FSDP
    "gpt/gpt3_weekly_dgx_h100_mcore_tp4_cp2_current_scaling_native_fp8_tp_sp_cp_tp_overlap",
    "gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor",
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed",
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental",
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8",
    "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph",
    "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph",
    "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4",
    "hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G",
    "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp1_dgx_a100_1N8G",
    "hybrid/hybrid_mr_mcore_te_tp2_pp1_cp4_dgx_a100_1N8G",
    "multimodal-llava/multimodal_llava_mcore_te_tp1_pp1",
)
# Arguments about files, logs and checkpoints; what a test is resumed from; the tokenizer, which is replaced.
SKIPPED = (
    "--data-path", "--split", "--vocab-file", "--merge-file", "--tokenizer-type", "--tensorboard-dir", "--log-timers-to-tensorboard",
    "--log-memory-to-tensorboard", "--log-validation-ppl-to-tensorboard", "--save", "--load", "--save-interval",
    "--save-retain-interval", "--data-cache-path", "--async-save", "--use-persistent-ckpt-worker", "--exit-interval",
    "--distributed-timeout-minutes", "--no-mmap-bin-files", "--auto-detect-ckpt-format", "--timing-log-level", "--dist-ckpt-strictness",
    "--dist-ckpt-optim-fully-reshardable", "--async-strategy", "--use-checkpoint-args", "--mock-data", "--tokenizer-model",
    "--fim-data", "--fim-rate", "--fim-spm-rate", "--fim-split-sample", "--fim-fragment-rate", "--fim-no-prefix",
    "--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token", "--fim-pad-token", "--fim-eod-token",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    case: str
    measured_bytes: float
    predicted_bytes: int
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def measured(megatron: Path, gpu: str) -> dict[str, float]:
    """Peak allocated bytes by test, of those that train."""
    found = {}
    for file in sorted((megatron / TESTS).glob(f"*/*/golden_values_dev_dgx_{gpu}.json")):
        logged = json.loads(file.read_text()).get("mem-max-allocated-bytes", {})
        values = [one for one in logged.get("values", {}).values() if one != "nan"] if isinstance(logged, dict) else []
        if values and "inference" not in file.parent.name and (file.parent / "model_config.yaml").exists():
            found[f"{file.parent.parent.name}/{file.parent.name}"] = float(values[-1])
    return found


def command(case: str, megatron: Path, files: Path) -> tuple[list[str], dict[str, str]]:
    """Script and arguments of a test, and its environment."""
    config = yaml.safe_load((megatron / TESTS / case / "model_config.yaml").read_text())
    family = case.partition("/")[0]
    arguments = [SCRIPTS.get(family, "pretrain_gpt.py")]
    given = {**config["MODEL_ARGS"]}
    for name, value in given.items():
        if name in SKIPPED or value is False:
            continue
        text = str(value).replace("\\", "")  # written for a shell
        if text.startswith("${"):  # a number of the repetition
            continue
        words = text.removeprefix("[").removesuffix("]").split()  # some are lists
        arguments += [name] if value is True else [name, *words]
    if family in VOCABULARY:
        kind = given.get("--tokenizer-type", "BertWordPieceLowerCase")
        arguments += [
            "--data-path",
            f"{files}/{family}",
            "--vocab-file",
            f"{files}/{family}.txt",
            "--tokenizer-type",
            kind,
            "--legacy-tokenizer",
            "--split",
            "90,5,5",
        ]
    else:
        arguments += ["--mock-data", "--tokenizer-type", "NullTokenizer"]
        if given.get("--tokenizer-type") != "NullTokenizer":  # which adds a token for the end of a document
            arguments += ["--vocab-size", str(GPT2_TOKENS - 1)]
    environment = {name: str(value) for name, value in (config.get("ENV_VARS") or {}).items()}
    if "uninstall_te" in case:
        environment["MAYA_TRANSFORMER_ENGINE"] = "0"
    return arguments, environment


def write_corpora(files: Path) -> None:
    """Random tokens in Megatron's own format, for the scripts that have no mock data: documents of sentences."""
    random = np.random.default_rng(0)
    for family, size in VOCABULARY.items():
        words = [*SPECIAL, *(f"word{number}" for number in range(size - len(SPECIAL)))]
        (files / f"{family}.txt").write_text("\n".join(words) + "\n")
        documents, sentences = 2000, 10 if family == "bert" else 1
        lengths = random.integers(*((20, 120) if family == "bert" else (700, 1400)), documents * sentences).astype(
            np.int32
        )
        random.integers(len(SPECIAL), size, int(lengths.sum())).astype(np.uint16).tofile(files / f"{family}.bin")
        starts = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64) * 2))
        with (files / f"{family}.idx").open("wb") as index:  # megatron/core/datasets/indexed_dataset.py
            index.write(b"MMIDIDX\x00\x00" + np.uint64(1).tobytes() + np.uint8(8).tobytes())
            index.write(np.uint64(len(lengths)).tobytes() + np.uint64(documents + 1).tobytes())
            index.write(lengths.tobytes() + starts.astype(np.int64).tobytes())
            index.write((np.arange(documents + 1, dtype=np.int64) * sentences).tobytes())


def gpus_of(case: str, megatron: Path) -> int:
    config = yaml.safe_load((megatron / TESTS / case / "model_config.yaml").read_text())
    said = (config.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS") or {}
    return int(said.get("GPUS_PER_NODE", GPUS))


def predicted(case: str, gpu: str, megatron: Path, files: Path) -> int | str:
    """Peak allocated bytes of the last rank, or what went wrong."""
    arguments, environment = command(case, megatron, files)
    given = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    warmup = int(given.get("--cuda-graph-warmup-steps", GRAPH_WARMUP)) if "--cuda-graph-impl" in given else 0
    steps = STEPS + warmup
    gpus = gpus_of(case, megatron)
    node = min(gpus, GPUS_PER_NODE.get(gpu, gpus))
    out = files / case.replace("/", "+")
    maya = [str(Path(sys.executable).parent / "maya")]
    run = [*maya, "run", "--gpu", gpu, "--ranks", str(gpus - 1), "--steps", str(steps), "--out", str(out)]
    run += ["--json", f"{out}.json", "--", "torchrun", "--nnodes", str(gpus // node), "--nproc-per-node", str(node)]
    run += arguments
    done = subprocess.run(
        run, cwd=megatron, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200
    )
    Path(f"{out}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        said = [
            line for line in (done.stdout + done.stderr).splitlines() if "Error" in line or line.startswith("maya: ")
        ]
        return said[-1] if said else f"exit code {done.returncode}"
    ranks: list[dict[str, Any]] = json.loads(Path(f"{out}.json").read_text())["memory"]["ranks"]
    return int(next(rank["peak_allocated_bytes"] for rank in ranks if rank["rank"] == gpus - 1))


def main(
    megatron: Annotated[Path, typer.Argument(help="checkout of Megatron-LM")],
    gpu: Annotated[str, typer.Option(help="a100, h100 or gb200")] = "a100",
    every: Annotated[
        bool, typer.Option("--all", help="all tests measured on that GPU, not the choice in this file")
    ] = False,
    only: Annotated[str, typer.Option(help="tests with this in their name")] = "",
    keep: Annotated[Path | None, typer.Option(help="folder to leave traces and logs in")] = None,
    markdown: Annotated[bool, typer.Option(help="the table as in docs/megatron.md")] = False,
) -> None:
    real = measured(megatron, gpu)
    compared: list[Compared] = []
    with tempfile.TemporaryDirectory() as temporary:
        files = keep or Path(temporary)
        files.mkdir(parents=True, exist_ok=True)
        write_corpora(files)
        for case in [case for case in (real if every else CASES) if only in case and case in real]:
            began = time.monotonic()
            found = predicted(case, gpu, megatron.resolve(), files.resolve())
            if isinstance(found, str):
                print(f"{case}: {found}", flush=True)
                continue
            compared.append(Compared(case, real[case], found, time.monotonic() - began))
            print(
                f"{case}: {found / GIB:.4f} GiB, measured {real[case] / GIB:.4f}, {compared[-1].error:+.1%}", flush=True
            )
    show(compared, markdown)


def show(compared: list[Compared], markdown: bool) -> None:
    if not compared:
        return
    errors = sorted(abs(one.error) for one in compared)
    summary = f"{len(compared)} tests: median error {np.median(errors):.1%}, worst {errors[-1]:.1%}; {sum(e <= 0.05 for e in errors)} within 5 %"
    if markdown:
        print("| test | measured GiB | predicted GiB | error |\n|---|---|---|---|")
        for one in compared:
            print(
                f"| {one.case} | {one.measured_bytes / GIB:.3f} | {one.predicted_bytes / GIB:.3f} | {one.error:+.1%} |"
            )
    else:
        table = Table("test", "measured GiB", "predicted GiB", "error", "seconds", title="Peak allocated memory")
        for one in compared:
            table.add_row(
                one.case,
                f"{one.measured_bytes / GIB:.3f}",
                f"{one.predicted_bytes / GIB:.3f}",
                f"{one.error:+.1%}",
                f"{one.seconds:.0f}",
            )
        Console(width=140).print(table)
    print(summary)


if __name__ == "__main__":
    typer.run(main)
