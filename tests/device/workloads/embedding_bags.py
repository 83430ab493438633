"""Recommendation: bags of embeddings, their products pair by pair picked out by index, binary cross-entropy, SGD."""

import torch
from torch import nn

bags = nn.ModuleList(nn.EmbeddingBag(20000, 64, mode=mode) for mode in ("sum", "mean", "max", "sum")).cuda()
bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU()).cuda()
top = nn.Sequential(nn.Linear(64 + 10, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
parameters = [*bags.parameters(), *bottom.parameters(), *top.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
rows, columns = torch.tril_indices(5, 5, offset=-1)
for _ in range(3):
    dense, clicked = torch.randn(2048, 13).cuda(), torch.rand(2048).cuda()
    indices = [torch.randint(0, 20000, (8192,)).cuda() for _ in bags]
    offsets = torch.arange(0, 8192, 4).cuda()
    x = bottom(dense)
    features = torch.stack([x, *(bag(index, offsets) for bag, index in zip(bags, indices, strict=True))], 1)
    products = torch.bmm(features, features.transpose(1, 2))[:, rows, columns]
    scores = top(torch.cat([x, products], 1)).squeeze(1)
    nn.functional.binary_cross_entropy_with_logits(scores, clicked).backward()
    optimizer.step()
    optimizer.zero_grad()
