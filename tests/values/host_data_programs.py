"""Programs that read what they computed from data of the host. Each returns numbers, and is run twice: really, on the CPU, and on the emulated
device, which has to return the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Program = Callable[[str], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@program
def segmentation_labels(device: str) -> Any:
    """4.2 million labels, of which some are to be ignored: more than were ever remembered one by one."""
    labels = torch.randint(0, 19, (16, 512, 512), generator=random())
    labels[:, :8] = 255
    labels = labels.to(device)
    valid = (labels != 255).sum()
    return valid.item(), torch.unique(labels).numel(), labels.max().item(), bool(valid > 0)


@program
def padding_of_two_million_tokens(device: str) -> Any:
    lengths = torch.randint(1, 1025, (2048,), generator=random(1))
    mask = (torch.arange(1024)[None] < lengths[:, None]).to(device)
    kept = torch.zeros(2048, 1024, 4, device=device)[mask]
    return mask.sum().item(), kept.shape, mask.sum(1).max().item(), (~mask).any(0).sum().item()


@program
def graph_of_many_edges(device: str) -> Any:
    edges = torch.randint(0, 50_000, (2, 1_200_000), generator=random(2)).to(device)
    nodes = int(edges.max()) + 1
    degree = torch.zeros(nodes, dtype=torch.long, device=device).scatter_add_(0, edges[1], torch.ones_like(edges[1]))
    return nodes, degree.max().item(), (degree == 0).sum().item(), torch.unique(edges[0]).numel()


@program
def self_loops_removed(device: str) -> Any:
    edges = torch.randint(0, 300, (2, 200_000), generator=random(3)).to(device)
    kept = edges[:, edges[0] != edges[1]]
    return kept.shape, kept.sum().item()


@program
def neighbours_counted_by_bincount(device: str) -> Any:
    target = torch.randint(0, 1000, (3_000_000,), generator=random(4)).to(device)
    counts = torch.bincount(target)
    return counts.numel(), counts.max().item(), counts.argmax().item(), counts[:4].tolist()


@program
def routing_to_many_experts(device: str) -> Any:
    """4,096 tokens and 128 experts, chosen by the host."""
    scores = torch.rand(4096, 128, generator=random(5)).to(device)
    chosen = scores.topk(8, dim=-1).indices
    per_expert = torch.zeros(128, dtype=torch.long, device=device).scatter_add_(
        0, chosen.flatten(), torch.ones(chosen.numel(), dtype=torch.long, device=device)
    )
    splits = per_expert.tolist()
    parts = torch.empty(chosen.numel(), 4, device=device).split(splits)
    return sum(splits), max(splits), [len(part) for part in parts]


@program
def tokens_sorted_by_expert(device: str) -> Any:
    expert = torch.randint(0, 64, (500_000,), generator=random(6)).to(device)
    order = expert.argsort(stable=True)
    ends = expert[order].bincount(minlength=64).cumsum(0)
    return ends[-1].item(), order[:3].tolist(), order[-3:].tolist(), ends[31].item()


@program
def voxels_of_a_point_cloud(device: str) -> Any:
    points = torch.rand(400_000, 3, generator=random(7)).to(device)
    cells, inverse, counts = torch.unique(
        (points / 0.05).floor().long(), dim=0, return_inverse=True, return_counts=True
    )
    return cells.shape, inverse.max().item(), counts.max().item(), counts.sum().item()


@program
def class_weights_from_counts(device: str) -> Any:
    labels = torch.randint(0, 10, (60_000,), generator=random(8)).to(device)
    counts = torch.bincount(labels, minlength=10).float()
    weights = counts.sum() / (10 * counts)
    return [round(one, 5) for one in weights.tolist()], weights.argmin().item()


@program
def cumulative_lengths_of_packed_sequences(device: str) -> Any:
    lengths = torch.randint(16, 2048, (512,), generator=random(9), dtype=torch.int32).to(device)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    packed = torch.empty(int(ends[-1]), 8, device=device)
    return packed.shape, int(lengths.max()), ends[100].item()


@program
def batch_cut_to_its_longest_sample(device: str) -> Any:
    ids = torch.zeros(32, 512, dtype=torch.long)
    for row, length in enumerate(torch.randint(5, 400, (32,), generator=random(10)).tolist()):
        ids[row, :length] = 7
    ids = ids.to(device)
    longest = int((ids != 0).sum(1).max())
    return ids[:, :longest].shape


@program
def spans_masked_for_pretraining(device: str) -> Any:
    ids = torch.randint(5, 30_000, (64, 512), generator=random(11)).to(device)
    masked = (torch.rand(64, 512, generator=random(12)) < 0.15).to(device) & (ids > 100)
    labels = torch.where(masked, ids, torch.full_like(ids, -100))
    return masked.sum().item(), (labels != -100).sum().item(), labels[labels != -100].shape


@program
def boxes_matched_to_anchors(device: str) -> Any:
    boxes = torch.tensor([[10.0, 10, 60, 60], [30, 30, 90, 80], [0, 50, 20, 99]]).to(device)
    corner = torch.rand(5000, 2, generator=random(13)) * 80
    anchors = torch.cat([corner, corner + 20], 1).to(device)
    size = (
        torch.minimum(boxes[:, None, 2:], anchors[None, :, 2:])
        - torch.maximum(boxes[:, None, :2], anchors[None, :, :2])
    ).clamp(0)
    shared = size[..., 0] * size[..., 1]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    overlap = shared / (area[:, None] + 400 - shared)
    best, which = overlap.max(0)
    positive = (best > 0.1).nonzero().squeeze(1)
    return positive.numel(), which[positive].bincount(minlength=3).tolist()


@program
def nearest_centres(device: str) -> Any:
    points, centres = (
        torch.rand(20_000, 8, generator=random(14)).to(device),
        torch.rand(16, 8, generator=random(15)).to(device),
    )
    nearest = ((points[:, None] - centres) ** 2).sum(-1).argmin(1)
    return torch.bincount(nearest, minlength=16).tolist()


@program
def values_above_a_quantile(device: str) -> Any:
    values = torch.rand(300_000, generator=random(16)).to(device)
    limit = values.sort().values[int(0.9 * len(values))]
    return (values > limit).sum().item(), round(limit.item(), 6)


@program
def runs_of_equal_numbers(device: str) -> Any:
    numbers = torch.randint(0, 3, (1_500_000,), generator=random(17)).to(device)
    values, counts = torch.unique_consecutive(numbers, return_counts=True)
    return values.numel(), counts.max().item()


@program
def written_through_views(device: str) -> Any:
    table = torch.zeros(2000, 1000, dtype=torch.long).to(device)
    table[::2] = 3
    table[:, 10:20].add_(1)
    table.view(-1)[5] = 100
    table.t()[7] -= 2
    return table.sum().item(), table.max().item(), (table == 4).sum().item()


@program
def written_by_indices(device: str) -> Any:
    table = torch.arange(2_000_000).to(device)
    table[torch.tensor([1, 5, 9]).to(device)] = -1
    table[table % 1000 == 0] = -2
    table.index_fill_(0, torch.tensor([2, 3]).to(device), -3)
    return (table == -1).sum().item(), (table == -2).sum().item(), table[:10].tolist()


@program
def changed_in_place_after_a_copy(device: str) -> Any:
    original = torch.arange(1_500_000).to(device)
    copy = original.clone()
    original.mul_(2)
    copy[0] = 5
    return original.sum().item(), copy.sum().item()


@program
def swapped_and_joined(device: str) -> Any:
    first, second = torch.arange(1_200_000).to(device), torch.arange(5).to(device)
    joined = torch.cat([second, first.flip(0), second.roll(2)])
    stacked = torch.stack([second, second + 10])
    return joined[3:8].tolist(), joined[-5:].tolist(), joined.numel(), stacked.t().contiguous().view(-1).tolist()


@program
def images_of_bytes(device: str) -> Any:
    images = torch.randint(0, 256, (64, 3, 224, 224), generator=random(18), dtype=torch.uint8).to(device)
    return images.float().mean().round(decimals=2).item(), images.sum().item(), (images > 250).sum().item()


@program
def numpy_arrays(device: str) -> Any:
    array = np.random.default_rng(0).integers(0, 1000, 2_000_000)
    tensor = torch.from_numpy(array).to(device)
    return tensor.sum().item() == int(array.sum()), torch.unique(tensor).numel(), tensor[tensor > 990].shape


@program
def pinned_and_copied_without_blocking(device: str) -> Any:
    labels = torch.randint(0, 7, (2_500_000,), generator=random(19))
    if device == "cuda":
        labels = labels.pin_memory()
    labels = labels.to(device, non_blocking=True)
    return torch.bincount(labels).tolist()


@program
def found_by_bisection(device: str) -> Any:
    edges = torch.linspace(0, 1, 33).to(device)
    bins = torch.bucketize(torch.rand(100_000, generator=random(20)).to(device), edges)
    return torch.bincount(bins, minlength=34).tolist()[1:5], torch.searchsorted(
        edges, torch.tensor([0.5]).to(device)
    ).item()


@program
def members_of_a_set(device: str) -> Any:
    ids = torch.randint(0, 10_000, (1_300_000,), generator=random(21)).to(device)
    wanted = torch.arange(0, 10_000, 37).to(device)
    return torch.isin(ids, wanted).sum().item()


@program
def repeated_by_counts(device: str) -> Any:
    counts = torch.randint(0, 9, (4000,), generator=random(22)).to(device)
    owner = torch.repeat_interleave(torch.arange(4000).to(device), counts)
    return owner.shape, owner[-1].item(), owner.bincount(minlength=4000).max().item()


@program
def triangles_and_diagonals(device: str) -> Any:
    mask = torch.ones(1500, 1500, dtype=torch.bool).to(device).tril()
    return mask.sum().item(), mask[~mask].shape, mask.diagonal().all().item()


@program
def block_mask_of_documents(device: str) -> Any:
    """What a block mask of flex attention is made of: which blocks have a pair of tokens of one document."""
    document = torch.arange(16).repeat_interleave(128).to(device)
    pairs = (document[:, None] == document[None, :]) & (torch.arange(2048)[:, None] >= torch.arange(2048)[None]).to(
        device
    )
    blocks = pairs.view(16, 128, 16, 128).permute(0, 2, 1, 3).sum((-1, -2)) > 0
    return blocks.sum().item(), blocks.sum(-1).tolist(), blocks.nonzero().shape


@program
def numbers_of_half_precision(device: str) -> Any:
    values = torch.arange(0, 2048).half().to(device)
    return values.max().item(), (values > 1000).sum().item(), values.bfloat16()[[3, 300]].tolist()


@program
def bits(device: str) -> Any:
    numbers = torch.arange(1 << 21, dtype=torch.int32).to(device)
    return (numbers & 1).sum().item(), (numbers >> 20).max().item(), (numbers ^ numbers).any().item()


@program
def complex_numbers(device: str) -> Any:
    wave = torch.cos(torch.arange(1024) * (2 * torch.pi * 50 / 1024)).to(device)
    power = torch.fft.rfft(wave).abs()
    return power.argmax().item(), (power > 100).sum().item()


@program
def loss_of_a_small_known_model(device: str) -> Any:
    weight = torch.linspace(-1, 1, 12).view(4, 3).to(device).requires_grad_()
    loss = F.cross_entropy(torch.ones(2, 3).to(device) @ weight.t(), torch.tensor([1, 3]).to(device))
    loss.backward()
    return round(loss.item(), 5), [round(one, 5) for one in weight.grad[0].tolist()], bool(loss < 10), loss.item() < 10


@program
def converged_after_some_iterations(device: str) -> Any:
    """Newton's method for a square root: the number of iterations hangs on values."""
    x, wanted = torch.tensor(100.0).to(device), torch.tensor(2.0).to(device)
    iterations = 0
    while (x * x - wanted).abs() > 1e-5:
        x = (x + wanted / x) / 2
        iterations += 1
    return iterations, round(x.item(), 4)


