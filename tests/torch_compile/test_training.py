"""torch.compile on the emulated device, in this process: what is recorded, its duration, and what the prediction reports about it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import maya_core
from maya_core.hardware.catalog import find_gpu
from maya_core.hardware.platform import Platform
from maya_core.ops.plan import kernels_of
from maya_core.report.prediction import Prediction
from maya_core.torch_compile.install import settings
from maya_core.trace.rank import RankTrace, read_trace
from maya_core.trace.schema import EventKind
from maya_core.trace.triton_kernel import TritonKernel

pytestmark = pytest.mark.slow

SETTINGS = settings()["inductor"]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train(compiled: Callable[..., torch.Tensor], model: nn.Module, steps: int = 3, rows: int = 4096) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(steps):
        compiled(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def layer() -> nn.Module:
    torch.manual_seed(0)
    return Layer(512).to("cuda", torch.bfloat16)


def kernels(trace: RankTrace) -> list[TritonKernel]:
    """The Triton kernels of the last step, in order."""
    step = trace.step(trace.steps)
    called = [trace.calls[number] for number in step["subject"][step["kind"] == EventKind.OP]]
    return [call.triton for call in called if call.triton is not None]


def test_generated_kernels_are_recorded_and_priced(tmp_path: Path) -> None:
    def emulated(compile_it: bool) -> Prediction:
        with maya_core.emulate("h100", out=tmp_path / str(compile_it)) as job:
            model = layer()
            train(torch.compile(model) if compile_it else model, model)
        return job.prediction

    eager_prediction, prediction = emulated(False), emulated(True)
    trace = read_trace(tmp_path / "True" / "latest" / "rank-00000.trace")
    found = kernels(trace)
    forward = found[0]
    assert forward.name == "triton_per_fused_native_layer_norm_0"
    assert forward.kind == "persistent_reduction"
    assert (forward.reductions, forward.hint, forward.numels) == (4, "INNER", {"x": 4096, "r0_": 512})
    # The input read and the output written in bfloat16, weight and bias, mean and deviation in float32: inductor's own count.
    assert forward.nbytes == pytest.approx(2 * 4096 * 512 * 2 + 2 * 512 * 2 + 2 * 4096 * 4, rel=0.01)
    assert [Path(line.split(":")[0]).name for line in forward.lines] == [Path(__file__).name]
    [gelu] = [one for one in found if "gelu" in one.ops][:1]
    assert gelu.kind == "pointwise"
    assert gelu.nbytes == 2 * 4096 * 2048 * 2
    # 33.5 MB at 3.35 TB/s are 10 us; the L2 cache holds a part of it.
    [call] = {one.op: one for one in trace.calls if one.triton == gelu}.values()
    [kernel] = kernels_of(call, Platform(find_gpu("h100")))
    assert (kernel.family, kernel.model, sum(kernel.sizes[:2])) == ("triton", "elementwise", gelu.nbytes)
    top = {one.name: one for one in prediction.top_kernels}
    assert f"triton::{gelu.name}" in top
    assert 8e-6 < top[f"triton::{gelu.name}"].seconds / top[f"triton::{gelu.name}"].calls < 14e-6
    assert prediction.compiled is not None
    assert prediction.compiled.triton_kernels_per_step == 11  # three forward, eight backward
    assert prediction.compiled.graphs == 1
    assert not prediction.compiled.graph_breaks and not prediction.compiled.recompiles
    assert "torch.compile: 1 graph" in str(prediction)
    assert prediction.step_time_s is not None and eager_prediction.step_time_s is not None
    assert prediction.step_time_s < eager_prediction.step_time_s
    assert eager_prediction.compiled is None


def test_the_users_caches_and_the_cpu_are_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    with maya_core.emulate("h100"):
        model = layer()
        train(torch.compile(model), model, steps=1)
        private = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert not list(tmp_path.iterdir())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert Path(private).is_dir()
    assert not torch.cuda.is_available()
    on_cpu = torch.compile(lambda x: torch.relu(x) + 1)
    assert torch.equal(on_cpu(torch.tensor([-1.0, 2.0])), torch.tensor([1.0, 3.0]))
    assert list((tmp_path / "inductor").iterdir())


def test_a_replayed_graph_is_one_launch() -> None:
    def emulated(mode: str) -> tuple[RankTrace, Prediction]:
        with maya_core.emulate("h100", steps=5) as job:
            model = layer()
            train(torch.compile(model, mode=mode), model, steps=5, rows=64)
        return job.trace, job.prediction

    plain, prediction = emulated("default")
    trace, replayed = emulated("reduce-overhead")
    step = trace.step(5)
    graphs = step[step["kind"] == EventKind.GRAPH_LAUNCH]
    assert len(graphs) == 2  # forward and backward
    assert [one.name for one in kernels(trace)] == [one.name for one in kernels(plain)]
    # Inputs, activations and outputs are in the pool of the graphs: only the gradients of the loss and of the parameters are allocated again.
    made = step[step["kind"] == EventKind.ALLOC]["b"]
    assert made.sum() < plain.step(5)[plain.step(5)["kind"] == EventKind.ALLOC]["b"].sum() / 2
    assert replayed.step_time_s is not None and prediction.step_time_s is not None
    assert replayed.step_time_s < prediction.step_time_s  # small kernels wait for the host


def test_choices_are_made_by_the_predictor() -> None:
    """Whether to pad a vocabulary of odd length, and whether to use templates or libraries: the same decision twice, without a change of the
    program's memory."""

    def emulated() -> tuple[list[str], int]:
        with maya_core.emulate("a100") as job:
            torch.manual_seed(0)
            head = nn.Linear(768, 50257, bias=False).to("cuda", torch.bfloat16)
            compiled = torch.compile(lambda x: head(torch.relu(x)).float().sum())
            optimizer = torch.optim.SGD(head.parameters(), 0.1)
            x = torch.randn(2048, 768, device="cuda", dtype=torch.bfloat16)
            for _ in range(2):
                compiled(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        called = [job.trace.calls[number] for number in job.trace.ops["subject"]]
        products = [one for one in called if one.op.startswith("aten::mm")]
        sizes = [str([a.sizes for a in one.arguments if hasattr(a, "sizes")]) for one in products]
        return sizes, job.prediction.memory.ranks[0].peak_allocated_bytes

    (first, peak), (second, again) = emulated(), emulated()
    assert (first, peak) == (second, again)
    assert any("50264" in sizes for sizes in first)  # padded to a multiple of 8


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if x.sum().item() > 0:
            x = x * 2
        return self.second(x)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(512, 512), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


def predicted(model: Callable[[], nn.Module], steps: int) -> Prediction:
    with maya_core.emulate("h100", steps=steps) as job:
        made = model().to("cuda", torch.bfloat16)
        train(torch.compile(made), made, steps)
    return job.prediction


def test_graph_breaks_are_told() -> None:
    prediction = predicted(Breaks, 3)
    assert prediction.compiled is not None
    assert prediction.compiled.graphs == 2
    [told] = prediction.compiled.graph_breaks
    assert "Tensor.item()" in told and Path(__file__).name in told
    assert any("breaks its graph in 1 place" in caveat for caveat in prediction.caveats)


def test_a_model_that_recompiles_is_given_up_as_on_a_gpu() -> None:
    with torch._dynamo.config.patch(recompile_limit=3):
        prediction = predicted(Counts, 6)
    assert prediction.compiled is not None
    assert prediction.compiled.graphs == 3
    [again] = prediction.compiled.recompiles
    assert "forward" in again and "2 times" in again and "calls ==" in again
    [failed] = prediction.compiled.failed
    assert "recompile limit" in failed
    assert any("recompiled, in steps 2, 3" in caveat for caveat in prediction.caveats)


def test_what_inductor_cannot_compile_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, lowering

    def refuse(*args: object, **kwargs: object) -> object:
        raise NotImplementedError("no lowering today")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.erf.default, refuse)
    with torch._dynamo.config.patch(suppress_errors=True), config.patch(force_disable_caches=True):
        prediction = predicted(lambda: Layer(512), 2)
    assert prediction.compiled is not None
    assert prediction.compiled.graphs == 0
    assert "no lowering today" in prediction.compiled.failed[0]
    assert prediction.compiled.triton_kernels_per_step == 0
    assert any("run uncompiled" in caveat for caveat in prediction.caveats)


