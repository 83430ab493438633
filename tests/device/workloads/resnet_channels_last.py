"""Residual blocks in channels_last under autocast, with SGD and momentum."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    Block(64, 64, 1), Block(64, 128, 2), nn.Conv2d(128, 128, 3, padding=1, groups=128),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000),
).to("cuda", memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
for _ in range(3):
    images = torch.randn(16, 3, 160, 160).to("cuda", memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (16,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
