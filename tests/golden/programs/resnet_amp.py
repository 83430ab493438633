"""A small ResNet of bottlenecks in channels_last, under autocast to float16 with a GradScaler and SGD."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, CLASSES = 64, 1000


class Bottleneck(nn.Module):
    def __init__(self, given: int, inner: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(given, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.two, self.norm2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.three, self.norm3 = nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner)
        self.past = nn.Sequential(nn.Conv2d(given, 4 * inner, 1, stride, bias=False), nn.BatchNorm2d(4 * inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.one(x)), inplace=True)
        out = F.relu(self.norm2(self.two(out)), inplace=True)
        return F.relu(self.norm3(self.three(out)) + self.past(x), inplace=True)


def resnet() -> nn.Sequential:
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages = (Bottleneck(64, 64, 1), Bottleneck(256, 128, 2), Bottleneck(512, 256, 2), Bottleneck(1024, 512, 2))
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES))


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = resnet().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        images = torch.randn(BATCH, 3, 224, 224).cuda().to(memory_format=torch.channels_last)
        labels = torch.randint(0, CLASSES, (BATCH,)).cuda()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
