"""A classifier of (N, C) batches: batch norm by its channels-last kernels, dropout, Adam, an accuracy read back."""

import torch
from torch import nn

layers: list[nn.Module] = []
for width_in, width_out in ((784, 1024), (1024, 1024), (1024, 333)):
    layers += [nn.Linear(width_in, width_out), nn.BatchNorm1d(width_out), nn.ReLU(), nn.Dropout(0.3)]
model = nn.Sequential(*layers, nn.LayerNorm(333), nn.Linear(333, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
for _ in range(3):
    images, labels = torch.randn(4096, 784).cuda(), torch.randint(0, 10, (4096,)).cuda()
    nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
    optimizer.step()
    optimizer.zero_grad()
    (model(images).argmax(1) == labels).float().mean().item()
