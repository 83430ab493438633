"""Evaluation under Trainer: its first batches count for memory and have a time of their own, and change nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_programs import MODEL, predicted, run, write
from maya_huggingface import MayaCallback
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from maya_core.report.prediction import Prediction
from maya_core.session.plugin import PluginSession

names: dict[str, Any] = {}
exec(MODEL, names)
VOCABULARY, LENGTH = 32_000, 64
ROW = LENGTH * VOCABULARY * 4  # bytes of a row's logits, 7.8 MiB


class Texts(names["Tokens"]):  # type: ignore[misc]
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


def model() -> Any:
    torch.manual_seed(0)
    llama, config = names["LlamaForCausalLM"], names["LlamaConfig"]
    return llama(
        config(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCABULARY)
    )


def no_metrics(found: Any) -> dict[str, float]:
    raise AssertionError("predictions are made up")


def trained(folder: Path, evaluated: Any, kind: type[Trainer] = Trainer, **options: Any) -> Prediction:
    """The prediction of a training with these evaluation data."""
    maya = MayaCallback("h100", steps=options.pop("steps", 3))
    of_trainer = {
        name: options.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in options
    }
    callbacks = [maya, *options.pop("callbacks", [])]
    given = {"per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True, **options}
    if evaluated is not None:
        given = {"eval_strategy": "steps", "eval_steps": 100, "per_device_eval_batch_size": 2, **given}
    args = TrainingArguments(output_dir=str(folder / "results"), **given)
    try:
        kind(
            model(), args, train_dataset=Texts(4096), eval_dataset=evaluated, callbacks=callbacks, **of_trainer
        ).train()
    finally:
        assert PluginSession.current is None
    assert not (folder / "results").exists()
    return maya.prediction


def test_a_batch_that_does_not_fit_is_told_with_its_place(tmp_path: Path) -> None:
    """The logits of 16,384 rows are 125 GiB; training has two rows."""
    write(tmp_path, train=PROGRAM)
    done = run("maya", "run", "--json", "p.json", "--", "python", "train.py", "16384", cwd=tmp_path)
    assert done.returncode == 1
    assert "validation ran out of memory when it requested" in " ".join(done.stdout.split())
    failed = Prediction.model_validate_json((tmp_path / "p.json").read_text())
    fullest = failed.memory.fullest
    assert failed.memory.fits is False and fullest is not None
    assert (fullest.out_of_memory_phase, failed.trace.steps) == ("validation", 3)
    small = predicted("python", "train.py", "4", cwd=tmp_path)
    assert small["memory"]["fits"] is True
    assert "evaluation runs the first batches only, and computes no metrics" in small["output"]

    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, Texts(20_000), per_device_eval_batch_size=16_384)
    with pytest.raises(RuntimeError, match="reduce per_device_eval_batch_size"):
        trained(tmp_path, Texts(20_000), per_device_eval_batch_size=16_384, auto_find_batch_size=True)


PROGRAM = (
    "import sys"
    + MODEL
    + """
