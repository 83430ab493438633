"""Embeddings of many tokens, and what sorts, counts, gathers and scatters: the work around a recommendation model's tables."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, TOKENS, SEGMENTS, CLASSES = 100_000, 128, 16_384, 1024, 500


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.bags = nn.Embedding(ROWS, WIDTH), nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, items: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        found = self.items(items)
        weights = found.square().mean(-1)
        order = torch.sort(weights, descending=True).indices
        ranked = found[order] * weights.cumsum(0)[:, None]
        spread = segments[:, None].expand(-1, WIDTH)
        summed = torch.zeros(SEGMENTS, WIDTH, device=items.device).scatter_add(0, spread, ranked)
        summed = summed.index_add(0, segments, torch.where(weights[:, None] > 1, found, 0.0))
        best = weights.view(SEGMENTS, -1).topk(4, dim=-1)
        places = best.indices[..., None].expand(-1, -1, WIDTH)
        summed = summed + found.view(SEGMENTS, -1, WIDTH).gather(1, places).sum(1)
        bags = self.bags(items.view(SEGMENTS, -1))
        both = torch.cat([summed, bags], 1)
        both = both.masked_fill(both.abs() > 1e4, 0.0)
        return self.head(F.dropout(both, 0.1))


def counted(items: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Numbers without a gradient: unique items, histograms, places, maxima."""
    distinct, counts = torch.unique(items, return_counts=True)
    seen = torch.zeros(ROWS, device=items.device)
    seen.index_put_((items,), torch.ones(TOKENS, device=items.device), accumulate=True)
    places = (seen > 1).nonzero().squeeze(1)
    histogram = torch.bincount(segments, minlength=SEGMENTS)
    edges = torch.searchsorted(histogram.cumsum(0), torch.arange(SEGMENTS, device=items.device))
    lowest = items.view(SEGMENTS, -1).float().kthvalue(3).values
    turned = torch.roll(seen, 7).flip(0).cummax(0).values
    sizes = places.numel() + distinct.numel()
    return counts.float().mean() + sizes + edges.float().std() + lowest.amax() + turned.argmax()


def main() -> None:
    torch.manual_seed(0)
    model = Tables().cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for _ in range(3):
        items = torch.randint(0, ROWS, (TOKENS,)).cuda()
        segments = torch.randint(0, SEGMENTS, (TOKENS,)).cuda()
        labels = torch.randint(0, CLASSES, (SEGMENTS,)).cuda()
        chance = torch.multinomial(torch.ones(SEGMENTS, device="cuda"), SEGMENTS // 2)
        logits = model(items, segments)
        one_hot = F.one_hot(labels[chance], CLASSES).float()
        loss = F.binary_cross_entropy_with_logits(logits[chance], one_hot) + F.nll_loss(logits.log_softmax(1), labels)
        loss = loss + 0 * counted(items, segments)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
