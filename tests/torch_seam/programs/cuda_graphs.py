"""A decoder whose forward and backward are CUDA graphs, in a pool that they share; the optimizer runs between them."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, CONTEXT, BATCH, CLASSES = 1024, 256, 8, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(Block(), Block()).cuda()
    head = nn.Linear(WIDTH, CLASSES).cuda()
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3, capturable=True)
    x = torch.randn(BATCH, CONTEXT, WIDTH, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(body, (x,))
    for _ in range(3):
        batch = torch.randn(BATCH, CONTEXT, WIDTH).cuda().requires_grad_()
        labels = torch.randint(CLASSES, (BATCH * CONTEXT,)).cuda()
        loss = F.cross_entropy(head(graphed(batch)).flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


if __name__ == "__main__":
    main()
