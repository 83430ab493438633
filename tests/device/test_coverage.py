"""Models, precisions, optimizers and common training code must run under emulation, and give the expected numbers."""

from __future__ import annotations

import threading

import models
import pytest
import torch
from launches import launches as launches_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import maya_core
from maya_core.trace.schema import EventKind, Phase

TRANSFORMERS = [models.llama, models.gpt2, models.bert, models.t5, models.vit, models.whisper, models.mixtral]


def _train(model: nn.Module, loss, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _run(make, attention: str = "sdpa") -> tuple[maya_core.emulate, nn.Module]:
    with maya_core.emulate("h100") as job:
        model, loss = make(attention)
        _train(model, loss, torch.optim.AdamW(model.parameters()))
    return job, model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", TRANSFORMERS, ids=lambda make: make.__name__)
def test_transformers_train(make, attention: str) -> None:
    job, model = _run(make, attention)
    memory = job.prediction.memory.ranks[0]
    assert job.trace.steps == 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    held = memory.by_category_bytes
    # blocks are rounded up to 512 bytes, and a tied or expert weight counts once
    assert weights <= held["parameters"] <= weights * 1.1
    assert held["optimizer_state"] == pytest.approx(2 * weights, rel=0.1)
    assert sum(held.values()) == memory.peak_allocated_bytes


def test_flops_of_llama_are_those_of_its_matrices() -> None:
    with maya_core.emulate("h100") as job:
        model, loss = models.llama()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
        optimizer.step()
    matrices = 6 * 2 * 64 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    product = 2 * 2 * 4 * 64 * 64 * 32  # batch 2, 4 heads, 64 queries by 64 keys, head 32
    assert (
        job.prediction.flops.hardware == matrices + 2 * (2 + 5) * product
    )  # per layer two products forward, five backward


def test_memory_left_over_from_an_earlier_emulation_is_not_counted() -> None:
    _, kept = _run(models.gpt2)
    with maya_core.emulate("h100") as job:
        model, _ = models.gpt2()
        del kept
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    assert job.prediction.memory.ranks[0].peak_allocated_bytes >= held


def test_eager_and_sdpa_differ_in_kernels_not_in_parameters() -> None:
    eager, sdpa = (_run(models.gpt2, attention)[0].prediction for attention in ("eager", "sdpa"))
    assert sdpa.trace.kernels_per_step < eager.trace.kernels_per_step
    held = [each.memory.ranks[0].by_category_bytes["parameters"] for each in (sdpa, eager)]
    assert held[0] == held[1]


def test_resnet_and_lstm_train() -> None:
    for make in (models.resnet, models.lstm):
        job, model = _run(make)
        assert job.trace.steps == 2
        assert all(p.grad is None for p in model.parameters())
        ops = {job.trace.calls[s].op for s in job.trace.ops["subject"]}
        assert ops & {"aten::convolution_backward", "aten::_cudnn_rnn_backward"}
        [_] = [note for note in job.prediction.caveats if "cuDNN" in note]  # its workspace is reported as unknown


def test_resnet_keeps_channels_last() -> None:
    with maya_core.emulate("h100"):
        model, _ = models.resnet()
        x = torch.randn(4, 3, 64, 64).cuda().contiguous(memory_format=torch.channels_last)
        features = model.to(memory_format=torch.channels_last)[:6](x)
        assert features.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype: torch.dtype) -> None:
    with maya_core.emulate("a100") as job:
        model, loss = models.gpt2()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                value = loss()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == (
            65536.0 if dtype == torch.float16 else 1.0
        )  # no overflow was assumed, so no step was skipped
    assert job.trace.steps == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)
            )

        def forward(self, x: torch.Tensor, recompute: bool) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            return x

    def peak_and_phases(recompute: bool) -> tuple[int, set[int], int]:
        with maya_core.emulate("h100") as job:
            model = Model().cuda()
            model(torch.randn(4096, 512, device="cuda", requires_grad=True), recompute).sum().backward()
        activations = job.prediction.memory.ranks[0].by_category_bytes["activations"]
        return activations, set(job.trace.ops["phase"].tolist()), launches_of(job.trace)

    plain, phases, launches = peak_and_phases(False)
    saved, with_recompute, more = peak_and_phases(True)
    assert Phase.RECOMPUTE not in phases
    assert Phase.RECOMPUTE in with_recompute
    assert saved < plain / 2
    assert more > launches


