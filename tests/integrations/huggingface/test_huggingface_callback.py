"""MayaCallback in this process: what it predicts, and that it restores everything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.data_loader
import accelerate.state
import pytest
import torch
import transformers.trainer
from hf_programs import MODEL
from maya_huggingface import MayaCallback
from maya_huggingface.report_to import register
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import maya_core
from maya_core.patches import Patches
from maya_core.session.plugin import PluginSession

names: dict[str, Any] = {}
exec(MODEL, names)
model, Tokens = names["model"], names["Tokens"]
model()  # with its first model transformers adds a method to nn.Module

CHANGED = (
    Trainer,
    TrainingArguments,
    transformers.trainer,
    transformers.trainer_callback.CallbackHandler,
    transformers.PreTrainedModel,
    accelerate.state.PartialState,
    accelerate.accelerator.Accelerator,
    accelerate.data_loader.DataLoaderShard,
    torch.cuda,
    torch.nn.Module,
)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {"per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True, "save_steps": 1, **more}
    return TrainingArguments(output_dir=str(folder / "results"), **given)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    def attributes() -> list[dict[str, Any]]:
        return [{k: v for k, v in vars(one).items() if k != "__doc__"} for one in CHANGED]

    def finders() -> list[Any]:  # other packages have their own, and are first imported in some test
        return [one for one in sys.meta_path if type(one).__module__.startswith("maya")]

    before, watching = attributes(), finders()
    yield
    if PluginSession.current is not None:
        PluginSession.current.drop()
    changed = [
        f"{one.__name__}.{name}"
        for one, then, now in zip(CHANGED, before, attributes(), strict=True)
        for name in then.keys() | now.keys()
        if then.get(name) is not now.get(name)
    ]
    assert not changed
    assert finders() == watching
    assert not torch.cuda.is_available() and not transformers.utils.is_torch_cuda_available()
    assert not torch.distributed.is_initialized()
    assert accelerate.state.PartialState._shared_state.get("num_processes", 1) == 1


class InOrder(Trainer):
    """Takes the examples in their order, which is an argument of TrainingArguments in newer versions of transformers."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trains_for_real(one: torch.nn.Module, folder: Path) -> None:
    args = arguments(folder, use_cpu=True, max_steps=6, learning_rate=1e-2, logging_steps=1, save_strategy="no")
    trainer = Trainer(one, args, train_dataset=Tokens())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("fsdp", [{}, {"fsdp": True, "fsdp_config": {"version": 1}}, {"fsdp": True}])
