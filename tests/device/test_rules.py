"""Ops that torch's Meta kernels cannot describe, on the emulated device: sizes, layouts and values as on a real GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from maya_core.device.emulated import EmulatedDevice
from maya_core.ops.rules import Rules, rule
from maya_core.torch_seam.version import installed

pytestmark = pytest.mark.usefixtures("device")


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A device tensor whose values nobody knows: a part of the product of two matrices that is too large to be computed."""
    large = torch.empty(1 << 14, 1 << 14, device="cuda")
    return (large @ large).to(dtype).flatten()[: torch.Size(shape).numel()].view(shape)


def known(device: EmulatedDevice, tensor: torch.Tensor) -> list:
    """The known values of a device tensor; `tolist` alone would also return made-up ones."""
    assert device.native.is_known(tensor)
    return tensor.tolist()


# ---- sizes that depend on values ----
def test_selection_of_known_values_is_exact(device):
    x = torch.tensor([0.0, 3.0, 0.0, 5.0]).cuda()
    assert known(device, x.nonzero()) == [[1], [3]]
    assert known(device, x[x > 0]) == [3.0, 5.0]
    assert known(device, x.masked_select(x > 4)) == [5.0]
    assert known(device, torch.where(x == 0)[0]) == [0, 2]


def test_nonzero_has_the_layout_cuda_gives_it():
    found = torch.eye(3).cuda().nonzero()
    assert found.shape == (3, 2)
    assert found.stride() == (1, 3)


def test_a_mask_of_unknown_values_has_one_size():
    x = unknown(1000)
    kept = int((x > 0).sum())
    assert 400 < kept < 600
    assert (x > 0).nonzero().shape == (kept, 1)
    assert x[x > 0].shape == (kept,)
    assert x[~(x > 0)].shape == (1000 - kept,)
    assert x.nonzero().shape == (1000, 1), "numbers are assumed to be nonzero"


def test_a_large_uniform_mask_is_known():
    mask = torch.ones(3000, 3000, dtype=torch.bool, device="cuda")
    assert mask.nonzero().shape == (9_000_000, 2)
    assert mask.logical_not().nonzero().shape == (0, 2)


def test_gather_and_scatter_through_one_unknown_mask_fit_together():
    x = unknown(64, 8).requires_grad_()
    mask = unknown(64) > 0
    picked = x[mask]
    restored = torch.zeros(64, 8, device="cuda").masked_scatter(mask[:, None], picked)
    again = torch.zeros(64, 8, device="cuda")
    again[mask] = picked
    (restored.sum() + again.sum()).backward()
    assert x.grad.shape == (64, 8)


def test_boolean_index_gives_true_gradients(device):
    x = torch.arange(4.0).cuda().requires_grad_()
    x[x.detach() > 1].sum().backward()
    assert known(device, x.grad) == [0, 0, 1, 1]


def test_assigning_a_number_through_a_mask(device):
    x = torch.arange(5).cuda()
    x[x > 2] = 7
    assert known(device, x) == [0, 1, 2, 7, 7]


def test_a_mask_of_the_wrong_shape_is_refused():
    with pytest.raises(IndexError, match="does not match"):
        torch.zeros(3, device="cuda")[torch.zeros(4, dtype=torch.bool, device="cuda")]


def test_unique_counts_and_inverts(device):
    x = torch.tensor([3, 1, 3, 2, 1]).cuda()
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    assert known(device, values) == [1, 2, 3]
    assert known(device, inverse) == [2, 0, 2, 1, 0]
    assert known(device, counts) == [2, 1, 2]
    assert known(device, torch.unique_consecutive(torch.tensor([1, 1, 2, 1]).cuda())) == [1, 2, 1]
    assert torch.unique(unknown(10, 2), dim=0).shape == (10, 2), "unknown numbers are distinct"
    assert torch.unique(unknown(10, 2)).shape == (20,)


