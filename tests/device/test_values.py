"""Value shadows: what the host knows about device data, and what it assumes about the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama

import maya_core
from maya_core.device.emulated import EmulatedDevice


def of_unknown_values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A device tensor whose values nobody knows: a part of the product of two matrices that is too large to be computed."""
    large = torch.empty(1 << 14, 1 << 14, device="cuda")
    return (large @ large).flatten()[: torch.Size(shape).numel()].clone().view(shape).to(dtype)


def test_data_from_the_host_and_small_results_are_exact(device: EmulatedDevice) -> None:
    x = torch.arange(12).view(3, 4)
    on_device = x.cuda()
    assert on_device.tolist() == x.tolist()
    assert (on_device * 2 + 1).sum(0).tolist() == (x * 2 + 1).sum(0).tolist()
    assert on_device[1:, ::2].t().contiguous().tolist() == x[1:, ::2].t().tolist()
    assert (on_device > 5).any().item() is True
    assert on_device.float().mean().item() == 5.5
    on_device[0] = 9
    assert on_device.tolist()[0] == [9, 9, 9, 9]
    assert torch.nonzero(on_device > 8).tolist() == torch.nonzero(on_device.cpu() > 8).tolist()
    assert torch.bincount(on_device.flatten()).tolist() == torch.bincount(on_device.cpu().flatten()).tolist()


def test_a_filled_tensor_is_known_at_any_size(device: EmulatedDevice) -> None:
    mask = torch.ones(1 << 30, dtype=torch.bool, device="cuda")  # a GiB: nothing of that size is held on the host
    assert mask.all().item() is True
    assert (~mask).any().item() is False
    assert torch.full((1 << 28,), 3.0, device="cuda").max().item() == 3.0


def test_partly_unknown_is_not_taken_for_known(device: EmulatedDevice) -> None:
    unknown = of_unknown_values(1000, 1000)
    buffer = of_unknown_values(10)
    buffer[:5] = 7
    assert device.native.host_value(buffer) is None
    assert device.native.host_value(unknown.sum()) is None
    known = torch.zeros(3, device="cuda")
    known += unknown[0, :3]
    assert device.native.host_value(known) is None


def test_training_is_assumed_to_go_well(device: EmulatedDevice) -> None:
    gradients = torch.empty(1000, 1000, device="cuda").normal_()
    assert torch.isfinite(gradients).all().item() is True
    assert torch.isnan(gradients).any().item() is False
    assert torch.isinf(gradients.sum()).item() is False
    assert torch.equal(gradients, gradients.clone())


def test_unknown_routing_is_spread_over_the_experts(device: EmulatedDevice) -> None:
    logits = torch.empty(4096, 8, device="cuda").normal_()
    _, chosen = torch.topk(logits.softmax(-1), 2)
    counts = torch.bincount(chosen.flatten(), minlength=8)
    assert counts.sum().item() == 8192
    assert 900 < counts.min().item() <= counts.max().item() < 1150
    pairs = chosen.cpu()
    assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize(("shape", "dim"), [((32, 100, 1), 1), ((4, 6, 5), 0), ((1, 7), 1)])
def test_unknown_indices_along_any_dimension(device: EmulatedDevice, shape: tuple[int, ...], dim: int) -> None:
    order = torch.empty(shape, device="cuda").normal_().sort(dim=dim).indices.cpu()
    every = torch.arange(shape[dim]).view([-1 if i == dim else 1 for i in range(len(shape))]).expand(shape)
    assert torch.equal(order.sort(dim=dim).values, every)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_llama_with_sdpa_takes_flash_attention(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls `.all()` on the mask on the device; a wrong result leads to memory-efficient attention."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    with maya_core.emulate(gpu) as job:
        _, loss = llama("sdpa")
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        value.backward()
    ops = [job.trace.calls[s].op for s in job.trace.ops["subject"]]
    assert ops.count("aten::_scaled_dot_product_flash_attention") == 2
    assert ops.count("aten::_scaled_dot_product_flash_attention_backward") == 2
    assert not any("efficient" in op for op in ops)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_programs_on_small_tensors_give_the_cpus_values(data: st.DataObject) -> None:
    """Whatever is done to known tensors, in place or not, through views or not, the device has the same values as the CPU."""
    with maya_core.emulate("h100"):
        start = torch.tensor(data.draw(st.lists(st.integers(-5, 5), min_size=12, max_size=12))).view(3, 4)
        cpu, gpu = start.clone(), start.cuda()
        for _ in range(data.draw(st.integers(1, 6))):
            name = data.draw(
                st.sampled_from(
                    ["add", "view_add", "transpose", "fill", "index", "where", "cumsum", "copy", "cat", "sort"]
                )
            )
            cpu, gpu = (_apply(name, t) for t in (cpu, gpu))
        assert gpu.tolist() == cpu.tolist()


def _apply(name: str, t: torch.Tensor) -> torch.Tensor:
    if name == "add":
        return t + t.flip(0)
    if name == "view_add":
        t[:, 1:3].add_(t[:, :2].clone())
        return t
    if name == "transpose":
        return t.t().contiguous().view(t.shape)
    if name == "fill":
        t[1].fill_(2)
        return t
    if name == "index":
        t[t > 2] = 0
        return t
    if name == "where":
        return torch.where(t > 0, t, -t)
    if name == "cumsum":
        return t.cumsum(1)
    if name == "copy":
        t[0].copy_(t[2])
        return t
    if name == "cat":
        return torch.cat([t[1:], t[:1]])
    return t.sort(dim=1).values