def test_a_block_mask_of_indices_is_known() -> None:
    """A mask is created on the device, where nothing is computed; its blocks decide the duration of the attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seconds(window: int) -> float:
        with maya_core.emulate("h100", steps=2) as job:
            make = sys.modules["torch.nn.attention.flex_attention"].create_block_mask
            mask = make(lambda b, h, q, k: (q >= k) & (q - k < window), None, None, 4096, 4096, device="cuda")
            assert 40 < mask.sparsity() < 100
            attend = torch.compile(flex_attention)
            x = torch.nn.Parameter(torch.ones(1, 8, 4096, 64, device="cuda", dtype=torch.bfloat16))
            optimizer = torch.optim.SGD([x], 1e-3)
            for _ in range(3):
                attend(x, x, x, block_mask=mask).sum().backward()
                optimizer.step()
        step = job.prediction.step_time_s
        assert step is not None
        return step

    narrow, causal = seconds(256), seconds(4096)
    assert causal > 2 * narrow
    assert sys.modules["torch.nn.attention.flex_attention"].create_block_mask is create_block_mask


def test_a_function_that_is_first_compiled_inside_backward() -> None:
    """Hooks run in autograd's own thread, where settings that another thread has assigned do not count. A program may also assign its own."""
    compiled_in = []

    def update(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.sub_(0.1 * gradient / gradient.abs().amax(-1, keepdim=True).clamp(1e-12))

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        compiled_in.append((threading.current_thread(), AsyncCompile.use_process_pool()))
        compiled_update(parameter.detach(), parameter.grad)
        parameter.grad = None

    with maya_core.emulate("h100", steps=2) as job:
        from torch._inductor import config
        from torch._inductor.async_compile import AsyncCompile

        config.compile_threads = 4
        compiled_update = torch.compile(update, fullgraph=True)
        model = nn.Linear(768, 640, device="cuda")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(64, 768, device="cuda")).sum().backward()
            optimizer.step()
    assert job.trace is not None
    assert len(kernels(job.trace)) >= 2
    assert compiled_in and all(
        thread is not threading.main_thread() and not with_workers for thread, with_workers in compiled_in
    )


def test_settings_of_the_emulation_count_in_every_thread_and_are_restored() -> None:
    from torch._inductor import config

    def seen() -> list[object]:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.extend(getattr(config, name) for name in SETTINGS))
        thread.start()
        thread.join()
        return found

    before = seen()
    with maya_core.emulate("h100"):
        assert seen() == list(SETTINGS.values())
    assert seen() == before
