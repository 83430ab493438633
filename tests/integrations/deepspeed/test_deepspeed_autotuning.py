"""DeepSpeed's own autotuner uses predicted times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deepspeed_programs import BF16, TRAIN, launched, write
from maya_deepspeed.autotuning import MARK

from maya_core.errors import MayaError
from maya_core.pipeline import predict


def test_it_ranks_what_was_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A micro-batch that does not fit fails; the one that does is told, and lies where DeepSpeed puts it."""
    fits, too_large = 2**15, 2**16
    config = {
        **BF16,
        "train_micro_batch_size_per_gpu": [fits, too_large],
        "zero_optimization": {"stage": 2},
        "autotuning": {"enabled": True},
    }
    write(tmp_path, config, train=TRAIN)
    monkeypatch.chdir(tmp_path)
    words = ("--num_gpus", "4", "--autotuning", "tune", "train.py", "--deepspeed_config", "ds.json")
    job = launched(*words, out=tmp_path / "out", gpu="a30", steps=2)
    assert job is not None
    assert "maya: the best experiment is z2_gas2_tmbspg32768" in capsys.readouterr().err

    results = tmp_path / "autotuning_results"
    failed, best = results / "z2_gas1_tmbspg65536", results / "z2_gas2_tmbspg32768"
    assert "OutOfMemoryError: CUDA out of memory" in (failed / "stderr.log").read_text()
    assert not (failed / "metrics.json").exists()
    told = predict(job)
    assert told.step_time_s is not None and told.flops is not None
    metrics = json.loads((best / "metrics.json").read_text())
    assert metrics["latency"] == pytest.approx(told.step_time_s * 1e6)
    assert metrics["throughput"] == pytest.approx(4 * too_large / told.step_time_s)  # 2 micro-batches of 32,768
    assert metrics["FLOPS_per_gpu"] == pytest.approx(told.flops.model / 4 / told.step_time_s)
    assert 2 * (metrics["fwd"] + metrics["bwd"] + metrics["step"]) == pytest.approx(metrics["latency"], rel=0.1)
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert (optimal["train_micro_batch_size_per_gpu"], optimal["gradient_accumulation_steps"]) == (fits, 2)
    assert "z2_gas2_tmbspg32768" in (results / "summary.txt").read_text()
    info = json.loads((results / "profile_model_info" / "model_info.json").read_text())
    assert info["num_params"] == 128 * 256 + (256 + 1) * 1024 + (1024 + 1) * 128
    assert sorted(path.name for path in (tmp_path / "autotuning_exps").iterdir()) == [
        MARK,
        "profile_model_info.json",
        "z2_gas1_tmbspg65536.json",
        "z2_gas2_tmbspg32768.json",
    ]


def test_results_that_were_measured_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {**BF16, "autotuning": {"enabled": True, "results_dir": "mine"}}, train=TRAIN)
    words = ("--num_gpus", "4", "--autotuning", "tune", "train.py", "--deepspeed_config", "ds.json")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "summary.txt").write_text("measured")
    with pytest.raises(MayaError, match="mine contains results that Maya did not write"):
        launched(*words, out=tmp_path / "out")
    write(tmp_path, {**BF16, "autotuning": {"enabled": True, "metric": "speed"}})
    with pytest.raises(MayaError, match='there is no metric "speed"'):
        launched(*words, out=tmp_path / "out")
    with pytest.raises(MayaError, match="DeepSpeed configuration is not provided"):
        launched(*words[:5], out=tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "mine", "train.py"]
    assert (tmp_path / "mine" / "summary.txt").read_text() == "measured"