def test_ops_know_their_module_in_forward_and_backward() -> None:
    with maya_core.emulate("h100") as job:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    named = [
        (job.trace.calls[e["subject"]].op, job.trace.modules[e["module"]], Phase(e["phase"])) for e in job.trace.ops
    ]
    assert ("aten::addmm", "Sequential.0", Phase.FORWARD) in named
    assert ("aten::addmm", "Sequential.2", Phase.FORWARD) in named
    assert ("aten::mm", "Sequential.2", Phase.BACKWARD) in named
    assert ("aten::threshold_backward", "Sequential.1", Phase.BACKWARD) in named
    assert ("aten::_foreach_add_.List", "", Phase.OPTIMIZER) in named


OPTIMIZERS = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
}
STATES = {
    "AdamW for-loop": 2,
    "AdamW foreach": 2,
    "AdamW fused": 2,
    "SGD": 0,
    "SGD momentum": 1,
    "RMSprop": 1,
}  # tensors per parameter
LAUNCHES = {  # in a step, for four weights
    "AdamW for-loop": 4 * 8,  # decay, lerp, two for the second moment, square root, two to correct it, the update
    "AdamW foreach": 8,
    "AdamW fused": 2,  # the step count, and everything else
    "SGD": 1,
    "SGD momentum": 4,  # Nesterov: decay and add to the momentum, add it to the gradient, the update
    "Adafactor": 4 * (20 + 3),  # three of its 20 ops reduce a whole matrix, after filling a semaphore
    "RMSprop": 5,  # two for the average of squares, square root, epsilon, the update
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    with maya_core.emulate("h100") as job:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
        _train(
            model,
            lambda: model(torch.randn(8, 1024, device="cuda")).sum(),
            OPTIMIZERS[name](model.parameters()),
            steps=3,
        )
    states = max(peak.by_category_bytes["optimizer_state"] for peak in job.prediction.memory.ranks)
    if name in STATES:
        assert states // (4 << 20) == 4 * STATES[name]
    else:
        assert 0 < states < 1 << 20  # factored: a row and a column
    optimizer_ops = job.trace.step(3)
    launches = launches_of(job.trace, optimizer_ops[(optimizer_ops["phase"] == Phase.OPTIMIZER)])
    assert launches == LAUNCHES[name]


def test_eight_threads_train_at_once_and_leak_nothing() -> None:
    with maya_core.emulate("h100", gpus_per_node=8) as job:
        failures: list[BaseException] = []

        def work(device: int) -> None:
            try:
                torch.cuda.set_device(device)
                for _ in range(5):
                    x = torch.randn(64, 256, device="cuda", requires_grad=True)
                    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
                    F.gelu(x @ weight).square().mean().backward()
                    assert weight.grad.shape == (256, 256)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        torch._C._cuda_clearCublasWorkspaces()
        assert [torch.cuda.memory_allocated(i) for i in range(8)] == [0] * 8
    ops = job.trace.ops
    counts = [int((ops["device"] == i).sum()) for i in range(8)]
    assert len(set(counts)) == 1
    allocs, frees = ((job.trace.events["kind"] == kind).sum() for kind in (EventKind.ALLOC, EventKind.FREE))
    assert allocs == frees


def test_an_op_without_a_rule_says_so_and_how_to_add_one() -> None:
    library = torch.library.Library("maya_test", "DEF")
    library.define("mystery(Tensor x) -> Tensor")

    class Mystery(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.maya_test.mystery(x)

    model = nn.Sequential(nn.Identity(), Mystery())
    expected = (
        r"no rule for maya_test::mystery, called in forward of Sequential\.1: [\s\S]*rule\('maya_test::mystery'\)"
    )
    with maya_core.emulate("h100"), pytest.raises(NotImplementedError, match=expected):
        model(torch.ones(2, device="cuda"))
