"""Every optimizer of torch that keeps dense state, in turns, on one model; a float16 loss scaled and unscaled; an average of the weights."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
made = [
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1),
    torch.optim.Adam(model.parameters(), amsgrad=True),
    torch.optim.AdamW(model.parameters(), fused=True),
    torch.optim.AdamW(model.parameters(), foreach=False),
    torch.optim.Adafactor(model.parameters()),
    torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True),
    torch.optim.Adagrad(model.parameters()),
    torch.optim.Adadelta(model.parameters()),
    torch.optim.NAdam(model.parameters()),
    torch.optim.RAdam(model.parameters()),
    torch.optim.ASGD(model.parameters()),
    torch.optim.Rprop(model.parameters()),
    torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
]
for optimizer in made:
    for foreach in (True, False):
        x = torch.randn(1024, 512).cuda()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
    average.update_parameters(model)
