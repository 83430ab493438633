"""What counts as a training step, in programs where it is not simply one step of one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import maya_core
from maya_core.errors import MayaError

HERE = Path(__file__).resolve()
BY_BACKWARD = (
    "The program uses no optimizer of torch, so the end of each backward pass was taken for the end of a step."
)
TURNS = "The program's optimizers take turns"


def emulated(program: Callable[[], object], **options: object) -> maya_core.Prediction:
    with maya_core.emulate("h100", **options) as job:  # type: ignore[arg-type]
        program()
    return job.prediction


def line_of(mark: str) -> str:
    (number,) = (n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {mark}"))
    return f"{HERE.name}:{number}"


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 64, device="cuda")).mean()


def sgd_by_hand() -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    for _ in range(1000):
        (torch.randn(8, 64, device="cuda") @ weight).pow(2).mean().backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 1e-3 * weight.grad
            weight.grad = None


def test_without_an_optimizer_each_backward_pass_ends_a_step() -> None:
    prediction = emulated(sgd_by_hand, steps=5)
    assert prediction.trace.steps == 5
    assert prediction.trace.ended == "stopped"
    assert any(caveat.startswith(BY_BACKWARD) and "maya_core.step()" in caveat for caveat in prediction.caveats)
    assert prediction.step_time_s is not None and prediction.step_time_s > 0


def test_a_step_by_hand_takes_as_long_as_one_by_an_optimizer() -> None:
    def by_optimizer() -> None:
        weight = torch.randn(64, 64, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 1e-3, foreach=False)
        for _ in range(10):
            (torch.randn(8, 64, device="cuda") @ weight).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    ours, theirs = emulated(sgd_by_hand, steps=5), emulated(by_optimizer, steps=5)
    assert ours.trace.kernels_per_step == pytest.approx(theirs.trace.kernels_per_step, abs=2)
    assert not any(caveat.startswith(BY_BACKWARD) for caveat in theirs.caveats)


def test_the_state_of_an_optimizer_that_a_checkpoint_creates_is_no_step() -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def program() -> None:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        get_state_dict(model, optimizer)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()

    assert emulated(program, steps=None).trace.steps == 4


def rollouts_and_minibatches(marked: bool) -> int:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    iterations = 0
    for _ in range(20):
        with torch.no_grad():
            for _ in range(6):
                loss_of(model)
        for _ in range(4):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        iterations += 1
        if marked:
            maya_core.step()
        print(iterations)  # end of an iteration
    return iterations


def test_a_program_marks_its_steps() -> None:
    plain = emulated(lambda: rollouts_and_minibatches(marked=False), steps=12)
    marked = emulated(lambda: rollouts_and_minibatches(marked=True), steps=3)
    assert marked.trace.steps == 3
    assert marked.step_time_s == pytest.approx(4 * plain.step_time_s, rel=0.1)  # type: ignore[operator]
    assert any("Steps differ" in caveat and "maya_core.step()" in caveat for caveat in plain.caveats)
    assert not any("Steps differ" in caveat for caveat in marked.caveats)


def test_a_mark_outside_of_an_emulation_does_nothing() -> None:
    maya_core.step()


def test_a_line_of_the_program_ends_steps() -> None:
    marked = emulated(lambda: rollouts_and_minibatches(marked=True), steps=3)
    by_line = emulated(lambda: rollouts_and_minibatches(marked=False), steps=3, step_at=line_of("end of an iteration"))
    assert by_line.trace.steps == 3
    assert by_line.step_time_s == pytest.approx(marked.step_time_s, rel=1e-6)


def test_a_line_that_is_never_reached_is_told() -> None:
    prediction = emulated(lambda: rollouts_and_minibatches(marked=False), steps=3, step_at="train.py:7")
    assert prediction.trace.steps == 0
    assert "--step-at train.py:7: the program did not come to that line." in prediction.caveats


def test_a_mistake_is_explained() -> None:
    with pytest.raises(MayaError, match="not FILE:LINE"):
        maya_core.emulate("h100", step_at="train.py")


def test_optimizers_that_take_turns_are_told() -> None:
    def program() -> None:
        critic, generator = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
        optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
        for iteration in range(20):
            loss_of(critic).backward()
            optimizers[0].step()
            if iteration % 5 == 4:
                loss_of(generator).backward()
                optimizers[1].step()

    assert any(caveat.startswith(TURNS) for caveat in emulated(program, steps=8).caveats)


def test_a_search_for_a_batch_size_is_no_training() -> None:
    """The first tries run out of memory before they complete a step."""

    def program() -> int:
        model, size = nn.Linear(64, 2**14).cuda(), 2**23
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            try:
                for _ in range(4):
                    model(torch.randn(size, 64, device="cuda")).relu().mean().backward()
                    optimizer.step()
                return size
            except torch.cuda.OutOfMemoryError:
                size //= 2

    prediction = emulated(program, steps=3)
    assert prediction.trace.steps == 3
    assert prediction.memory.fits is True
    assert any("ran out of memory" in caveat for caveat in prediction.caveats)


def test_closures_of_lbfgs_are_one_step() -> None:
    def program() -> None:
        weight = nn.Parameter(torch.randn(64, 64, device="cuda"))
        optimizer = torch.optim.LBFGS([weight], max_iter=5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            (loss := (torch.ones(8, 64, device="cuda") @ weight).pow(2).mean()).backward()
            return loss

        for _ in range(5):
            optimizer.step(closure)

    assert emulated(program, steps=3).trace.steps == 3


def test_a_step_in_a_cuda_graph_is_counted_when_it_is_replayed() -> None:
    """The pattern of torch's own documentation: warm up on a side stream, capture the whole step, replay it."""

    def train(job: maya_core.EmulatedBlock) -> None:
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 64, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                model(x).mean().backward()
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            model(x).mean().backward()
            optimizer.step()
        for _ in range(50):
            x.copy_(torch.randn(64, 64))
            graph.replay()

    with maya_core.emulate("h100", steps=3) as job:
        train(job)
    with maya_core.emulate("h100") as every:
        train(every)
    assert job.prediction.trace.steps == 3 and every.prediction.trace.steps == 50
    assert job.prediction.step_time_s == pytest.approx(every.prediction.step_time_s, rel=1e-6)
    with maya_core.emulate("h100", steps=3) as eager:
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(64, 64, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert job.prediction.step_time_s < 0.7 * eager.prediction.step_time_s  # the host launches one graph


def test_a_program_that_captures_only_its_model_counts_eager_steps() -> None:
    with maya_core.emulate("h100", steps=3) as job:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, graph = torch.randn(64, 64, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        for _ in range(9):
            graph.replay()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert job.prediction.trace.steps == 3
