"""Nested tensors, strided and jagged, on the emulated device. Expected sizes and values are those of the same program on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

import maya_core

LENGTHS = (3, 7, 5)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield


def sequences(width: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(length, width, generator=generator) for length in LENGTHS]


def nested(device: str, **options: object) -> torch.Tensor:
    return torch.nested.nested_tensor(sequences(), device=device, **options)


def sizes(value: object) -> object:
    """The sizes of a result and of the sequences in it."""
    if not isinstance(value, torch.Tensor):
        return value
    return [tuple(one.shape) for one in value.unbind()] if value.is_nested else tuple(value.shape)


PROGRAMS: dict[str, Callable[[str], object]] = {
    "as_nested": lambda at: torch.nested.as_nested_tensor([one.to(at) for one in sequences()]),
    "moved": lambda at: nested("cpu").to(at),
    "half": lambda at: nested(at).half(),
    "select": lambda at: nested(at)[1],
    "padded": lambda at: nested(at).to_padded_tensor(0.0),
    "padded to a size": lambda at: torch.nested.to_padded_tensor(nested(at), -1.0, (3, 9, 32)),
    "elementwise": lambda at: functional.gelu(nested(at) * 2 + nested(at)),
    "masked": lambda at: nested(at).masked_fill(nested(at) > 0, 0.0),
    "heads": lambda at: nested(at).reshape(3, -1, 4, 8).transpose(1, 2).contiguous(),
    "product": lambda at: nested(at).matmul(nested(at).transpose(1, 2)),
    "softmax": lambda at: torch.softmax(nested(at), -1),
    "layer norm": lambda at: nn.LayerNorm(32).to(at)(nested(at)),
    "linear": lambda at: nn.Linear(32, 8).to(at)(nested(at)),
    "embedding": lambda at: nn.Embedding(9, 4).to(at)(
        torch.nested.nested_tensor([torch.arange(2), torch.arange(4)], device=at)
    ),
    "from a mask": lambda at: torch._nested_tensor_from_mask(
        torch.ones(2, 5, 32, device=at), torch.tensor([[True] * 3 + [False] * 2, [True] * 5], device=at)
    ),
    "jagged": lambda at: nn.Linear(32, 8).to(at)(nested(at, layout=torch.jagged)).to_padded_tensor(0.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_sizes_that_they_have_on_the_host(name: str) -> None:
    expected = sizes(PROGRAMS[name]("cpu"))
    with maya_core.emulate("h100"):
        result = PROGRAMS[name]("cuda")
        assert sizes(result) == expected
        assert isinstance(result, torch.Tensor) and result.is_cuda


@pytest.mark.parametrize("name", ["padded", "padded to a size", "elementwise", "masked", "select", "from a mask"])
def test_values_of_the_host_stay_known(name: str) -> None:
    def flat(value: torch.Tensor) -> torch.Tensor:
        return value.values() if value.is_nested else value

    expected = flat(PROGRAMS[name]("cpu"))
    with maya_core.emulate("h100"):
        assert torch.equal(flat(PROGRAMS[name]("cuda")).cpu(), expected)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        heads = [layer(normed).reshape(3, -1, 4, 8).transpose(1, 2).contiguous() for layer in self.projections]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).contiguous().reshape(3, -1, 32)
        return x + self.out(mixed)


def test_a_model_with_attention_is_trained_on_strided_nested_tensors() -> None:
    with maya_core.emulate("h100", steps=3) as job:
        model = Attends().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(nested("cuda")).to_padded_tensor(0.0).pow(2).mean().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert job.prediction.trace.steps == 3
    assert job.trace is not None
    ops = {job.trace.calls[number].op for number in job.trace.ops["subject"].tolist()}
    assert {"aten::to_padded_tensor", "aten::native_layer_norm_backward", "aten::_nested_from_padded"} <= ops


def test_a_gradient_of_a_strided_nested_tensor_has_its_sizes() -> None:
    with maya_core.emulate("h100"):
        leaf = nested("cuda", requires_grad=True)
        leaf.to_padded_tensor(0.0).sum().backward()
        assert sizes(leaf.grad) == [(length, 32) for length in LENGTHS]
        assert torch.equal(leaf.grad.values().cpu(), torch.ones(sum(LENGTHS) * 32))  # type: ignore[union-attr]


def test_an_encoder_with_a_padding_mask_is_evaluated_by_its_fast_path() -> None:
    with maya_core.emulate("h100") as job:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).cuda().eval()
        padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5], device="cuda")
        with torch.inference_mode():
            result = encoder(torch.randn(2, 5, 64, device="cuda"), src_key_padding_mask=padding)
        assert result.shape == (2, 5, 64)
    assert job.trace is not None
    products = [call for call in job.trace.calls if call.op == "aten::addmm"]
    assert products and all(
        call["mat1"].sizes[0] == 8 for call in products
    )  # 3 + 5 tokens: nothing is computed for padding


def test_a_jagged_model_is_trained() -> None:
    with maya_core.emulate("h100", steps=3) as job:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(nested("cuda", layout=torch.jagged)).to_padded_tensor(0.0).mean().backward()
            optimizer.step()
    assert job.prediction.trace.steps == 3


def test_a_padded_tensor_without_the_number_of_tokens_reads_it_from_the_offsets() -> None:
    with maya_core.emulate("h100"):
        padded = torch.arange(24.0).view(2, 4, 3).cuda()
        offsets = torch.tensor([0, 1, 4]).cuda()
        made = torch.ops.aten._padded_dense_to_jagged_forward(padded, [offsets])
        assert made.tolist() == [[0, 1, 2], [12, 13, 14], [15, 16, 17], [18, 19, 20]]


def test_what_torch_does_not_have_on_a_gpu_is_refused_by_name() -> None:
    with (
        maya_core.emulate("h100"),
        pytest.raises(NotImplementedError, match=r"aten::sum\.dim_IntList.*NestedTensorCUDA"),
    ):
        torch.sum(nested("cuda"), -1, keepdim=True)


def test_attention_with_weights_is_refused_with_a_way_out() -> None:
    with maya_core.emulate("h100"), torch.inference_mode():
        attention = nn.MultiheadAttention(32, 4, batch_first=True).cuda().eval()
        x = nested("cuda")
        assert sizes(attention(x, x, x, need_weights=False)[0]) == [(length, 32) for length in LENGTHS]
        with pytest.raises(NotImplementedError, match=r"layout=torch\.jagged"):
            attention(x, x, x, need_weights=True)
