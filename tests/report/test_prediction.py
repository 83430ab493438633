"""The prediction of small jobs: figures that follow from one another, and where they come from in the program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from programs import Rank
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import maya_core
from maya_core.hardware.cluster import cluster
from maya_core.pipeline import predict
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import read_prediction, write_prediction
from maya_core.report.throughput import _replicas
from maya_core.request import Request
from maya_core.trace.job import JobTrace, collate
from maya_core.trace.schema import Phase

VOCABULARY, CONTEXT, BATCH = 512, 64, 8


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, 256)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3)
        )
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def train(recompute: bool = False, loader: bool = True, steps: int = 3) -> JobTrace:
    with maya_core.emulate("a100", steps=steps) as job:
        model = Model(recompute).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randint(VOCABULARY, (10 * BATCH, CONTEXT + 1))
        batches = (
            DataLoader(TensorDataset(data), BATCH)
            if loader
            else [(data[i * BATCH : (i + 1) * BATCH],) for i in range(10)]
        )
        for (batch,) in batches:
            ids = batch.cuda()
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return collate([job.trace])


@pytest.fixture(scope="module")
def job() -> JobTrace:
    return train()


@pytest.fixture(scope="module")
def prediction(job: JobTrace) -> Prediction:
    return predict(job, machine=cluster("a100", 1))


def test_figures_follow_from_one_another(prediction: Prediction) -> None:
    step = prediction.step_time_s
    assert step is not None and 1e-4 < step < 0.1
    low, high = prediction.step_time_range_s
    assert low < step < high
    assert prediction.tokens_per_s == pytest.approx(BATCH * CONTEXT / step)
    assert prediction.samples_per_s == pytest.approx(BATCH / step)
    assert prediction.tokens_per_s_per_gpu == prediction.tokens_per_s
    assert prediction.mfu == pytest.approx(prediction.flops.model / step / prediction.flops.peak_flops_per_gpu)
    assert prediction.cost.usd_per_1k_steps == pytest.approx(prediction.cost.usd_per_hour * step / 3.6)
    assert prediction.energy.joules_per_step == pytest.approx(prediction.energy.average_w_per_gpu * step)
    time = prediction.time
    parts = time.compute_s + time.exposed_communication_s + time.waiting_s + time.copy_s + time.host_s
    assert parts == pytest.approx(step)
    known = prediction.confidence
    assert known.measured + known.interpolated + known.extrapolated + known.bound == pytest.approx(1)
    assert sum(known.profiles.values()) == pytest.approx(1)


def test_tokens_are_what_the_model_is_shown_not_what_the_loader_gives(prediction: Prediction) -> None:
    work = prediction.throughput
    assert (work.samples_per_step, work.tokens_per_step) == (BATCH, BATCH * CONTEXT)
    assert work.source == "data loader"
    assert work.steps_per_epoch == 10
    assert prediction.cost.usd_per_epoch == pytest.approx(10 * prediction.cost.usd_per_step)


def test_without_a_data_loader_the_embedding_tells() -> None:
    work = predict(train(loader=False), machine=cluster("a100", 1)).throughput
    assert work.source == "integer inputs"
    assert (work.samples_per_step, work.tokens_per_step) == (BATCH, BATCH * CONTEXT)


def test_what_is_given_goes_first(job: JobTrace) -> None:
    told = predict(job, Request(tokens_per_step=5000), cluster("a100", 1))
    assert told.throughput.source == "given"
    assert told.tokens_per_s == pytest.approx(5000 / told.step_time_s)
    assert told.throughput.samples_per_step == BATCH


def test_a_program_that_shows_neither_is_asked_for_it() -> None:
    with maya_core.emulate("a100", steps=2) as emulated:
        layer = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(2):
            layer(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
    told = emulated.prediction
    assert told.throughput.source == "unknown" and told.tokens_per_s is None and told.samples_per_s is None
    assert "--tokens-per-step" in str(told)


def test_recomputing_counts_for_hfu_only() -> None:
    plain, again = (predict(train(recompute), machine=cluster("a100", 1)) for recompute in (False, True))
    assert plain.mfu == pytest.approx(plain.hfu)
    assert again.flops.model == plain.flops.model
    layers = 3 * 2 * 2 * BATCH * CONTEXT * 256 * 1024  # their forward, once more
    # A layer's last product is not done again: nobody needs its result.
    assert plain.flops.hardware + layers / 2 <= again.flops.hardware <= plain.flops.hardware + layers
    assert sum(module.recompute_s for module in again.top_modules) > 0


def test_the_peak_is_told_by_module_and_line(job: JobTrace, prediction: Prediction) -> None:
    memory = prediction.memory.fullest
    assert (
        sum(row.bytes for row in memory.at_peak)
        == memory.peak_allocated_bytes
        == sum(memory.by_category_bytes.values())
    )
    lines = Path(__file__).read_text().splitlines()

    def code(source: str) -> str:
        file, _, line = source.rpartition(":")
        assert file == __file__
        return lines[int(line) - 1]

    assert memory.peak_source and code(memory.peak_source)
    hidden = next(row for row in memory.at_peak if row.module == "Model.layers.*.*" and row.category == "activations")
    assert "layer(x)" in code(hidden.source)
    parameters = next(row for row in memory.at_peak if row.category == "parameters")
    assert ".cuda()" in code(parameters.source)
    states = next(row for row in memory.at_peak if row.category == "optimizer_state")
    assert "optimizer.step()" in code(states.source)


def test_a_backward_allocation_has_the_line_of_its_forward() -> None:
    with maya_core.emulate("a100") as emulated:
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        y = weight @ weight  # the line
        y.sum().backward()
    trace = emulated.trace
    made = trace.events[(trace.events["kind"] == 1) & (trace.events["phase"] == Phase.BACKWARD)]
    found = {trace.lines[line] for line in made["subject"].tolist()}
    line = next(
        number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line" in text
    )
    assert f"{__file__}:{line}" in found


def test_other_hardware_is_predicted_from_the_same_trace(job: JobTrace) -> None:
    a100, h100, t4 = (predict(job, machine=cluster(gpu, 1)) for gpu in ("a100", "h100", "t4"))
    assert t4.time.compute_s > a100.time.compute_s > h100.time.compute_s
    assert any("The trace was recorded on a100 and replanned for h100" in caveat for caveat in h100.caveats)


def test_a_smaller_gpu_fits_only_if_that_is_certain() -> None:
    with maya_core.emulate("a100") as emulated:
        kept = torch.empty(int(14e9), dtype=torch.uint8, device="cuda")
        more = torch.empty(int(6e9), dtype=torch.uint8, device="cuda")
        del more  # stays in the allocator's cache
        torch.empty(int(1e9), dtype=torch.uint8, device="cuda")
    del kept
    job = collate([emulated.trace])
    assert predict(job, machine=cluster("a100", 1)).memory.fits is True
    assert predict(job, machine=cluster("l4", 1)).memory.fits is True  # 24 GB hold it all
    assert predict(job, machine=cluster("v100-16gb", 1)).memory.fits is False  # 20 GB were live at once


def test_out_of_memory_has_no_step_time_and_says_so() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        with maya_core.emulate("t4") as emulated:
            torch.empty(10**11, dtype=torch.uint8, device="cuda")
    told = emulated.prediction
    assert (told.step_time_s is None and told.memory.ranks == []) or told.memory.fits is False
    assert "not known" in str(told)


@pytest.mark.parametrize(
    ("world", "sharing", "replicas"),
    [
        (8, [], 8),
        (8, [("all_reduce", (0, 1), True)], 4),  # tensor parallelism
        (8, [("reduce_scatter_tensor", (0, 1, 2, 3), True)], 2),  # with sequence parallelism
        (8, [("all_reduce", tuple(range(8)), False)], 8),  # a loss for the log
        (8, [("all_gather_into_tensor", tuple(range(8)), True)], 8),  # FSDP
    ],
)
def test_ranks_that_share_samples_count_once(world: int, sharing: list, replicas: int) -> None:
    rank = Rank(0, world)
    for op, ranks, inside in sharing:
        rank.collective(1, op=op, ranks=ranks, group=str(ranks))
        rank.rows[-1]["module"] = int(inside)
    trace = replace(rank.trace(), modules=["", "Model"])
    assert _replicas(collate([trace])) == replicas


def test_stages_of_a_pipeline_share_samples() -> None:
    ranks = [Rank(0, 8).send(4, 1), Rank(4, 8).receive(0, 1)]
    assert _replicas(collate([rank.trace() for rank in ranks])) == 4


# ---- the file ----
def test_a_prediction_is_read_back(prediction: Prediction, tmp_path: Path) -> None:
    write_prediction(tmp_path / "p.json", prediction)
    assert read_prediction(tmp_path / "p.json") == prediction
    write_prediction(tmp_path / "p.json", prediction)  # over itself


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no prediction at"),
        ("{", "is not a prediction: "),
        ('{"format": "photo album"}', "is not a prediction: "),
        ("newer", r"written by a newer Maya \(prediction version 99"),
    ],
)
def test_damaged_predictions_are_refused(
    prediction: Prediction, tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "p.json"
    if content == "newer":
        content = prediction.model_copy(update={"version": 99}).model_dump_json()
    if content is not None:
        path.write_text(content)
    with pytest.raises(maya_core.MayaError, match=says):
        read_prediction(path)


def test_a_file_of_the_users_is_not_overwritten(prediction: Prediction, tmp_path: Path) -> None:
    mine = tmp_path / "config.json"
    mine.write_text('{"lr": 3e-4}')
    with pytest.raises(maya_core.MayaError, match="was not written by Maya: it will not be overwritten"):
        write_prediction(mine, prediction)
    assert mine.read_text() == '{"lr": 3e-4}'
    with pytest.raises(maya_core.MayaError, match="there is no folder"):
        write_prediction(tmp_path / "none" / "p.json", prediction)


def test_before_the_block_has_ended_there_is_none() -> None:
    with maya_core.emulate("h100") as job, pytest.raises(maya_core.MayaError, match="after the `with` block"):
        _ = job.prediction
