"""A small U-Net: group norm, SiLU, resampling both ways, concatenated skips (whose gradients are not contiguous), mean squared error."""

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss


def block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 3, 1)
        self.down, self.deeper, self.middle = block(64, 128), block(128, 256), block(256, 256)
        self.up, self.last = block(512, 128), block(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down(self.enter(x))
        second = self.deeper(avg_pool2d(first, 2))
        middle = self.middle(avg_pool2d(second, 2))
        up = self.up(torch.cat([interpolate(middle, scale_factor=2.0, mode="nearest"), second], 1))
        return self.leave(self.last(torch.cat([interpolate(up, scale_factor=2.0, mode="bilinear"), first], 1)))


model = UNet().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    images = torch.randn(8, 3, 64, 64).cuda()
    mse_loss(model(images), images).backward()
    optimizer.step()
    optimizer.zero_grad()