def test_a_callback_made_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], fsdp: dict[str, Any]) -> None:
    network = model()
    weights = {name: (value.data_ptr(), value.clone()) for name, value in network.state_dict().items()}
    maya = MayaCallback("a100", nodes=2, gpus_per_node=8, steps=2)
    args = arguments(tmp_path, bf16=True, gradient_accumulation_steps=2, **fsdp)
    trainer = Trainer(network, args, train_dataset=Tokens(), callbacks=[maya])
    result = trainer.train()
    found = maya.prediction
    assert (found.world.size, found.world.nodes, found.trace.steps) == (16, 2, 2)
    assert found.cluster.gpu_name == "NVIDIA A100-SXM4-80GB"
    assert found.throughput.samples_per_step == 2 * 2 * 16
    assert found.step_time_s is not None
    assert result.global_step == 2
    assert result.metrics["train_steps_per_second"] == 1 / found.step_time_s
    assert result.metrics["train_runtime"] == found.step_time_s * (3 * 4096 // 64)
    shown = capsys.readouterr()
    assert "16 x NVIDIA A100-SXM4-80GB (2 nodes of 8" in shown.out
    assert "it/s" not in shown.err
    trainer.save_model()
    assert trainer.evaluate() == {}
    assert "maya: trainer.save_model is skipped" in capsys.readouterr().err
    with pytest.raises(maya_core.MayaError, match="this Trainer was emulated"):
        trainer.train()
    assert not (tmp_path / "results").exists()
    for name, value in network.state_dict().items():
        assert value.data_ptr() == weights[name][0] and torch.equal(value, weights[name][1])
    assert args.device.type == "cpu"
    if fsdp != {"fsdp": True}:
        trains_for_real(network, tmp_path)


def test_inline_after_the_arguments(tmp_path: Path) -> None:
    """Of one GPU, with sequences of different lengths laid end to end: each is a sample."""
    rows = [{"input_ids": list(range(1, 2 + i % 9)) * 4} for i in range(64)]
    args = arguments(tmp_path, per_device_train_batch_size=4)
    collator = DataCollatorWithFlattening()
    trainer = InOrder(model(), args, collator, rows, callbacks=[maya := MayaCallback(steps=3)])
    trainer.train()
    assert maya.prediction.world.size == 1
    assert maya.prediction.throughput.samples_per_step == 4
    tokens = [sum(len(row["input_ids"]) for row in rows[4 * step : 4 * step + 4]) for step in (1, 2)]
    assert maya.prediction.throughput.tokens_per_step == sum(tokens) / 2
    assert args.device.type == "cpu"


def test_a_logger_of_ones_own_kind_reports_nothing(tmp_path: Path) -> None:
    from transformers.integrations import TensorBoardCallback

    class Mine(TensorBoardCallback):
        def __init__(self) -> None:
            pass

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("it would open a run")

    Trainer(model(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[MayaCallback(steps=2), Mine()]).train()


def test_report_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYA_GPU", "l4")
    register(reporting := Patches())  # as `import maya_huggingface.reporting` does, which lasts
    monkeypatch.setenv("MAYA_GPUS_PER_NODE", "4")
    monkeypatch.setenv("MAYA_STEPS", "1")
    trainer = Trainer(model(), arguments(tmp_path, report_to="maya", bf16=True), train_dataset=Tokens())
    trainer.train()
    maya = next(one for one in trainer.callback_handler.callbacks if isinstance(one, MayaCallback))
    assert (maya.prediction.cluster.gpu_name, maya.prediction.world.size, maya.prediction.trace.steps) == (
        "NVIDIA L4",
        4,
        1,
    )
    reporting.undo()


def test_bad_use_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(maya_core.MayaError, match="unknown GPU 'h10'"):
        MayaCallback("h10")
    with pytest.raises(maya_core.MayaError, match="two MayaCallbacks"):
        Trainer(model(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[MayaCallback(), MayaCallback()])
    with pytest.raises(maya_core.MayaError, match="use_cpu=True"):
        Trainer(model(), arguments(tmp_path, use_cpu=True), train_dataset=Tokens(), callbacks=[MayaCallback()])
    assert PluginSession.current is not None
    PluginSession.current.drop()
    late = Trainer(model(), arguments(tmp_path, save_strategy="no"), train_dataset=Tokens())
    late.add_callback(maya := MayaCallback())
    with pytest.raises(maya_core.MayaError, match="created before the emulation started"):
        late.train()
    with pytest.raises(maya_core.MayaError, match="no prediction yet"):
        _ = maya.prediction
    monkeypatch.setenv("MAYA_STEPS", "many")
    with pytest.raises(maya_core.MayaError, match="MAYA_STEPS=many"):
        MayaCallback.from_environment()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_zero(tmp_path: Path, stage: int) -> None:
    """Two groups of parameters, which ZeRO steps one after the other: one step."""
    pytest.importorskip("deepspeed")
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"),
        "auto",
    )
    config = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        **auto,
    }
    maya = MayaCallback(gpus_per_node=8, steps=2)
    args = arguments(tmp_path, bf16=True, deepspeed=config, gradient_accumulation_steps=2)
    Trainer(model(), args, train_dataset=Tokens(), callbacks=[maya]).train()
    assert maya.prediction.trace.steps == 2
    assert maya.prediction.throughput.samples_per_step == 2 * 2 * 8
    assert not [note for note in maya.prediction.caveats if "Steps differ" in note]


def packed_attention(implementation: str, tmp_path: Path) -> Any:
    maya = MayaCallback(steps=2)
    network = model(attn_implementation=implementation)
    lengths = (64, 32, 16, 16)
    rows = [{"input_ids": [1 + i % 4] * lengths[i % 4]} for i in range(64)]
    args = arguments(tmp_path, bf16=True, per_device_train_batch_size=4)
    InOrder(network, args, DataCollatorWithFlattening(), rows, callbacks=[maya]).train()
    return maya.prediction


def test_flash_attention_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 128 tokens in sequences of 64, 32, 16 and 16, flash attention looks at 64*64 + 32*32 + 2*16*16 pairs: as many as in three
    sequences of 43 (2.91 of equal length, to be exact). What does not know of sequences looks at 128*128."""
    flash = packed_attention("flash_attention_2", tmp_path)
    assert "maya: under emulation flash_attention_2 is replaced by PyTorch's own" in capsys.readouterr().err
    full = packed_attention("sdpa", tmp_path)
    layers, width, passes = 2, 64, 3  # backward twice the forward
    fewer = passes * layers * 4 * width * (128 * 128 - 3 * 43 * 43)
    assert full.flops.model - flash.flops.model == pytest.approx(fewer, rel=0.02)
    assert any("flash_attention" in kernel.name for kernel in flash.top_kernels)


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"optim": "adamw_bnb_8bit"}, "bitsandbytes"), ({"optim": "adamw_torch_4bit"}, "torchao"), ({"use_liger_kernel": True}, "liger_kernel")],
)  # fmt: skip
def test_what_only_a_gpu_can_do_is_refused_by_name(tmp_path: Path, asked: dict[str, Any], named: str) -> None:
    maya = MayaCallback()
    with pytest.raises(maya_core.MayaError, match=f"cannot be emulated: it needs kernels of {named}"):
        Trainer(model(), arguments(tmp_path, **asked), train_dataset=Tokens(), callbacks=[maya]).train()


def test_quantization_is_refused_by_name() -> None:
    MayaCallback()
    with pytest.raises(maya_core.MayaError, match="BitsAndBytesConfig cannot be emulated"):
        transformers.BitsAndBytesConfig(load_in_4bit=True)
