"""Losses that reduce, sorting, top-k, prefix sums, gathered and scattered rows, and their gradients."""

import torch
from torch.nn import functional as F

scores = torch.randn(512, 6000).cuda().requires_grad_()
targets = torch.rand(512, 6000).cuda()
labels = torch.randint(0, 6000, (512,)).cuda()
pixels, classes = torch.randn(4, 21, 65, 65).cuda().requires_grad_(), torch.randint(0, 21, (4, 65, 65)).cuda()
for _ in range(3):
    total = F.mse_loss(scores, targets) + F.smooth_l1_loss(scores, targets) + F.huber_loss(scores, targets)
    total = (
        total
        + F.binary_cross_entropy(scores.sigmoid(), targets)
        + F.kl_div(F.log_softmax(scores, -1), targets, reduction="batchmean")
    )
    total = total + F.cross_entropy(scores, labels, reduction="none").mean() + F.cross_entropy(pixels, classes)
    total = total + F.logsigmoid(scores).mean() + scores.t().softmax(-1).max() + scores.norm(dim=0).sum() + scores.std()
    ordered, order = scores.sort(-1)
    best, places = scores[:, :64].topk(2)
    total = (
        total
        + ordered.cumsum(-1).mean()
        + best.sum()
        + scores[labels % 512].mean()
        + scores.gather(1, order[:, :3]).mean()
    )
    total = (
        total + torch.zeros_like(scores).index_add(0, labels % 512, scores).mean() + scores.view(-1).sort()[0].mean()
    )
    total.backward()
    scores.grad = pixels.grad = None
    torch.randperm(100_000, device="cuda")
