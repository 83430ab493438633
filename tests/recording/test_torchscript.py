"""Programs of TorchScript do on the emulated device what the same modules do without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import maya_core
from maya_core.recording.torchscript import NOTE


class Encoder(nn.Module):
    """Has more weights than are computed for real, so that its outputs are unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(96)
        self.layers = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(self.norm(x))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.Flatten()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.shape[0] > 4:
            y = torch.tanh(y)
        return y


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (Encoder, (16, 96)),
    "images": (Images, (4, 3, 16, 16)),
    "branching": (Branching, (16, 96)),
}


def train(module: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(10):
        module(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def prediction_of(
    name: str, change: Callable[[nn.Module, torch.Tensor], nn.Module] = lambda module, _: module
) -> maya_core.Prediction:
    create, shape = MODULES[name]
    with maya_core.emulate("h100", steps=4) as job:
        x = torch.randn(*shape, device="cuda")
        train(change(create().cuda(), x), x)
    return job.prediction


def traced(module: nn.Module, x: torch.Tensor) -> nn.Module:
    with warnings.catch_warnings():
        # torch warns if what it traced gives other results than the module.
        warnings.filterwarnings("error", "Output nr", torch.jit.TracerWarning)
        return torch.jit.trace(module, x)


@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module_is_trained_like_the_module_itself(name: str) -> None:
    plain, through_trace = prediction_of(name), prediction_of(name, traced)
    assert through_trace.trace.steps == 4
    assert through_trace.step_time_s == pytest.approx(plain.step_time_s)
    assert through_trace.workload is not None and plain.workload is not None
    assert through_trace.workload.trained_parameters == plain.workload.trained_parameters
    assert through_trace.unknown_values == []


def test_a_module_that_was_traced_on_the_host_is_trained_on_the_gpu() -> None:
    there = prediction_of("images", lambda module, x: torch.jit.trace(module.cpu(), x.cpu()).cuda())
    assert there.step_time_s == pytest.approx(prediction_of("images").step_time_s)


def test_modules_of_torchscript_have_the_names_of_the_modules_that_they_were_made_from() -> None:
    prediction = prediction_of("images", traced)
    assert "Images" in {module.name for module in prediction.top_modules}


def test_a_scripted_module_does_the_same_products() -> None:
    def count(change: Callable[[nn.Module, torch.Tensor], nn.Module]) -> int:
        create, shape = MODULES["encoder"]
        with maya_core.emulate("h100", steps=4) as job:
            x = torch.randn(*shape, device="cuda")
            train(change(create().cuda(), x), x)
        assert job.trace is not None
        return sum(
            job.trace.calls[number].op.startswith(("aten::mm", "aten::addmm"))
            for number in job.trace.ops["subject"].tolist()
        )

    assert count(lambda module, _: torch.jit.script(module)) == count(lambda module, _: module) > 0


@pytest.mark.parametrize("prepare", [torch.jit.freeze, torch.jit.optimize_for_inference])
def test_a_frozen_backbone_runs_beside_the_training(prepare: Callable[[nn.Module], nn.Module]) -> None:
    with maya_core.emulate("h100", steps=3) as job:
        images = torch.randn(4, 3, 16, 16, device="cuda")
        backbone = prepare(torch.jit.trace(Images().cuda().eval(), images))
        head = nn.Linear(64 * 7 * 7, 10).cuda()
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for _ in range(3):
            with torch.no_grad():
                features = backbone(images)
            assert features.shape == (4, 64 * 7 * 7)
            head(features).mean().backward()
            optimizer.step()
    assert job.prediction.trace.steps == 3
    assert job.trace is not None
    convolutions = [call.op for call in job.trace.calls if "convolution" in call.op]
    assert convolutions and not any("backward" in op for op in convolutions)


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 0.5) * (x + 1.0) + y


@pytest.mark.parametrize("compiled", [True, False])
def test_what_the_compiler_of_torchscript_would_fuse_is_told(compiled: bool) -> None:
    with maya_core.emulate("h100", steps=4) as job:
        function = torch.jit.script(scaled) if compiled else scaled
        weight = torch.randn(256, 256, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(4):
            function(weight, weight.detach()).mean().backward()
            optimizer.step()
    assert (NOTE in job.prediction.caveats) is compiled


def test_values_that_nobody_knows_are_close_and_shapes_are_compared() -> None:
    with maya_core.emulate("h100"):
        one, other = (Encoder().cuda()(torch.randn(8, 96, device="cuda")) for _ in range(2))
        torch.testing.assert_close(one, other)
        torch.testing.assert_close({"out": [one, 3]}, {"out": [other.cpu().cuda(), 3]})
        with pytest.raises(AssertionError, match="shape"):
            torch.testing.assert_close(one, other[:4])
        with pytest.raises(AssertionError, match="dtype"):
            torch.testing.assert_close(one, other.double())
        with pytest.raises(AssertionError, match="Scalars are not equal"):
            torch.testing.assert_close({"out": [one, 3]}, {"out": [other, 4]})
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"))