def test_bincount_and_repeat_interleave(device):
    assert known(device, torch.bincount(torch.tensor([1, 3, 3]).cuda(), minlength=6)) == [0, 1, 0, 2, 0, 0]
    assert torch.bincount(unknown(100, dtype=torch.int64), minlength=8).shape == (8,)
    repeated = torch.arange(3).cuda().repeat_interleave(torch.tensor([2, 0, 1]).cuda())
    assert known(device, repeated) == [0, 0, 2]


def test_selection_makes_the_host_wait(device):
    x = torch.ones(4, device="cuda")
    device.native.start_recording()
    x.add(1)
    without = device.native.event_count()
    x.nonzero()
    assert device.native.event_count() - without >= 2, "the kernel, and the wait for it"
    device.native.stop_recording()


# ---- convolutions ----
@pytest.mark.parametrize(("input_last", "weight_last"), [(False, False), (True, False), (False, True), (True, True)])
def test_channels_last_of_input_or_weight_carries_through_convolution(input_last, weight_last):
    layer = nn.Conv2d(4, 8, 3).cuda()
    x = torch.randn(2, 4, 6, 6, device="cuda")
    if weight_last:
        layer = layer.to(memory_format=torch.channels_last)
    if input_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    out = layer(x)
    grad_input, grad_weight = torch.autograd.grad(out.sum(), [x, layer.weight])
    last = input_last or weight_last
    for tensor in (out, grad_input, grad_weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == last
        assert tensor.is_contiguous() != last


def test_double_precision_convolution_stays_contiguous():
    layer = nn.Conv2d(4, 8, 3).cuda().double().to(memory_format=torch.channels_last)
    assert layer(torch.randn(2, 4, 6, 6, device="cuda", dtype=torch.float64)).is_contiguous()


def test_conv3d_and_transposed_and_depthwise_follow_channels_last():
    volume = torch.randn(2, 8, 6, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last_3d)
    assert nn.Conv3d(8, 4, 3).cuda()(volume).stride() == (256, 1, 64, 16, 4)
    image = torch.randn(2, 8, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)
    assert nn.ConvTranspose2d(8, 4, 2, stride=2).cuda()(image).stride() == (576, 1, 48, 4)
    assert nn.Conv2d(8, 8, 3, groups=8).cuda()(image).stride() == (128, 1, 32, 8)


def test_conv1d_of_a_transposed_input_is_contiguous():
    x = torch.randn(2, 16, 4, device="cuda").transpose(1, 2)
    assert nn.Conv1d(4, 8, 3, padding=1).cuda()(x).stride() == (128, 16, 1)


def test_wrong_channels_say_so_as_torch_does():
    with pytest.raises(
        RuntimeError, match=r"expected input\[2, 5, 6, 6\] to have 4 channels, but got 5 channels instead"
    ):
        nn.Conv2d(4, 8, 3).cuda()(torch.randn(2, 5, 6, 6, device="cuda"))


def test_only_wanted_gradients_are_made():
    layer = nn.Conv2d(3, 8, 3, bias=False).cuda()
    before = torch.cuda.memory_allocated()
    out = layer(torch.randn(2, 3, 6, 6, device="cuda"))
    out.sum().backward()
    del out
    assert torch.cuda.memory_allocated() - before == 1024, "the gradient of the weight, 864 bytes in blocks of 512"


# ---- recurrent networks ----
@pytest.mark.parametrize("network", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}, {"bias": False}]
)
def test_recurrent_training_step(network, options):
    layer = network(6, 10, **options).cuda()
    reference = network(6, 10, **options)
    x = torch.randn(4, 7, 6)
    out, state = layer(x.cuda())
    expected, expected_state = reference(x)
    assert out.shape == expected.shape
    states = zip(state, expected_state, strict=True) if network is nn.LSTM else [(state, expected_state)]
    assert all(mine.shape == theirs.shape for mine, theirs in states)
    out.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert all(p.grad.shape == q.shape for p, q in zip(layer.parameters(), reference.parameters(), strict=True))


