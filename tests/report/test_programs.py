"""Programs of many kinds: what counts as a step, as samples, as tokens and as peak, and which notes are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import maya_core
from maya_core.launch.run import without_secrets
from maya_core.report.prediction import Prediction

pytestmark = pytest.mark.slow

VOCABULARY, CONTEXT, BATCH = 256, 32, 4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 128), nn.Linear(128, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def loader(rows: int = 64) -> DataLoader:
    return DataLoader(TensorDataset(torch.randint(VOCABULARY, (rows, CONTEXT))), BATCH)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("grad_while_loading", [True, False])
def test_validation_is_no_training(grad_while_loading: bool) -> None:
    """Its batches may be taken with gradients on or off; a step that has one in it is longer, and that is said."""
    with maya_core.emulate("a100", steps=5) as job:
        model = Words().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (batch,) in enumerate(loader()):
            step(model, optimizer, batch.cuda())
            if number % 2:
                with torch.set_grad_enabled(grad_while_loading):
                    for (held,) in loader(128):
                        with torch.no_grad():
                            model(held.cuda())
    work = job.prediction.throughput
    assert (work.samples_per_step, work.tokens_per_step, work.steps_per_epoch) == (BATCH, BATCH * CONTEXT, 16)
    assert any("Steps differ" in caveat for caveat in job.prediction.caveats)


def test_gradients_may_be_accumulated() -> None:
    with maya_core.emulate("a100", steps=3) as job:
        model = Words().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (batch,) in enumerate(loader(), 1):
            ids = batch.cuda()
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    work = job.prediction.throughput
    assert (work.samples_per_step, work.tokens_per_step, work.steps_per_epoch) == (4 * BATCH, 4 * BATCH * CONTEXT, 4)


def test_labels_and_classes_are_no_tokens() -> None:
    images = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(2, (32, 80)), torch.randint(10, (32,)))
    with maya_core.emulate("a100", steps=3) as job:
        body, classes = nn.Linear(192, 80).cuda(), nn.Embedding(10, 192).cuda()
        optimizer = torch.optim.SGD([*body.parameters(), *classes.parameters()], 0.1)
        for image, labels, kind in DataLoader(images, 8):
            out = body(image.cuda().flatten(1) + classes(kind.cuda()))
            F.binary_cross_entropy_with_logits(out, labels.cuda().float()).backward()
            optimizer.step()
    assert job.prediction.samples_per_s
    assert job.prediction.tokens_per_s is None


def test_a_batch_of_the_users_own_kind_is_left_alone() -> None:
    class Odd:
        def values(self, key: str) -> str:
            return key

    with maya_core.emulate("a100", steps=2) as job:
        layer = nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in DataLoader([0, 1, 2], batch_size=1, collate_fn=lambda rows: Odd()):
            layer(torch.ones(4, 8, device="cuda")).sum().backward()
            optimizer.step()
    assert job.prediction.throughput.source == "unknown"


def test_an_optimizer_that_never_stepped_is_told() -> None:
    with maya_core.emulate("a100", steps=3) as job:
        often, seldom = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
        first, second = (torch.optim.Adam(layer.parameters()) for layer in (often, seldom))
        for number in range(1, 20):
            often(torch.ones(4, 64, device="cuda")).sum().backward()
            first.step()
            if number % 10 == 0:
                second.step()
    assert any("1 of the program's optimizers never stepped" in caveat for caveat in job.prediction.caveats)


def mfu(run) -> Prediction:
    with maya_core.emulate("h100", steps=2) as job:
        weight = nn.Parameter(torch.ones(16, device="cuda"))
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(2):
            run()
            weight.sum().backward()
            optimizer.step()
    return job.prediction


def test_attention_and_fp8_are_held_against_their_own_peaks() -> None:
    def attention() -> None:
        q, k, v = (
            torch.randn(1, 8, 16384, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def fp8() -> None:
        a = torch.empty(8192, 8192, device="cuda").to(torch.float8_e4m3fn)
        b = torch.empty(8192, 8192, device="cuda").to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device="cuda")
        torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)

    for run, dtype in ((attention, "bfloat16"), (fp8, "float8")):
        told = mfu(run)
        assert told.flops.dtype == dtype
        assert told.hfu < 1


def test_one_process_with_several_gpus_is_one_rank() -> None:
    with maya_core.emulate("a100", gpus_per_node=4, steps=3) as job:
        layers = [nn.Linear(512, 512).to(f"cuda:{device}") for device in range(2)]
        optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], 0.1)
        for (x,) in DataLoader(TensorDataset(torch.randn(64, 512)), 8):
            layers[1](layers[0](x.to("cuda:0")).to("cuda:1")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = job.prediction
    assert told.throughput.samples_per_step == 8
    assert told.world.size == 2
    products = 2 * 3 * 2 * 8 * 512 * 512  # of two layers: forward, and backward of weight and input
    assert told.flops.model == products - 2 * 8 * 512 * 512  # but for the first layer's input
    assert any("several GPUs" in caveat for caveat in told.caveats)


def test_memory_that_runs_out_at_once() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        with maya_core.emulate("t4") as job:
            torch.empty(10**11, dtype=torch.uint8, device="cuda")
    told = job.prediction
    assert told.memory.fits is False
    assert told.memory.fullest.out_of_memory_step == 1
    assert "DOES NOT FIT" in str(told)
    assert not any("released its cache" in caveat for caveat in told.caveats)


def test_names_that_look_like_markup_are_names() -> None:
    with maya_core.emulate("a100", steps=2) as job:
        layers = nn.ModuleDict({"[/cls]": nn.Linear(64, 64), "[red]": nn.Linear(64, 64)}).cuda()
        layers.forward = lambda x: layers["[red]"](layers["[/cls]"](x))
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        for _ in range(2):
            layers(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
    assert "[/cls]" in str(job.prediction) and "[red]" in str(job.prediction)


def test_lines_of_an_earlier_emulation_are_forgotten() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        with maya_core.emulate("a100"):
            kept = [pool.submit(lambda size=size: torch.ones(size, device="cuda")).result() for size in range(1, 30)]
        del kept
        with maya_core.emulate("a100", steps=1) as job:
            weight = torch.ones(8, device="cuda", requires_grad=True)
            pool.submit(lambda: weight.detach().add_(1)).result()
            weight.sum().backward()
            torch.optim.SGD([weight], 0.1).step()
    assert job.prediction.memory.fullest.peak_allocated_bytes > 0


def test_a_graph_is_replayed_on_the_current_stream() -> None:
    with maya_core.emulate("a100") as job:
        x = torch.ones(4096, 4096, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x @ x
        graph.replay()
        x.sum().item()
    trace = job.trace
    replayed = trace.events[(trace.events["flags"] & 1) > 0]
    assert {trace.streams[stream] for stream in replayed["stream"].tolist()} == {(0, 0)}


def test_only_secrets_are_hidden() -> None:
    plain = ["--skip-validation-set", "--hf-model-name-or-path", "sklearn_pipeline_config.yaml", "runs/hf_bert_base_uncased", "--max-tokens", "4096"]  # fmt: skip
    assert without_secrets(plain) == tuple(plain)
    secret = [
        "--password",
        "-x9",
        "--token",
        "abc",
        "hf_a1b2c3d4e5f6g7h8i9j0",
        "sk-ant1-AbCdEfGhIjKlMnOp",
        "AKIAABCDEFGHIJKLMNOP",
    ]
    assert without_secrets(secret) == ("--password", "***", "--token", "***", "***", "***", "***")