@program
def loop_until_everyone_has_ended(device: str) -> Any:
    left, rounds = torch.randint(1, 40, (256,), generator=random(23)).to(device), 0
    while left.any():
        left = (left - 1).clamp(min=0)
        rounds += 1
    return rounds


@program
def connected_components(device: str) -> Any:
    edges = torch.randint(0, 500, (2, 300), generator=random(24)).to(device)
    label, rounds = torch.arange(500).to(device), 0
    while True:
        rounds += 1
        least = label.scatter_reduce(0, edges[0], label[edges[1]], "amin").scatter_reduce(
            0, edges[1], label[edges[0]], "amin"
        )
        if torch.equal(least, label):
            break
        label = least
    return rounds, torch.unique(label).numel()


@program
def scattered_maxima(device: str) -> Any:
    source = torch.randint(0, 10**6, (50_000,), generator=random(25)).to(device)
    where = torch.randint(0, 64, (50_000,), generator=random(26)).to(device)
    most = torch.zeros(64, dtype=torch.long, device=device).scatter_reduce_(0, where, source, "amax")
    return most.min().item(), most.argmax().item()


@program
def one_hot_counts(device: str) -> Any:
    hot = F.one_hot(torch.randint(0, 12, (200_000,), generator=random(27)).to(device), 12)
    return hot.sum(0).tolist(), hot.shape


@program
def depths_within_limits(device: str) -> Any:
    depth = (torch.rand(8, 480, 640, generator=random(28)) * 100 - 5).to(device)
    valid = (depth > 0) & (depth < 80) & torch.isfinite(depth)
    return valid.sum().item(), depth[valid].shape, valid.flatten(1).sum(1).tolist()


@program
def buckets_of_relative_positions(device: str) -> Any:
    distance = torch.arange(600)[None] - torch.arange(600)[:, None]
    bucket = distance.to(device).abs().clamp(max=127) // 8
    return bucket.unique().tolist(), (bucket == 15).sum().item()


@program
def assertions_about_data(device: str) -> Any:
    ids = torch.randint(0, 32_000, (1_100_000,), generator=random(29)).to(device)
    assert ids.max() < 32_000 and ids.min() >= 0
    if (ids >= 32_000).any():
        raise ValueError("ids out of range")
    return ids.numel()


@program
def teacher_forcing_by_length(device: str) -> Any:
    lengths = torch.tensor([5, 3, 9, 1]).to(device)
    order = lengths.argsort(descending=True)
    active = [int((lengths[order] > step).sum()) for step in range(int(lengths.max()))]
    return active, order.tolist()