def test_recurrent_weights_and_gradients_share_one_buffer():
    layer = nn.LSTM(6, 10, num_layers=2).cuda()
    assert len({p.untyped_storage().data_ptr() for p in layer.parameters()}) == 1
    layer(torch.randn(4, 7, 6, device="cuda"))[0].sum().backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in layer.parameters()}) == 1
    assert layer.weight_ih_l0.untyped_storage().nbytes() == 4 * sum(p.numel() for p in layer.parameters())


def test_flattening_keeps_values(device):
    host = nn.LSTM(3, 2)
    layer = copy.deepcopy(host).cuda()
    for mine, theirs in zip(layer.parameters(), host.parameters(), strict=True):
        assert known(device, mine) == theirs.tolist()


def test_projection_packed_sequences_and_autocast():
    layer = nn.LSTM(6, 10, proj_size=5).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(7, 4, 6).cuda(), torch.tensor([7, 5, 5, 2]))
    out, (hidden, cell) = layer(packed)
    assert out.data.shape == (19, 5)
    assert (hidden.shape, cell.shape) == ((1, 4, 5), (1, 4, 10))
    with torch.autocast("cuda", torch.float16):
        out, _ = layer(torch.randn(4, 7, 6, device="cuda"))
    assert out.dtype == torch.float16
    out.float().sum().backward()
    assert layer.weight_hr_l0.grad.dtype == torch.float32


def test_training_keeps_a_reserve_that_inference_does_not():
    layer = nn.LSTM(64, 128).cuda()
    x = torch.randn(50, 32, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    trained = layer(x)
    training = torch.cuda.memory_allocated() - before
    del trained
    with torch.no_grad():
        inferred = layer.eval()(x)  # noqa: F841 (kept alive)
    inference = torch.cuda.memory_allocated() - before
    reserve = 50 * 32 * 128 * 5 * 4  # four gates and a cell per step, sample and unit
    initial_states = 2 * 32 * 128 * 4  # saved for the backward, too
    assert training - inference == reserve + initial_states


# ---- losses ----
@pytest.mark.parametrize(("dtype", "place"), [(torch.int64, "cuda"), (torch.int32, "cpu"), (torch.int32, "cuda")])
def test_ctc_loss_takes_lengths_as_lists_and_tensors(dtype, place):
    scores = torch.randn(50, 4, 20, device="cuda", requires_grad=True)
    targets = torch.randint(1, 20, (40,)).to(place, dtype)
    lengths, target_lengths = torch.full((4,), 50, dtype=dtype), torch.full((4,), 10, dtype=dtype)
    for given in ((lengths, target_lengths), (lengths.cuda(), target_lengths.cuda()), ((50,) * 4, (10,) * 4)):
        scores.grad = None
        loss = nn.functional.ctc_loss(scores.log_softmax(2), targets, *given, reduction="none")
        assert loss.shape == (4,)
        loss.sum().backward()
        assert scores.grad.shape == (50, 4, 20)


# ---- sparse ----
def test_sparse_tensors_keep_their_values(device):
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 2]]).cuda(), torch.tensor([3.0, 4.0, 5.0]).cuda()
    matrix = torch.sparse_coo_tensor(torch.cat([indices, indices], 1), torch.cat([values, values]), (2, 3))
    merged = matrix.coalesce()
    assert merged._nnz() == 3
    assert known(device, merged.values()) == [6, 8, 10]
    assert known(device, merged.to_dense()) == [[0, 0, 6], [8, 0, 10]]
    assert known(device, torch.sparse.mm(merged, torch.ones(3, 2).cuda())) == [[6, 6], [18, 18]]
    assert known(device, (merged + merged).to_dense()) == [[0, 0, 12], [16, 0, 20]]
    assert known(device, (merged * merged).to_dense()) == [[0, 0, 36], [64, 0, 100]]
    assert torch.eye(3).cuda().to_sparse()._nnz() == 3


