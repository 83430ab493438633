"""ImageNet training of NVIDIA's DeepLearningExamples: ResNet-50 v1.5, ResNeXt-101, SE-ResNeXt-101 and EfficientNet, on one
GPU or under DDP; float32, or float16 autocast in channels-last. Images come from the host; decoding them is skipped.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: nn.Module | None = None
) -> nn.Sequential:
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([act] if act is not None else []))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int, act: nn.Module) -> None:
        super().__init__()
        self.squeeze, self.act, self.expand = nn.Linear(channels, squeezed), act, nn.Linear(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(self.act(self.squeeze(x.mean([2, 3])))))
        return x * scale[:, :, None, None]


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int, excite: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, width, 1, act=nn.ReLU(inplace=True)),
            conv(width, width, 3, stride, groups, act=nn.ReLU(inplace=True)),
            conv(width, outputs, 1),
        )
        self.excite = SqueezeExcite(outputs, outputs // 16, nn.ReLU(inplace=True)) if excite else None
        self.shortcut = conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.shortcut is None else self.shortcut(x)
        out = self.body(x)
        return self.relu((out if self.excite is None else self.excite(out)) + residual)


def resnet(layers: list[int], groups: int, width: int, excite: bool) -> nn.Module:
    """`width` is that of the 3 x 3 convolution in the first stage."""
    stages: list[nn.Module] = [conv(3, 64, 7, 2, act=nn.ReLU(inplace=True)), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(layers):
        outputs = 256 * 2**stage
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            stages.append(Bottleneck(inputs, width * 2**stage, outputs, stride, groups, excite))
            inputs = outputs
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class InvertedResidual(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, wide: bool, drop: float
    ) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = [conv(inputs, hidden, 1, act=nn.SiLU(inplace=True))] if expansion > 1 else []
        layers.append(conv(hidden, hidden, kernel, stride, hidden, act=nn.SiLU(inplace=True)))
        layers.append(SqueezeExcite(hidden, max(1, (hidden if wide else inputs) // 4), nn.SiLU(inplace=True)))
        layers.append(conv(hidden, outputs, 1))
        self.body = nn.Sequential(*layers)
        self.residual, self.drop = stride == 1 and inputs == outputs, drop

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if not self.residual:
            return out
        kept = torch.rand(len(x), 1, 1, 1, device=x.device, dtype=out.dtype) >= self.drop  # stochastic depth
        return out / (1 - self.drop) * kept + x


def efficientnet(width: float, depth: float, wide: bool, dropout: float) -> nn.Module:
    def channels(count: int) -> int:
        rounded = max(8, int(count * width + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * count * width else rounded

    kernels, strides, expansions = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6)
    repeats = [math.ceil(count * depth) for count in (1, 2, 2, 3, 3, 4, 1)]
    stages: list[nn.Module] = [conv(3, channels(32), 3, 2, act=nn.SiLU(inplace=True))]
    inputs, block = channels(32), 0
    for stage, outputs in enumerate(map(channels, (16, 24, 40, 80, 112, 192, 320))):
        for index in range(repeats[stage]):
            stride, drop = strides[stage] if index == 0 else 1, 0.2 * block / sum(repeats)
            stages.append(InvertedResidual(inputs, outputs, kernels[stage], stride, expansions[stage], wide, drop))
            inputs, block = outputs, block + 1
    features = channels(1280)
    stages.append(conv(inputs, features, 1, act=nn.SiLU(inplace=True)))
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, 1000))


MODELS = {
    "resnet50": lambda: resnet([3, 4, 6, 3], 1, 64, False),
    "resnext101-32x4d": lambda: resnet([3, 4, 23, 3], 32, 128, False),
    "se-resnext101-32x4d": lambda: resnet([3, 4, 23, 3], 32, 128, True),
    "efficientnet-b0": lambda: efficientnet(1.0, 1.0, False, 0.2),
    "efficientnet-widese-b0": lambda: efficientnet(1.0, 1.0, True, 0.2),
    "efficientnet-b4": lambda: efficientnet(1.4, 1.8, False, 0.4),
    "efficientnet-widese-b4": lambda: efficientnet(1.4, 1.8, True, 0.4),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    for name in ("batch", "accumulate", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    memory_format = torch.channels_last if args.amp else torch.contiguous_format
    model: nn.Module = MODELS[args.model]().cuda()
    model = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    if "LOCAL_RANK" in os.environ:
        device = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        model = DistributedDataParallel(model, device_ids=[device])
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer: torch.optim.Optimizer
    if args.model.startswith("efficientnet"):
        optimizer = torch.optim.RMSprop(model.parameters(), 0.08, alpha=0.9, eps=0.01, weight_decay=1e-5, momentum=0.9)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.875, weight_decay=3e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    images = torch.zeros(args.batch, 3, args.size, args.size, dtype=torch.uint8).pin_memory()
    labels = torch.randint(0, 1000, (args.batch,)).pin_memory()
    mean, deviation = (torch.rand(1, 3, 1, 1, device="cuda") for _ in range(2))
    while True:
        for _ in range(args.accumulate):
            batch = images.cuda(non_blocking=True).to(memory_format=memory_format).float().sub_(mean).div_(deviation)
            target = labels.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.float16, enabled=args.amp):
                loss = loss_of(model(batch), target) / args.accumulate
            scaler.scale(loss).backward()
            torch.cuda.synchronize()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
