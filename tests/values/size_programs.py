"""Programs whose sizes depend on what a model returns. Each returns the sizes it came to, and can be run really, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Sizes = list[int]
Program = Callable[[str], Sizes]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def outputs(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """What a model with weights of its own returns. Weights and data are the same on both devices."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(96, shape[-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    data = torch.randn(*shape[:-1], 96, generator=generator)
    return model.to(device)(data.to(device))


def train(*parts: torch.Tensor) -> None:
    """Forward and backward over everything that was kept."""
    sum((part * part).sum() for part in parts).backward()  # type: ignore[union-attr]


@program
def boxes_above_a_score(device: str) -> Sizes:
    out = outputs(device, 20_000, 5)
    kept = out[out[:, 4].sigmoid() > 0.7]
    train(kept.relu(), out)
    return [len(kept)]


@program
def overlaps_of_kept_boxes(device: str) -> Sizes:
    """Memory grows with the square of what is kept."""
    out = outputs(device, 4000, 5)
    kept = out[out[:, 4] > 0.4]
    train(torch.cdist(kept[:, :4], kept[:, :4]) + 1e-3)
    return [len(kept)]


@program
def both_sides_of_a_mask(device: str) -> Sizes:
    out = outputs(device, 10_000, 32)
    easy = out[:, 0] > 0.2
    first, second = out[easy], out[~easy]
    train(first.exp(), second.tanh())
    return [len(first), len(second)]


@program
def hard_examples(device: str) -> Sizes:
    out = outputs(device, 8192, 10)
    loss = F.cross_entropy(out, torch.zeros(8192, dtype=torch.long, device=device), reduction="none")
    hard = loss[loss > 2.5]
    train(hard)
    return [hard.numel()]


@program
def pseudo_labels_with_confidence(device: str) -> Sizes:
    out = outputs(device, 6000, 10)
    confidence, label = out.softmax(-1).max(-1)
    sure = confidence > 0.3
    train(F.cross_entropy(out[sure], label[sure], reduction="none"), out)
    return [int(sure.sum())]


@program
def pruned_tokens(device: str) -> Sizes:
    out = outputs(device, 16, 196, 64)
    importance = out.norm(dim=-1)
    keep = importance > 10
    train(out[keep])
    return [int(keep.sum())]


@program
def samples_that_leave_early(device: str) -> Sizes:
    x, sizes = outputs(device, 2048, 64), []
    for layer in range(3):
        going_on = x[:, layer] < 0.8
        x = x[going_on]
        sizes.append(len(x))
        x = x * 1.1
    train(x)
    return sizes


@program
def experts_one_by_one(device: str) -> Sizes:
    x = outputs(device, 4096, 32)
    chosen, sizes, parts = x[:, :4].argmax(-1), [], []
    for expert in range(4):
        rows = (chosen == expert).nonzero().squeeze(-1)
        sizes.append(rows.numel())
        parts.append(x[rows].relu())
    train(*parts)
    return sizes


@program
def foreground_points(device: str) -> Sizes:
    points = outputs(device, 30_000, 8)
    foreground = torch.masked_select(points, (points[:, :1] > 0.3).expand_as(points)).view(-1, 8)
    train(foreground)
    return [len(foreground)]


@program
def predicted_classes(device: str) -> Sizes:
    out = outputs(device, 5000, 100)
    classes, inverse = out.argmax(-1).unique(return_inverse=True)
    means = torch.zeros(len(classes), 100, device=device).index_add(0, inverse, out)
    train(means)
    return [len(classes)]


@program
def occupied_cells(device: str) -> Sizes:
    out = outputs(device, 8000, 3)
    cells = torch.unique((out * 4).floor().long(), dim=0)
    table = torch.zeros(len(cells), 64, device=device)
    train(out, table.requires_grad_())
    return [len(cells)]


@program
def active_neurons(device: str) -> Sizes:
    hidden = outputs(device, 512, 256).relu()
    values = hidden[hidden > 0]
    train(values)
    return [values.numel()]


@program
def gradients_above_a_limit(device: str) -> Sizes:
    x = outputs(device, 256, 300)
    weight = torch.ones(300, 200, device=device, requires_grad=True)
    (x.detach() @ weight).pow(2).mean().backward()
    assert weight.grad is not None
    large = weight.grad.abs() > 0.03
    sent = weight.grad[large]
    train(x)
    return [sent.numel()]


@program
def edges_of_a_predicted_graph(device: str) -> Sizes:
    nodes = outputs(device, 600, 32)
    edges = ((nodes @ nodes.t()) > 6).nonzero()
    messages = nodes[edges[:, 0]] * nodes[edges[:, 1]]
    train(messages, nodes)
    return [len(edges)]


@program
def peaks_of_a_heat_map(device: str) -> Sizes:
    heat = outputs(device, 4, 16, 64, 64)
    peaks = (F.max_pool2d(heat, 3, 1, 1) == heat) & (heat > 1)
    where = peaks.nonzero()
    train(heat[peaks])
    return [len(where)]


@program
def without_outliers(device: str) -> Sizes:
    out = outputs(device, 20_000, 4)
    inside = (out - out.mean(0)).abs() < 1.5 * out.std(0)
    kept = out[inside.all(-1)]
    train(kept)
    return [len(kept)]


@program
def spans_of_a_question(device: str) -> Sizes:
    start, end = outputs(device, 8, 128, 2).unbind(-1)
    likely = (start[:, :, None] + end[:, None]) > 2
    pairs = torch.nonzero(likely.triu())
    train(start[pairs[:, 0], pairs[:, 1]], start)
    return [len(pairs)]


@program
def words_of_a_nucleus(device: str) -> Sizes:
    logits = outputs(device, 64, 3000)
    probabilities, _order = logits.softmax(-1).sort(descending=True)
    nucleus = probabilities.cumsum(-1) < 0.9
    kept = probabilities[nucleus]
    train(kept, logits)
    return [kept.numel()]


@program
def size_from_a_number(device: str) -> Sizes:
    out = outputs(device, 9000, 16)
    count = int((out[:, 0] > 0).sum())
    buffer = torch.zeros(count, 64, device=device, requires_grad=True)
    train(buffer, out)
    return [count]


@program
def refined_in_two_stages(device: str) -> Sizes:
    out = outputs(device, 12_000, 16)
    first = out[out[:, 0] > 0]
    second = first[first[:, 1] > first[:, 2]]
    train(second, first)
    return [len(first), len(second)]


@program
def valid_pairs_of_a_batch(device: str) -> Sizes:
    embedding = F.normalize(outputs(device, 512, 64), dim=-1)
    similarity = embedding @ embedding.t()
    positive = similarity > 0.3
    train(similarity[positive], similarity[~positive])
    return [int(positive.sum()), int((~positive).sum())]