@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1)])
def test_sparse_embedding_gradients_train_as_on_the_cpu(device, make):
    host = nn.Embedding(20, 3, sparse=True)
    layer = copy.deepcopy(host).cuda()
    tokens = torch.tensor([[1, 2], [2, 3]])
    for embedding, ids in ((host, tokens), (layer, tokens.cuda())):
        optimizer = make(embedding.parameters())
        embedding(ids).square().sum().backward()
        optimizer.step()
    assert layer.weight.grad.is_sparse
    assert layer.weight.grad.coalesce()._nnz() == 3
    torch.testing.assert_close(device.native.host_value(layer.weight), host.weight.detach())


def test_csr_matrix_by_dense_matrix(device):
    matrix = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).cuda().to_sparse_csr()
    assert known(device, matrix @ torch.ones(2, 2).cuda()) == [[2, 2], [3, 3]]


# ---- optimizers ----
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"capturable": True}])
def test_adam_of_known_parameters_agrees_with_the_cpu(device, options):
    host = nn.Linear(4, 3)
    layer = copy.deepcopy(host).cuda()
    x = torch.randn(5, 4)
    for module, data, extra in ((host, x, {}), (layer, x.cuda(), options)):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01, **extra)
        for _ in range(3):
            optimizer.zero_grad()
            module(data).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(device.native.host_value(layer.weight), host.weight.detach(), rtol=1e-4, atol=1e-5)


# Until torch 2.11, a fused Adagrad ran only on the host.
FUSED = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    *[torch.optim.Adagrad] * (installed().version >= (2, 12)),
]


@pytest.mark.parametrize("make", FUSED)
def test_fused_optimizers_forget_what_they_change(device, make):
    layer = nn.Linear(4, 3).cuda()
    assert device.native.is_known(layer.weight)
    optimizer = make(layer.parameters(), lr=0.1, fused=True)
    layer(torch.randn(5, 4).cuda()).sum().backward()
    optimizer.step()
    assert not device.native.is_known(layer.weight), (
        "the fused kernel is not computed on the host, so its result is not known"
    )


# ---- grouped matrix products ----
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_mm_pads_rows_to_16_bytes(dtype):
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32).cuda()
    tokens, experts = torch.randn(32, 16, device="cuda", dtype=dtype), torch.randn(4, 5, 16, device="cuda", dtype=dtype)
    out = torch._grouped_mm(tokens, experts.transpose(1, 2), offs=ends)
    assert out.shape == (32, 5)
    assert out.stride() == (8, 1)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch._grouped_mm(tokens, torch.randn(4, 16, 5, device="cuda", dtype=dtype), offs=ends)


# ---- ops without a rule ----
def test_an_op_without_rule_says_how_to_add_one():
    with pytest.raises(NotImplementedError, match=r"Maya has no rule for aten::_cslt_compress.*@maya_core\.ops\.rule"):
        torch._cslt_compress(torch.randn(8, 8, device="cuda", dtype=torch.half))


def test_rules_leave_with_the_device(device):
    device.remove()
    x = torch.randn(2, 4, 6, 6, device="meta").contiguous(memory_format=torch.channels_last)
    assert nn.functional.conv2d(x, torch.empty(8, 4, 3, 3, device="meta")).is_contiguous(), (
        "torch's own Meta kernel again"
    )
    assert torch.tensor([0, 1]).nonzero().tolist() == [[1]]


def test_a_program_may_add_a_rule_of_its_own(device: EmulatedDevice) -> None:
    library = torch.library.Library("maya_rules_test", "DEF")
    library.define("route(Tensor scores, int experts) -> Tensor")

    @rule("maya_rules_test::route")
    def route(rules: Rules, scores: torch.Tensor, experts: int) -> torch.Tensor:
        out = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
        rules.record("maya_rules_test::route", [scores, experts], [out])
        return out

    device.native.start_recording()
    chosen = torch.ops.maya_rules_test.route(torch.randn(6, 4, device="cuda"), 4)
    assert (chosen.shape, chosen.dtype) == ((6,), torch.int64)
    assert device.planner.calls[-1].op == "maya_rules_test::route"
    library._destroy()
