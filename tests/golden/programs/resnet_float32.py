"""A small ResNet of basic blocks in float32 and NCHW, with SGD one parameter at a time."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES = 32, 1000


class Block(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(given, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.two, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, groups=1, bias=False), nn.BatchNorm2d(width)
        self.past = nn.Conv2d(given, width, 1, stride) if given != width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.one(x)))
        return F.relu(self.norm2(self.two(out)) + self.past(x))


def resnet() -> nn.Sequential:
    stem = (nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    depthwise = nn.Conv2d(256, 256, 3, 1, 1, groups=256)
    stages = (Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2), depthwise, Block(256, 512, 2))
    return nn.Sequential(*stem, *stages, nn.AvgPool2d(7), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, CLASSES))


def main() -> None:
    torch.manual_seed(0)
    model = resnet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for _ in range(3):
        images = torch.randn(BATCH, 3, 224, 224).cuda()
        labels = torch.randint(0, CLASSES, (BATCH,)).cuda()
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
