"""Validation under Lightning: a batch of it counts for memory and has a time of its own, and changes nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from maya_lightning import MayaEmulator
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

from maya_core.report.prediction import Prediction

MAYA = Path(sys.executable).parent / "maya"
FEATURES, WIDTH = 16, 65_536  # a row's activations take 256 KiB
SAMPLES, TRAINED = 4096, 8


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of ones, made when they are read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.ones(len(indices), FEATURES), torch.zeros(len(indices), dtype=torch.long)


def rows(batch: int, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(Rows(samples), batch, collate_fn=lambda made: made)


class Wide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = torch.nn.Linear(FEATURES, WIDTH), torch.nn.Linear(WIDTH, 10)
        self.accuracy = MulticlassAccuracy(10)
        self.validated: list[int] = []
        self.modes: list[bool] = []

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.head(torch.relu(self.wide(batch[0])))
        return torch.nn.functional.cross_entropy(out, batch[1]), out

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.modes.append(self.training)
        return self.loss(batch)[0]

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        loss, out = self.loss(batch)
        self.accuracy.update(out, batch[1])
        self.validated.append(dataloader_idx)
        self.modes.append(self.training)
        self.log("val_loss", loss)

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.accuracy.compute())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


PARAMETERS = sum(one.numel() for one in Wide().parameters())


def fitted(
    model: pl.LightningModule, validation: Any, training: Any = None, gpu: str = "h100", **options: Any
) -> Prediction:
    emulator = MayaEmulator(gpu)
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_model_summary": False, **options}
    pl.Trainer(plugins=[emulator], **given).fit(model, rows(TRAINED) if training is None else training, validation)
    return emulator.prediction


def test_a_batch_that_does_not_fit_is_told_with_its_place() -> None:
    """400,000 rows need 97.7 GiB for one layer; the 8 rows of training need 2 MiB."""
    emulator = MayaEmulator("h100")
    trainer = pl.Trainer(plugins=[emulator], max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Wide(), rows(TRAINED), rows(400_000, 1_000_000))
    found = emulator.prediction
    assert found.memory.fits is False
    fullest = found.memory.fullest
    assert fullest is not None
    assert (fullest.out_of_memory_phase, fullest.out_of_memory_step) == ("validation", 3)
    assert fullest.out_of_memory_bytes == 400_000 * WIDTH * 4
    assert found.trace.ended == "failed"
    assert "DOES NOT FIT: validation ran out of memory when it requested 97.7 GiB more" in " ".join(str(found).split())
    assert found.validation[0].batch_s is None and found.step_time_s is not None
    assert fitted(Wide(), None).memory.fits is True


def test_step_time_and_peak_are_those_without_validation() -> None:
    alone, both = fitted(Wide(), None), fitted(model := Wide(), rows(2))
    assert model.validated == [0] and model.modes == [True, True, True, False]
    assert model.training
    assert both.step_time_s == alone.step_time_s
    assert both.throughput == alone.throughput and both.time == alone.time
    peak, plain = both.memory.fullest, alone.memory.fullest
    assert peak is not None and plain is not None and peak.peak_phase != "validation"
    assert (peak.peak_allocated_bytes, peak.at_peak) == (plain.peak_allocated_bytes, plain.at_peak)
    # Blocks of other sizes than those of training may take another of the allocator's segments.
    assert 0 <= peak.peak_reserved_bytes - plain.peak_reserved_bytes <= 2 * 2**20
    assert alone.validation == []
    (loop,) = both.validation
    assert (loop.name, loop.batches, loop.every_steps) == ("validation", SAMPLES // 2, SAMPLES // TRAINED)
    assert loop.batch_s is not None and loop.batch_s > 0
    assert loop.loop_s == pytest.approx(loop.batches * loop.batch_s, rel=0.05)
    assert both.caveats == alone.caveats


def test_the_peak_of_a_large_batch_is_in_validation() -> None:
    """Weights and two moments of Adam, but no gradients, are there besides a batch: rows of two layers in float32."""
    batch = 50_000
    found = fitted(Wide(), rows(batch, 100_000))
    fullest = found.memory.fullest
    assert fullest is not None and found.memory.fits
    assert (fullest.peak_phase, fullest.peak_step, fullest.peak_module) == ("validation", 3, "")
    expected = 3 * 4 * PARAMETERS + 2 * batch * WIDTH * 4
    assert fullest.peak_allocated_bytes == pytest.approx(expected, rel=0.01)
    assert fullest.by_category_bytes["gradients"] == 0
    assert found.validation[0].peak_allocated_bytes == fullest.peak_allocated_bytes
    assert "reached in validation, after step 3: " in " ".join(str(found).split())


def test_several_loaders_are_several_loops() -> None:
    found = fitted(model := Wide(), [rows(2), rows(1000), rows(16)], limit_val_batches=5)
    assert model.validated == [0, 1, 2]
    assert [(one.name, one.batches) for one in found.validation] == [
        ("validation 0", 5), ("validation 1", 5), ("validation 2", 5),
    ]  # fmt: skip
    first, second, third = found.validation
    assert first.batch_s and second.batch_s and third.peak_allocated_bytes and second.peak_allocated_bytes
    assert second.batch_s > 1.5 * first.batch_s
    assert second.peak_allocated_bytes - third.peak_allocated_bytes > 984 * WIDTH * 4


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 512),
        ({"accumulate_grad_batches": 4}, 128),
        ({"val_check_interval": 0.25}, 128),
        ({"val_check_interval": 100, "check_val_every_n_epoch": None}, 100),
        ({"check_val_every_n_epoch": 3, "max_epochs": 9}, 3 * 512),
        ({"check_val_every_n_epoch": 3, "val_check_interval": 0.5, "max_epochs": 9}, 3 * 512 / 2),
    ],
)
def test_how_often_it_runs(options: dict[str, Any], every: float) -> None:
    (loop,) = fitted(Wide(), rows(2), **options).validation
    assert loop.every_steps == every


def test_data_without_a_length() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.ones(FEATURES), 0

    (loop,) = fitted(Wide(), DataLoader(Stream(), 4), DataLoader(Stream(), 4)).validation
    assert (loop.batches, loop.every_steps, loop.loop_s) == (None, None, None)
    assert loop.batch_s is not None


@pytest.mark.parametrize(
    "options",
    [{"limit_val_batches": 0}, {"max_steps": 10, "num_sanity_val_steps": 0}, {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}],
)  # fmt: skip
def test_a_training_that_never_validates(options: dict[str, Any]) -> None:
    found = fitted(model := Wide(), rows(2), **options)
    assert found.validation == [] and model.validated == []
    assert found.trace.steps == 3


def test_what_looks_at_metrics_neither_fails_nor_stops(tmp_path: Path) -> None:
    """To the end of two epochs. The made-up loss would not improve in the second one."""
    callbacks = [
        EarlyStopping("val_loss", patience=0, check_on_train_epoch_end=False),
        ModelCheckpoint(tmp_path, monitor="val_loss"),
    ]
    emulator = MayaEmulator("h100", steps=None)
    model = Wide()
    trainer = pl.Trainer(
        plugins=[emulator], max_epochs=2, limit_train_batches=4, callbacks=callbacks, logger=False, default_root_dir=tmp_path
    )  # fmt: skip
    trainer.fit(model, rows(TRAINED), rows(2))
    assert emulator.prediction.trace.steps == 8
    assert model.validated == [0]
    assert emulator.prediction.validation[0].every_steps == 4
    assert not any(tmp_path.iterdir())
    assert "val_loss" in trainer.callback_metrics and "accuracy" in trainer.callback_metrics


def test_an_error_in_validation_is_told_and_the_rest_is_predicted() -> None:
    class Careless(Wide):
        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, index)
            raise ValueError("only one class is present")

    found = fitted(model := Careless(), rows(2))
    assert found.memory.fits and found.trace.ended == "stopped" and model.training
    (note,) = [one for one in found.caveats if one.startswith("Validation was not emulated to its end")]
    assert "ValueError: only one class is present" in note and "test_lightning_validation.py:" in note
    assert found.validation[0].batch_s is None


def test_data_that_is_not_there_is_told() -> None:
    class Elsewhere(Wide):
        def val_dataloader(self) -> Any:
            raise FileNotFoundError("/data/val")

    found = fitted(Elsewhere(), None)
    assert found.memory.fits and found.validation == []
    assert any("FileNotFoundError: /data/val" in note for note in found.caveats)


def test_a_training_step_that_takes_all_steps_is_told() -> None:
    class Inner(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
            for _ in range(100):
                self.manual_backward(self.loss(batch)[0])
                self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = fitted(Inner(), rows(2))
    assert found.trace.steps == 3
    assert any("training_step takes all the requested steps" in note for note in found.caveats)


def test_sharded_over_several_gpus() -> None:
    emulator = MayaEmulator("h100", gpus_per_node=4)
    options: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    pl.Trainer(strategy="fsdp", plugins=[emulator], **options).fit(Wide(), rows(TRAINED), rows(2))
    (loop,) = emulator.prediction.validation
    assert (loop.batches, loop.every_steps) == (SAMPLES // 2 // 4, SAMPLES // TRAINED // 4)
    assert emulator.prediction.throughput.samples_per_step == TRAINED * 4
    assert not emulator.prediction.hangs


PROGRAM = """
import sys
import lightning.pytorch as pl
from integrations.lightning.test_lightning_validation import Wide, rows

