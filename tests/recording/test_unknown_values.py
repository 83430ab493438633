"""Reads of values that nobody knows and that steer the program are told, with their line; what the user says is taken instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import maya_core
from maya_core.errors import MayaError
from maya_core.report.prediction import Prediction, UnknownValue

HERE = Path(__file__).resolve()


def unknown(*shape: int) -> torch.Tensor:
    """What a model returns, which depends on its weights."""
    return nn.Linear(16, shape[-1], device="cuda")(torch.randn(*shape[:-1], 16, device="cuda"))


def line_of(mark: str) -> str:
    """The place of the line of this file with that comment."""
    lines = HERE.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return f"{HERE}:{number}"


def emulated(program: Callable[[], object], **options: object) -> Prediction:
    with maya_core.emulate("h100", **options) as job:  # type: ignore[arg-type]
        program()
    return job.prediction


def only_value(program: Callable[[], object]) -> UnknownValue:
    (value,) = emulated(program).unknown_values
    return value


def work(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.t()).relu()


# ---- programs, each with one place that steers ----


def mask() -> None:
    x = unknown(1000, 64)
    work(x[x[:, 0] > 0])  # mask


def score_threshold() -> None:
    scores = unknown(5000).sigmoid()
    torch.nonzero(scores > 0.3)  # score_threshold


def masked_select() -> None:
    x = unknown(5000)
    torch.masked_select(x, x > 1)  # masked_select


def distinct() -> None:
    torch.unique(unknown(1000, 64).argmax(1))  # distinct


def largest_bin() -> None:
    torch.bincount(unknown(1000, 64).argmax(1))  # largest_bin


def repeats() -> None:
    torch.repeat_interleave(unknown(1000, 64).argmax(1))  # repeats


def branch() -> None:
    x = unknown(64, 64)
    if x.mean() > 0.5:  # branch
        work(x)


def branch_on_a_number() -> None:
    x = unknown(64, 64)
    value = x.mean().item()  # branch_on_a_number
    average = (value + 1) / 2
    if average > 0.7:
        work(x)


def branch_in_a_function() -> None:
    def is_large(x: torch.Tensor) -> bool:
        return bool(x.mean() > 0.5)  # branch_in_a_function

    x = unknown(64, 64)
    if is_large(x):
        work(x)


def skipped_batch() -> None:
    for _ in range(2):
        x = unknown(64, 64)
        if x.max().item() < 0.1:  # skipped_batch
            continue
        work(x)


def until_converged() -> None:
    """Conjugate gradients, to a tolerance."""
    x = unknown(512, 512)
    for _ in range(20):
        x = work(x) / 100
        if x.norm().item() < 1e-3:  # until_converged
            break


def while_unfinished() -> None:
    x, rounds = unknown(64, 64), 0
    while x.abs().max() > 1e-3 and rounds < 5:  # while_unfinished
        x, rounds = work(x), rounds + 1


def as_often_as_a_number_says() -> None:
    x = unknown(64, 64)
    for _ in range(int(x.argmax()) % 7):  # as_often_as_a_number_says
        work(x)


def number_as_size() -> None:
    count = (unknown(5000) > 0).sum().item()  # number_as_size
    torch.zeros(count, 8, device="cuda")


def number_in_a_slice() -> None:
    x = unknown(500, 64)
    longest = int(x.argmax(1).max())  # number_in_a_slice
    work(x[:longest])


def splits_of_experts() -> None:
    x = unknown(512, 64)
    counts = F.one_hot(x.argmax(1), 64).sum(0)
    for part in x.split(counts.tolist()):  # splits_of_experts
        work(part)


def expert_by_number() -> None:
    x, experts = unknown(4, 64), [nn.Linear(64, 8, device="cuda"), nn.Linear(64, 8, device="cuda")]
    experts[int(x.argmax()) % 2](x)  # expert_by_number


def chosen_in_a_comprehension() -> None:
    x = unknown(8, 64)
    [work(x) for score in x[:, 0].tolist() if score > 0]  # chosen_in_a_comprehension


def wolfe() -> None:
    weight = nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    optimizer = torch.optim.LBFGS([weight], max_iter=4)
    x = unknown(64, 4096)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := (x @ weight).pow(2).mean()).backward()
        return loss

    optimizer.step(closure)  # wolfe


@pytest.mark.parametrize(
    ("program", "kind", "decides"),
    [
        (mask, "mask", "size"),
        (score_threshold, "mask", "size"),
        (masked_select, "mask", "size"),
        (distinct, "distinct", "size"),
        (largest_bin, "largest", "size"),
        (repeats, "sum", "size"),
        (branch, "scalar", "branch"),
        (branch_on_a_number, "scalar", "branch"),
        (branch_in_a_function, "scalar", "branch"),
        (skipped_batch, "scalar", "branch"),
        (until_converged, "scalar", "loop"),
        (while_unfinished, "scalar", "loop"),
        (as_often_as_a_number_says, "scalar", "loop"),
        (number_as_size, "scalar", "size"),
        (number_in_a_slice, "scalar", "size"),
        (splits_of_experts, "scalar", "size"),
        (expert_by_number, "scalar", "branch"),
        (chosen_in_a_comprehension, "scalar", "branch"),
    ],
)
def test_what_steers_is_told_with_its_line(program: Callable[[], None], kind: str, decides: str) -> None:
    value = only_value(program)
    assert (value.kind, value.decides) == (kind, decides)
    assert value.source == line_of(program.__name__)
    assert not value.given


def test_what_torchs_own_optimizer_decides_is_told_with_the_programs_line() -> None:
    values = emulated(wolfe).unknown_values
    assert values
    assert {value.source for value in values} == {line_of("wolfe")}
    assert all("torch/optim/lbfgs.py" in value.library for value in values)


def test_caveats_say_what_was_taken_and_how_to_say_better() -> None:
    prediction = emulated(mask)
    (caveat, *_) = prediction.caveats
    number = line_of("mask").rpartition(":")[2]
    assert caveat.startswith("Work depends on a value that is not known:")
    assert (
        f"test_unknown_values.py:{number} keeps {100 * (prediction.unknown_values[0].taken or 0):.1f} % of a mask (read 1 time)"
        in caveat
    )
    assert f"test_unknown_values.py:{number}=SHARE" in caveat


def test_memory_that_depends_on_one_is_not_known_to_fit_without_its_limits() -> None:
    memory = emulated(mask).memory
    assert memory.fits is None
    assert memory.depends_on == [line_of("mask")]
    assert memory.bounds is None
    assert "not known to fit" in str(emulated(mask))


# ---- one value per tensor ----


def test_everything_agrees_with_what_was_read() -> None:
    with maya_core.emulate("h100"):
        x = unknown(300, 8)
        loss = x.pow(2).mean()
        value, keep = loss.item(), x[:, 0] > 0.1
        assert (loss < 100).item() is True and (loss >= 0).item() is True
        assert (loss == value).item() is True and (loss != value).item() is False
        assert float(loss) == loss.tolist() == loss.cpu().item() == loss.detach().cpu().numpy()
        kept = int(keep.sum())
        assert 0 < kept < 300
        assert len(x[keep]) == len(keep.nonzero()) == kept
        assert len(x[~keep]) == 300 - kept == int((~keep).sum())
        assert bool(keep.any()) is True and bool(keep.all()) is False
        assert keep.float().mean().item() == pytest.approx(kept / 300)
        assert torch.equal(keep.cpu().sum(), torch.tensor(kept))
        assert x.max().item() >= x.min().item() and (x - x).abs().max().item() == 0
        assert x.softmax(-1).sum(-1).cpu().allclose(torch.ones(300), atol=1e-3)


def test_the_same_program_reads_the_same_values() -> None:
    def read() -> list[float]:
        with maya_core.emulate("h100"):
            torch.manual_seed(0)
            x = unknown(1000, 8)
            return [x.mean().item(), x.sum().item(), float((x > 0).sum()), x[:3, 0].norm().item()]

    assert read() == read()


def test_losses_are_positive_and_single_ones_fall() -> None:
    """So that "best so far", early stopping and logarithms behave as in a training that goes well."""
    with maya_core.emulate("h100"):
        logits, labels = unknown(4096, 4096), torch.zeros(4096, dtype=torch.long, device="cuda")
        losses = [F.cross_entropy(logits, labels).item() for _ in range(4)]
        losses.append(F.cross_entropy(unknown(92, 50_000), unknown(92, 50_000).argmax(-1)).item())
        errors = [unknown(4096, 1024).pow(2).mean().item(), F.mse_loss(unknown(4096, 1024), logits[:, :1024]).item()]
        scale = F.softplus(unknown(4096, 1024)) * 0.5 + 1e-3
        assert (scale > 0).all() and scale.log().sum().isfinite()
    assert losses[:4] == sorted(losses[:4], reverse=True) and len(set(losses[:4])) == 4
    assert all(0 < each < 10 for each in losses + errors)


# ---- loops ----


def test_a_loop_that_no_made_up_value_ends_is_ended() -> None:
    rounds = []

    def program() -> None:
        while True:
            rounds.append(1)
            if (unknown(64, 64) > 1e9).any():  # an endless loop
                break

    (value,) = emulated(program).unknown_values
    assert (value.decides, value.source) == ("loop", line_of("an endless loop"))
    assert 1000 < len(rounds) < 2000


def test_a_loop_that_cannot_be_ended_is_refused_with_its_line() -> None:
    def program() -> None:
        while unknown(64, 64).norm().item() > 1e-6:  # a hopeless loop
            pass

    place = line_of("a hopeless loop")
    with pytest.raises(MayaError, match=f"{place}: the loop has run") as error:
        emulated(program)
    assert f"--assume {place}=NUMBER" in error.value.advice


def test_a_loop_ends_as_its_samples_do() -> None:
    """Rejection sampling: every round accepts about half of what is left."""

    def program() -> int:
        done, rounds = torch.zeros(4096, dtype=torch.bool, device="cuda"), 0
        while not done.all():
            done |= unknown(4096) > 0
            rounds += 1
        return rounds

    with maya_core.emulate("h100"):
        assert 6 <= program() <= 40


# ---- what the user says ----


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_that_a_mask_keeps(share: float) -> None:
    sizes = []

    def program() -> None:
        x = unknown(1000, 64)
        keep = x[:, 0] > 0
        sizes.append(len(x[keep]))  # assumed share
        sizes.append(len(x[~keep]))

    prediction = emulated(
        program, assume={f"test_unknown_values.py:{line_of('assumed share').rpartition(':')[2]}": share}
    )
    assert sizes == [round(1000 * share), round(1000 * (1 - share))]
    (value,) = prediction.unknown_values
    assert value.given and value.taken == share
    assert prediction.memory.fits is True
    assert any(caveat.startswith("As you said") for caveat in prediction.caveats)


def test_a_number_that_is_read() -> None:
    found = []

    def program() -> None:
        residual = unknown(512, 512).norm()
        found.append(residual.item())  # assumed number
        if found[0] > 4:
            work(unknown(64, 64))

    emulated(program, assume=f"{line_of('assumed number')}=6.5")
    assert found == [6.5]


def test_a_place_without_unknown_values_is_told() -> None:
    prediction = emulated(mask, assume={"train.py:9": 0.5})
    assert "--assume train.py:9: the program read no unknown value there." in prediction.caveats


@pytest.mark.parametrize("wrong", ["train.py=0.5", "train.py:8", "train.py:8=half", "train.py:8=nan"])
def test_a_mistake_is_explained(wrong: str) -> None:
    with pytest.raises(MayaError, match="not FILE:LINE=VALUE") as error:
        maya_core.emulate("h100", assume=wrong)
    assert "train.py:88=0.25" in error.value.advice


# ---- routers ----


def test_routing_is_told_but_assumed_to_be_even() -> None:
    """A mixture of experts: its sizes are an assumption that is told, and memory keeps its verdict."""

    def program() -> None:
        x = unknown(4096, 64)
        chosen = nn.Linear(64, 128, device="cuda")(x).topk(8, dim=-1).indices
        counts = F.one_hot(chosen, 128).sum((0, 1)).tolist()
        assert sum(counts) == 4096 * 8 and max(counts) < 2 * 4096 * 8 / 128
        for part in torch.zeros(4096 * 8, 64, device="cuda").split(counts):  # experts of a router
            work(part)

    prediction = emulated(program)
    assert [value.decides for value in prediction.unknown_values] == ["size"]
    assert prediction.memory.fits is True and prediction.memory.depends_on == []


def test_a_number_that_is_infinite_is_told_too() -> None:
    def program() -> None:
        x = unknown(64, 64)
        value = (x.sum() + float("inf")).item()  # an infinite number
        if value > 1:
            work(x)

    prediction = emulated(program)
    assert any("reads inf, which decides a branch" in caveat for caveat in prediction.caveats)
