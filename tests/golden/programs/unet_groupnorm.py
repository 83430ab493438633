"""A U-Net of a diffusion model: convolutions, group norms, attention at its lowest level, upsampling, in autocast to float16."""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, SIZE, WIDTHS, TIME = 8, 64, (128, 256, 512), 512


class Block(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, given), nn.GroupNorm(32, width)
        self.one, self.two = nn.Conv2d(given, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(TIME, width)
        self.past = nn.Conv2d(given, width, 1) if given != width else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        out = self.one(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.two(F.silu(self.norm2(out))) + self.past(x)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, 8, -1)).flatten(4).transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(-1, -2).reshape_as(x))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one, two, three = WIDTHS
        self.time = nn.Sequential(nn.Linear(128, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.given = nn.Conv2d(4, one, 3, padding=1)
        self.blocks_down = nn.ModuleList((Block(one, one), Block(one, two), Block(two, three)))
        self.down = nn.ModuleList((nn.Conv2d(one, one, 3, 2, 1), nn.Conv2d(two, two, 3, 2, 1)))
        self.attention = Attention(three)
        self.up = nn.ConvTranspose2d(three, two, 2, 2)
        self.blocks_up = nn.ModuleList((Block(2 * two, two), Block(two + one, one)))
        self.norm, self.out = nn.GroupNorm(32, one), nn.Conv2d(one, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None].float() * torch.exp(torch.linspace(0, -9, 64, device=x.device))
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        high = self.blocks_down[0](self.given(x), time)
        middle = self.blocks_down[1](self.down[0](high), time)
        low = self.attention(self.blocks_down[2](self.down[1](middle), time))
        x = self.blocks_up[0](torch.cat([self.up(low), middle], 1), time)
        x = self.blocks_up[1](torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), high], 1), time)
        return self.out(F.silu(self.norm(x)))


def main() -> None:
    torch.manual_seed(0)
    model = Unet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        clean, noise = torch.randn(BATCH, 4, SIZE, SIZE).cuda(), torch.randn(BATCH, 4, SIZE, SIZE, device="cuda")
        times = torch.randint(0, 1000, (BATCH,), device="cuda")
        share = (times / 1000).view(-1, 1, 1, 1)
        with torch.autocast("cuda", torch.float16):
            loss = F.mse_loss(model(clean * (1 - share) + noise * share, times), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