pl.Trainer(max_epochs=1, logger=False).fit(Wide(), rows(8), rows(int(sys.argv[1]), 1_000_000))
"""


def run(folder: Path, *arguments: str, command: Sequence[str] = ("run", "--json", "p.json", "--html", "p.html")) -> int:
    (folder / "train.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    line = [str(MAYA), *command, "--", sys.executable, "train.py", *arguments]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, timeout=300, check=False).returncode


def test_under_maya_run(tmp_path: Path) -> None:
    assert run(tmp_path, "400000") == 1
    failed = Prediction.model_validate_json((tmp_path / "p.json").read_text())
    assert failed.memory.fits is False and failed.trace.steps == 3
    assert "runs out of memory in validation, after step 3" in (tmp_path / "p.html").read_text()
    assert run(tmp_path, "32") == 0
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["memory"]["fits"] and found["validation"][0]["batches"] == 31_250
    assert '<section id="validation">' in (tmp_path / "p.html").read_text()

    what_if = [str(MAYA), "what-if", "maya-out", "--gpu", "v100", "--json", "v100.json"]
    subprocess.run(what_if, cwd=tmp_path, capture_output=True, timeout=300, check=True)
    slower = json.loads((tmp_path / "v100.json").read_text())["validation"][0]
    assert slower["batch_s"] > found["validation"][0]["batch_s"]