from transformers import Trainer, TrainingArguments
large = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=32_000))
args = TrainingArguments("results", eval_strategy="epoch", per_device_train_batch_size=2, per_device_eval_batch_size=int(sys.argv[1]))
Trainer(large, args, train_dataset=Tokens(), eval_dataset=torch.utils.data.ConcatDataset([Tokens()] * 5)).train()
"""
)


def test_step_time_and_peak_are_those_without_evaluation(tmp_path: Path) -> None:
    alone, both = trained(tmp_path, None), trained(tmp_path, Texts(1000))
    assert both.step_time_s == alone.step_time_s
    assert both.throughput == alone.throughput and both.time == alone.time
    peak, plain = both.memory.fullest, alone.memory.fullest
    assert peak is not None and plain is not None and peak.peak_phase != "validation"
    assert (peak.peak_allocated_bytes, peak.at_peak) == (plain.peak_allocated_bytes, plain.at_peak)
    assert alone.validation == []
    (loop,) = both.validation
    assert (loop.name, loop.batches, loop.every_steps) == ("evaluation", 500, 100)
    assert loop.batch_s is not None and alone.step_time_s is not None and 0 < loop.batch_s < alone.step_time_s
    assert loop.loop_s == pytest.approx(500 * loop.batch_s, rel=0.05)
    assert both.caveats == alone.caveats


def test_what_batches_leave_on_the_gpu_until_the_end(tmp_path: Path) -> None:
    """With metrics, Trainer keeps the logits of 12,000 rows, 92 GiB, unless it is told to move them or to reduce them."""
    rows = {"compute_metrics": no_metrics, "per_device_eval_batch_size": 16}
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, Texts(12_000), **rows)
    reduced = trained(
        tmp_path, Texts(12_000), preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), **rows
    )
    moved = trained(tmp_path, Texts(12_000), eval_accumulation_steps=1, **rows)
    assert reduced.memory.fits and moved.memory.fits

    few = trained(tmp_path, Texts(3200), **rows)
    peak = few.memory.fullest
    assert peak is not None and peak.peak_phase == "validation"
    # All logits, and those of all batches but the last, from which they are made.
    assert peak.peak_allocated_bytes == pytest.approx((3200 + 3200 - 16) * ROW, rel=0.05)
    assert few.validation[0].batches == 200


def test_predictions_of_a_stream_are_told(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Texts(64)[i] for i in range(64))

    found = trained(tmp_path, Stream(), compute_metrics=no_metrics)
    assert any("stay on the GPU until the evaluation ends, and its data has no length" in one for one in found.caveats)
    assert found.validation[0].batches is None and found.validation[0].batch_s
    assert not [one for one in trained(tmp_path, Stream()).caveats if "no length" in one]


def test_several_data_sets_are_several_loops(tmp_path: Path) -> None:
    found = trained(
        tmp_path, {"short": Texts(100), "long": Texts(1000)}, gradient_accumulation_steps=4, eval_strategy="epoch"
    )
    assert [(one.name, one.batches, one.every_steps) for one in found.validation] == [
        ("evaluation of short", 50, 512), ("evaluation of long", 500, 512),
    ]  # fmt: skip
    short, long = found.validation
    assert short.loop_s and long.loop_s and long.loop_s > 8 * short.loop_s


def test_what_looks_at_metrics_neither_fails_nor_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To the end of the training, which would load its best model."""
    found = trained(
        tmp_path, Texts(100), steps=None, max_steps=6, eval_steps=1, save_steps=1, load_best_model_at_end=True, save_strategy="steps",
        metric_for_best_model="loss", callbacks=[EarlyStoppingCallback(1)], lr_scheduler_type="reduce_lr_on_plateau",
    )  # fmt: skip
    assert found.trace.steps == 6
    assert [one.every_steps for one in found.validation] == [1]
    assert "early stopping" not in capfd.readouterr().err  # it would say that it finds no metric


def test_an_error_in_evaluation_is_told_and_the_rest_is_predicted(tmp_path: Path) -> None:
    class Careless(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            super().prediction_step(*args, **kwargs)
            raise ValueError("no answer was found")

    found = trained(tmp_path, Texts(100), Careless)
    assert found.memory.fits and found.trace.ended == "stopped"
    (note,) = [one for one in found.caveats if one.startswith("Validation was not emulated to its end")]
    assert "ValueError: no answer was found" in note and "test_huggingface_evaluation.py:" in note
    assert found.validation[0].batch_s is None


def test_generation(tmp_path: Path) -> None:
    """Each batch generates 20 tokens, one after the other."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    times = []
    for generates in (False, True):
        maya = MayaCallback("h100")
        args = Seq2SeqTrainingArguments(
            str(tmp_path / "results"), eval_strategy="steps", eval_steps=10, predict_with_generate=generates, generation_max_length=21,
            per_device_train_batch_size=2, per_device_eval_batch_size=2, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        Seq2SeqTrainer(
            T5ForConditionalGeneration(config), args, train_dataset=names["Tokens"](), eval_dataset=names["Tokens"](),
            compute_metrics=no_metrics, callbacks=[maya],
        ).train()  # fmt: skip
        (loop,) = maya.prediction.validation
        assert loop.batch_s is not None
        times.append(loop.batch_s)
    assert times[1] > 8 * times[0]


def test_evaluation_after_the_training(tmp_path: Path) -> None:
    write(tmp_path, train=AFTERWARDS)
    found = predicted("python", "train.py", cwd=tmp_path, options=("--steps", "all"))
    assert "metrics nan" in found["output"]
    assert [(one["name"], one["batches"], one["every_steps"]) for one in found["validation"]] == [
        ("evaluation of test", 512, None)
    ]
    stopped = predicted("python", "train.py", cwd=tmp_path)
    assert stopped["validation"] == [] and stopped["trace"]["steps"] == 3


AFTERWARDS = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments
args = TrainingArguments("results", max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=8, report_to="none")
trainer = Trainer(model(), args, train_dataset=Tokens())
trainer.train()
print("metrics", trainer.evaluate(Tokens(), metric_key_prefix="test")["test_loss"])
"""
)
