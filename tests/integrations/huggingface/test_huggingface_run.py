"""Trainer and accelerate under `maya run`, as they are launched."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hf_programs import AHEAD, LOOP, TRAINER, figures, predicted, run, write

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "huggingface_sft.py")
ARGUMENTS = ("--output_dir", "results", "--bf16", "--per_device_train_batch_size", "2")


def test_one_job_in_four_ways(tmp_path: Path) -> None:
    """torchrun, `accelerate launch --emulate`, a bare python and a callback in the code predict the same, to the last byte."""
    write(tmp_path, train=TRAINER)
    train = ("train.py", *ARGUMENTS, "--gradient_accumulation_steps", "3", "--save_steps", "1", "--eval_strategy",
             "steps", "--eval_steps", "1")  # fmt: skip
    torchrun = predicted("torchrun", "--nproc-per-node", "8", *train, cwd=tmp_path)
    bare = predicted("python", *train, cwd=tmp_path, options=("--gpus-per-node", "8"))
    assert figures(torchrun) == figures(bare)
    assert torchrun["world"]["size"] == 8
    assert torchrun["trace"]["steps"] == 3
    # 2 of 64 tokens on each of 8 GPUs, three times a step; Trainer takes all three batches before it trains on the first.
    assert torchrun["throughput"]["samples_per_step"] == 48
    assert torchrun["throughput"]["tokens_per_step"] == 48 * 64
    assert torchrun["throughput"]["steps_per_epoch"] == 4096 // 48
    assert "maya: one process sees 8 GPUs: emulating 8 ranks of DistributedDataParallel" in bare["output"]
    assert "instead of nn.DataParallel" not in torchrun["output"]
    for line in ("evaluation is skipped", "checkpoints are not written"):
        assert torchrun["output"].count(f"maya: under emulation {line}") == 1
    assert "it/s" not in torchrun["output"]
    assert not (tmp_path / "results").exists()

    flag = run("accelerate", "launch", "--emulate", "--emulate-out", "other", "--num_processes=8", *train, cwd=tmp_path)
    assert flag.returncode == 0, flag.stderr
    assert figures(json.loads((tmp_path / "other" / "latest" / "prediction.json").read_text())) == figures(torchrun)

    begin = 'import sys; from maya_huggingface import MayaCallback; maya = MayaCallback(gpus_per_node=8, json="code.json")\n'
    code = TRAINER.replace("import sys\n", begin).replace(
        "eval_dataset=Tokens())", "eval_dataset=Tokens(), callbacks=[maya])"
    )
    write(tmp_path, train=code)
    callback = run("python", *train, cwd=tmp_path)
    assert callback.returncode == 0, callback.stderr
    assert figures(json.loads((tmp_path / "code.json").read_text())) == figures(torchrun)
    assert "trained ['train_runtime', 'train_samples_per_second'" in callback.stdout  # predicted ones
    assert not (tmp_path / "results").exists()


def test_to_the_programs_own_end(tmp_path: Path) -> None:
    """FSDP2 on two nodes that accelerate is told of by Maya; nothing of what follows the training fails for lack of weights, or
    writes."""
    write(tmp_path, train=TRAINER)
    fsdp = json.dumps({"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
    arguments = (*ARGUMENTS, "--max_steps", "2", "--fsdp", "full_shard", "--fsdp_config", fsdp)
    options = ("--nodes", "2", "--gpus-per-node", "4", "--steps", "all")
    whole = predicted("accelerate", "launch", "train.py", *arguments, cwd=tmp_path, options=options)
    assert (whole["world"]["size"], whole["world"]["nodes"], whole["trace"]["steps"]) == (8, 2, 2)
    assert any("all_gather" in row["op"] for row in whole["communication"])
    assert "trained ['epoch', 'total_flos', 'train_loss'] nan" in whole["output"]  # and no speed of this machine
    assert "maya: under emulation there are no predictions: the program ends here" in whole["output"]
    assert "predicted" not in whole["output"]
    assert not (tmp_path / "results").exists()


def test_accelerate_loops(tmp_path: Path) -> None:
    write(tmp_path, loop=LOOP)
    machines = ("--num_machines", "2", "--num_processes", "16", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
                "--main_process_port", "5000")  # fmt: skip
    loop = ("loop.py", "--accumulate", "2", "--dispatch", "--split", "--out", "saved")
    nodes = predicted("accelerate", "launch", *machines, *loop, cwd=tmp_path)
    assert (nodes["world"]["nodes"], nodes["world"]["gpus_per_node"], nodes["world"]["emulated_ranks"]) == (2, 8, [0])
    # Rank 0 loads 16 samples, sends them to all and keeps one; twice a step.
    assert nodes["throughput"]["samples_per_step"] == 2 * 16
    assert nodes["throughput"]["tokens_per_step"] == 2 * 16 * 64
    assert "maya: under emulation accelerate writes no checkpoints" in nodes["output"]
    assert not (tmp_path / "saved").exists()
    alone = predicted("accelerate", "launch", "loop.py", "--emulate", cwd=tmp_path)
    assert alone["world"]["size"] == 1
    assert "world 1 NO emulate True" in alone["output"]
    assert alone["throughput"]["samples_per_step"] == 2


def test_batches_taken_ahead_of_pairs_of_rows(tmp_path: Path) -> None:
    write(tmp_path, ahead=AHEAD)
    found = predicted("accelerate", "launch", "--num_processes", "8", "ahead.py", cwd=tmp_path)
    # Three batches of two examples on each GPU, each example two rows.
    assert found["throughput"]["samples_per_step"] == 3 * 2 * 8
    assert found["throughput"]["tokens_per_step"] == 3 * 2 * 8 * 2 * 64
    assert found["throughput"]["steps_per_epoch"] == round(4096 / 48)
    assert not found["communication"]  # gradients are not reduced, and weights are averaged later
    assert (
        "LocalSGD averages the weights every 3 steps, so the step time does not include it. Use --steps 4"
        in found["output"]
    )


def test_the_flags_are_in_accelerates_help(tmp_path: Path) -> None:
    shown = run("accelerate", "launch", "--help", cwd=tmp_path).stdout
    for flag in ("--emulate ", "--emulate_gpu GPU", "--emulate_steps N", "--emulate_out DIR"):
        assert flag in shown


@pytest.mark.skipif(
    importlib.util.find_spec("trl.kernels") is None,
    reason="the example is for a TRL with kernels of its own, and transformers 5",
)
def test_the_example(tmp_path: Path) -> None:
    """TRL's SFTTrainer with LoRA; packed rows of up to 256 tokens, each of several texts."""
    launch = (
        "accelerate",
        "launch",
        "--num_processes",
        "8",
        EXAMPLE,
        "--size",
        "tiny",
        "--samples",
        "400",
        "--length",
        "512",
    )
    found = predicted(*launch, cwd=tmp_path)
    assert (found["world"]["size"], found["trace"]["steps"]) == (8, 3)
    assert 8 * 4 * 450 < found["throughput"]["tokens_per_step"] <= 8 * 4 * 512
    assert 8 * 4 < found["throughput"]["samples_per_step"] < 8 * 4 * 10
    assert "Triton kernels of trl.kernels.chunked_logprob are each assumed to be one pass" in found["output"]
    assert not (tmp_path / "sft").exists()
