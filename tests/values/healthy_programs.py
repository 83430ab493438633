"""Training programs of many kinds, in the idioms of their fields. Nothing that they do on a GPU depends on a value that nobody knows: they print
losses, count correct answers, remember the best model and stop if a loss is not finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Train = Callable[[], Any]
PROGRAMS: dict[str, Train] = {}
STEPS = 4


def program(function: Train) -> Train:
    PROGRAMS[function.__name__] = function
    return function


def data(*shape: int, classes: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, classes, shape, generator=generator) if classes else torch.randn(shape, generator=generator)


def classifier(width: int = 2048, classes: int = 10) -> nn.Module:
    """Wide enough that its loss is not computed on the host."""
    layers = [nn.Linear(width, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers).cuda()


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / self.count


@program
def mnist() -> None:
    model = classifier()
    optimizer = torch.optim.Adadelta(model.parameters())
    correct, seen, test_loss = 0, 0, 0.0
    for step in range(STEPS):
        x, target = data(64, 2048).cuda(), data(64, classes=10).cuda()
        optimizer.zero_grad()
        output = F.log_softmax(model(x), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        print(f"Train [{step}] loss: {loss.item():.6f}")
        with torch.no_grad():
            output = F.log_softmax(model(x), dim=1)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
            seen += len(x)
    print(f"Average loss {test_loss / seen:.4f}, accuracy {100.0 * correct / seen:.0f} %")


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...]) -> list[torch.Tensor]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


@program
def imagenet() -> None:
    model, best = classifier(classes=1000), 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, top1 = AverageMeter(), AverageMeter()
    for _ in range(STEPS):
        x, target = data(32, 2048).cuda(), data(32, classes=1000).cuda()
        output = model(x)
        loss = F.cross_entropy(output, target)
        acc1, _ = accuracy(output, target, (1, 5))
        losses.update(loss.item(), x.size(0))
        top1.update(acc1[0], x.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        is_best = acc1[0].item() > best
        best = max(acc1[0].item(), best)
        state = {"state_dict": model.state_dict(), "best_acc1": best}
        if is_best:
            print("best", len(state))


@program
def language_model_with_annealing() -> None:
    model = nn.LSTM(256, 512, 2).cuda()
    decoder = nn.Linear(512, 20_000).cuda()
    lr, best, hidden = 20.0, None, None
    optimizer = torch.optim.SGD([*model.parameters(), *decoder.parameters()], lr)
    for step in range(STEPS):
        total = 0.0
        output, hidden = model(data(35, 20, 256).cuda(), hidden)
        hidden = tuple(each.detach() for each in hidden)
        loss = F.cross_entropy(decoder(output).view(-1, 20_000), data(700, classes=20_000).cuda())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        total += loss.item()
        print(f"| step {step} | loss {total:5.2f} | ppl {math.exp(min(total, 20)):8.2f}")
        val_loss = total / (step + 1)
        if not best or val_loss < best:
            best = val_loss
        else:
            lr /= 4.0


@program
def gpt_with_best_checkpoint() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, batch_first=True), 2).cuda()
    head = nn.Linear(512, 30_000).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=True)
    best_val_loss, losses = 1e9, torch.zeros(STEPS)
    for k in range(STEPS):
        logits = head(
            model(
                data(8, 128, 512).cuda(),
                is_causal=True,
                mask=nn.Transformer.generate_square_subsequent_mask(128).cuda(),
            )
        )
        loss = F.cross_entropy(logits.view(-1, 30_000), data(1024, classes=30_000).cuda(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[k] = loss.item()
        out = losses.mean()
        if out < best_val_loss:
            best_val_loss = float(out)
            checkpoint = {"model": model.state_dict(), "best_val_loss": best_val_loss}
            print(f"saving checkpoint with {len(checkpoint)} entries")


@program
def mixed_precision_with_scaler() -> None:
    model, scaler = classifier(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(data(64, 2048).cuda()), data(64, classes=10).cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= before:
            scheduler.step()
        print(norm.item())


@program
def stops_if_the_loss_is_not_finite() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        losses = {"a": model(data(8, 2048).cuda()).pow(2).mean(), "b": model(data(8, 2048).cuda()).abs().mean()}
        total = sum(losses.values())
        value = total.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        print({name: loss.item() for name, loss in losses.items()})


@program
def guards_against_nan_and_explosions() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        output = model(data(8, 2048).cuda())
        loss = output.pow(2).mean()
        if torch.isnan(loss):
            print("nan, skipped")
            continue
        assert not torch.isinf(output).any()
        assert loss < 1e6, "diverged"
        assert torch.isfinite(loss)
        if loss.item() > 1e8:
            raise RuntimeError("diverged")
        if (output > 1e9).any():
            raise RuntimeError("exploded")
        loss.backward()
        if any(torch.isnan(p.grad).any() for p in model.parameters()):
            raise RuntimeError("nan in gradients")
        optimizer.step()
        optimizer.zero_grad()


class EarlyStopping:
    def __init__(self, patience: int) -> None:
        self.patience, self.counter, self.best, self.stop = patience, 0, float("inf"), False

    def __call__(self, loss: float) -> bool:
        if loss < self.best - 1e-4:
            self.best = loss
            self.counter = 0
        else:
            self.counter += 1
            if self.counter >= self.patience:
                self.stop = True
        return self.stop


@program
def stops_early() -> None:
    model, stopping = classifier(), EarlyStopping(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(data(64, 2048).cuda()), data(64, classes=10).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if stopping(loss.item()):
            break


@program
def trains_until_good_enough() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = F.mse_loss(model(data(64, 2048).cuda()), data(64, 10).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 1e-8:
            print("converged")
            break


@program
def learning_rate_on_plateau() -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(STEPS):
        loss = F.mse_loss(model(data(64, 2048).cuda()), data(64, 10).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)


@program
def gan() -> None:
    generator, critic = classifier(256, 2048), classifier(2048, 1)
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    for _ in range(STEPS):
        critic.zero_grad()
        real = critic(data(64, 2048).cuda()).view(-1)
        error = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        error.backward()
        fake = generator(torch.randn(64, 256, device="cuda"))
        other = critic(fake.detach()).view(-1)
        (wrong := F.binary_cross_entropy_with_logits(other, torch.zeros_like(other))).backward()
        first.step()
        generator.zero_grad()
        fooled = critic(fake).view(-1)
        F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled)).backward()
        second.step()
        print(
            f"Loss_D: {(error + wrong).item():.4f} D(x): {real.mean().item():.4f} D(G(z)): {fooled.mean().item():.4f}"
        )


@program
def variational_autoencoder() -> None:
    encoder, decoder = classifier(2048, 64), classifier(32, 2048)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    train_loss = 0.0
    for _ in range(STEPS):
        x = data(128, 2048).sigmoid().cuda()
        mean, log_var = encoder(x).chunk(2, 1)
        posterior = torch.distributions.Normal(mean, (0.5 * log_var).exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        rebuilt = decoder(posterior.rsample())
        loss = (
            F.binary_cross_entropy_with_logits(rebuilt, x) + torch.distributions.kl_divergence(posterior, prior).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss += loss.item()


@program
def policy_gradient() -> None:
    policy = classifier(128, 6)
    optimizer = torch.optim.Adam(policy.parameters())
    for _ in range(STEPS):
        distribution = torch.distributions.Categorical(F.softmax(policy(data(512, 128).cuda()), dim=-1))
        action = distribution.sample()
        reward = torch.as_tensor(np.ones(512, dtype=np.float32)).cuda()
        loss = -(distribution.log_prob(action) * (reward - reward.mean()) / (reward.std() + 1e-8)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def continuous_control() -> None:
    """Scales pass through softplus, additions and clamps, and distributions check that they are positive."""
    actor, critic = classifier(376, 34), classifier(393, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    for _ in range(STEPS):
        state = data(4096, 376).cuda()
        mean, scale = actor(state).chunk(2, -1)
        scale = (F.softplus(scale) + 1e-4).clamp(1e-3, 5.0)
        gaussian = torch.distributions.Normal(mean, scale)
        action = gaussian.rsample()
        squashed = torch.tanh(action)
        log_prob = (gaussian.log_prob(action) - torch.log(1 - squashed.pow(2) + 1e-6)).sum(-1)
        beta = torch.distributions.Beta(F.softplus(mean) + 1, F.softplus(mean) + 1)
        gamma = torch.distributions.Gamma(mean.exp(), scale)
        loss = (
            (log_prob - critic(torch.cat([state, squashed], -1)).squeeze(-1)).mean()
            + beta.entropy().mean()
            + gamma.mean.mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def proximal_policy_optimization() -> None:
    agent = classifier(64, 8)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    observations, target_kl, clipfracs = data(512, 64).cuda(), None, []
    with torch.no_grad():
        before = torch.distributions.Categorical(logits=agent(observations))
        actions = before.sample()
        old = before.log_prob(actions)
    for _ in range(STEPS):
        new = torch.distributions.Categorical(logits=agent(observations)).log_prob(actions)
        ratio = (new - old).exp()
        with torch.no_grad():
            approx_kl = ((ratio - 1) - (new - old)).mean()
            clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
        loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        if target_kl is not None and approx_kl > target_kl:
            break
    print("clipfrac", np.mean(clipfracs))


@program
def deep_q_learning() -> None:
    network, target = classifier(84, 4), classifier(84, 4)
    optimizer = torch.optim.Adam(network.parameters())
    rewards = []
    for _ in range(STEPS):
        with torch.no_grad():
            action = network(data(1, 84).cuda()).max(1).indices.view(1, 1)
        rewards.append(float(np.cos(action.item())))
        chosen = network(data(128, 84).cuda()).gather(1, data(128, 1, classes=4).cuda())
        with torch.no_grad():
            expected = target(data(128, 84).cuda()).max(1).values * 0.99
        loss = F.smooth_l1_loss(chosen, expected.unsqueeze(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(network.parameters(), 100)
        optimizer.step()


@program
def diffusion() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 320, 3, padding=1), nn.GroupNorm(32, 320), nn.SiLU(), nn.Conv2d(320, 4, 3, padding=1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    cumulative = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).cuda()
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(STEPS):
        latents, noise = data(4, 4, 64, 64).cuda(), torch.randn(4, 4, 64, 64, device="cuda")
        when = torch.randint(0, 1000, (4,), device="cuda")
        level = cumulative[when].view(-1, 1, 1, 1)
        weights = torch.stack([level / (1 - level), 5 * torch.ones_like(level)]).min(0)[0] / (level / (1 - level))
        error = F.mse_loss(model(level.sqrt() * latents + (1 - level).sqrt() * noise), noise, reduction="none")
        loss = (error * weights).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.001)
        print({"step_loss": loss.detach().item()})


@program
def segmentation_with_a_confusion_matrix() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 21, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    matrix = torch.zeros(21, 21, dtype=torch.int64, device="cuda")
    for _ in range(STEPS):
        target = data(4, 256, 256, classes=21)
        target[:, :9] = 255
        target = target.cuda()
        output = model(data(4, 3, 256, 256).cuda())
        if (target != 255).sum() == 0:
            continue
        loss = F.cross_entropy(output, target, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.inference_mode():
            flat, found = target.flatten(), output.argmax(1).flatten()
            inside = (flat >= 0) & (flat < 21)
            matrix += torch.bincount(21 * flat[inside].to(torch.int64) + found[inside], minlength=21**2).reshape(21, 21)
    h = matrix.float()
    print(f"IoU {(torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h))).mean().item() * 100:.1f}")


@program
def detection_by_anchors() -> None:
    """Anchors are matched with boxes of the data, so which ones are positive is known; only their scores are not."""
    backbone = nn.Conv2d(3, 256, 3, stride=16, padding=1).cuda()
    scores, boxes = nn.Conv2d(256, 9, 1).cuda(), nn.Conv2d(256, 36, 1).cuda()
    optimizer = torch.optim.SGD([*backbone.parameters(), *scores.parameters(), *boxes.parameters()], 0.01)
    corner = torch.rand(16 * 16 * 9, 2, generator=torch.Generator().manual_seed(0)) * 200
    anchors = torch.cat([corner, corner + 40], 1).cuda()
    for _ in range(STEPS):
        truth = torch.tensor([[10.0, 10, 60, 60], [100, 80, 150, 140]]).cuda()
        size = (
            torch.min(truth[:, None, 2:], anchors[None, :, 2:]) - torch.max(truth[:, None, :2], anchors[None, :, :2])
        ).clamp(0)
        shared = size.prod(-1)
        overlap = shared / (2000.0 + 1600 - shared)
        best = overlap.max(0).values
        positive, negative = torch.where(best >= 0.3)[0], torch.where(best < 0.1)[0]
        count = min(positive.numel() * 3, negative.numel())
        chosen = negative[torch.randperm(negative.numel(), device="cuda")[:count]]
        features = backbone(data(1, 3, 256, 256).cuda())
        logits, deltas = scores(features).flatten(), boxes(features).permute(0, 2, 3, 1).reshape(-1, 4)
        sampled = torch.cat([positive, chosen])
        labels = torch.cat([torch.ones_like(positive), torch.zeros_like(chosen)]).float()
        loss = F.binary_cross_entropy_with_logits(logits[sampled], labels) + F.l1_loss(
            deltas[positive], anchors[positive]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def detection_by_matching() -> None:
    """As in DETR: the host assigns predictions to boxes; as many are assigned as there are boxes."""
    model = classifier(256, 95)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        out = model(data(200, 256).cuda())
        logits, found = out[:, :91], out[:, 91:].sigmoid()
        labels, truth = data(12, classes=91).cuda(), data(12, 4).sigmoid().cuda()
        with torch.no_grad():
            cost = (torch.cdist(found, truth, p=1) - logits.softmax(-1)[:, labels]).cpu()
            rows = torch.from_numpy(np.argsort(cost.numpy(), axis=0)[0]).cuda()
        wanted = torch.full((200,), 90, dtype=torch.int64, device="cuda")
        wanted[rows] = labels
        loss = F.cross_entropy(logits, wanted) + F.l1_loss(found[rows], truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("class_error", 100 - (logits[rows].argmax(-1) == labels).float().mean().item() * 100)


@program
def graph_convolution() -> None:
    first, second = nn.Linear(1433, 4096).cuda(), nn.Linear(4096, 7).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
    x, y, edges = data(2708, 1433).cuda(), data(2708, classes=7).cuda(), data(2, 10_556, classes=2708).cuda()
    train_mask = torch.zeros(2708, dtype=torch.bool)
    train_mask[:140] = True
    train_mask, best = train_mask.cuda(), 0.0
    degree = torch.zeros(2708, device="cuda").scatter_add_(0, edges[1], torch.ones(edges.shape[1], device="cuda"))
    for epoch in range(STEPS):
        hidden = first(x).relu()
        hidden = torch.zeros_like(hidden).index_add_(0, edges[1], hidden[edges[0]]) / degree.clamp(min=1)[:, None]
        out = second(F.dropout(hidden, 0.5))
        loss = F.cross_entropy(out[train_mask], y[train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pred = out.argmax(dim=-1)
        accuracies = [int((pred[mask] == y[mask]).sum()) / int(mask.sum()) for mask in (train_mask, ~train_mask)]
        if accuracies[1] > best:
            best = accuracies[1]
            test = accuracies[0]
            print(epoch, f"{float(loss):.4f}", test)


@program
def contrastive_learning() -> None:
    model = classifier(2048, 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = torch.cat([torch.arange(64) for _ in range(2)])
    same = (labels[:, None] == labels[None]).cuda()
    diagonal = torch.eye(128, dtype=torch.bool).cuda()
    for _ in range(STEPS):
        features = F.normalize(model(data(128, 2048).cuda()), dim=1)
        similarity, pairs = (features @ features.t())[~diagonal].view(128, -1), same[~diagonal].view(128, -1)
        logits = torch.cat([similarity[pairs].view(128, -1), similarity[~pairs].view(128, -1)], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(128, dtype=torch.long).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top1 = (logits.topk(5, 1).indices[:, :1] == 0).float().sum() * 100 / 128
        print(f"Loss: {loss}\tTop1: {top1.item()}")


@program
def packed_recurrent_network() -> None:
    model, head = nn.GRU(300, 512, batch_first=True).cuda(), nn.Linear(512, 2).cuda()
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    for _ in range(STEPS):
        lengths = torch.tensor([50, 41, 30, 7])
        packed = nn.utils.rnn.pack_padded_sequence(data(4, 50, 300).cuda(), lengths, batch_first=True)
        out, last = model(packed)
        _, sizes = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        loss = F.cross_entropy(head(last[-1]), data(4, classes=2).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), sizes.tolist())


@program
def speech_recognition() -> None:
    model = classifier(2048, 29)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        output = F.log_softmax(model(data(120, 8, 2048).cuda()), -1)
        targets, lengths = data(8, 20, classes=28).cuda() + 1, torch.full((8,), 20, dtype=torch.long)
        loss = F.ctc_loss(output, targets, torch.full((8,), 120, dtype=torch.long), lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decoded = torch.argmax(output, dim=2).transpose(0, 1).tolist()
        words = [
            "".join(map(str, (one for place, one in enumerate(row) if one and (not place or one != row[place - 1]))))
            for row in decoded
        ]
        print(loss.item(), words[0][:8])


@program
def translation_with_padding() -> None:
    model, embed = (
        nn.Transformer(512, 8, 2, 2, batch_first=True).cuda(),
        nn.Embedding(10_000, 512, padding_idx=1).cuda(),
    )
    optimizer = torch.optim.Adam([*model.parameters(), *embed.parameters()])
    for _ in range(STEPS):
        source, target = data(16, 40, classes=10_000), data(16, 30, classes=10_000)
        source[:, 30:], target[:, 25:] = 1, 1
        source, target = source.cuda(), target.cuda()
        mask = nn.Transformer.generate_square_subsequent_mask(30, device="cuda")
        out = model(
            embed(source),
            embed(target),
            tgt_mask=mask,
            src_key_padding_mask=source == 1,
            tgt_key_padding_mask=(target == 1).float() * -1e9,
        )
        loss = F.cross_entropy((out @ embed.weight.t()).flatten(0, 1), target.flatten(), ignore_index=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        words = (target != 1).sum().item()
        print("loss per word", loss.item() / words)


@program
def fine_tuning_on_answers() -> None:
    """Labels of -100 are not trained on, and the loss is divided by the number of the others."""
    model, head = nn.TransformerEncoderLayer(512, 8, batch_first=True).cuda(), nn.Linear(512, 32_000).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    for _ in range(STEPS):
        labels = data(4, 256, classes=32_000)
        labels[:, :100] = -100
        labels = labels.cuda()
        logits = head(model(data(4, 256, 512).cuda()))[:, :-1].float()
        wanted = labels[:, 1:]
        items = (wanted != -100).sum().item()
        trained = logits[wanted != -100]
        loss = F.cross_entropy(trained, wanted[wanted != -100], reduction="sum") / items
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        predictions = logits.argmax(-1)
        right = ((predictions == wanted) & (wanted != -100)).sum()
        print(f"token accuracy {(right / items).item():.3f}")


@program
def masked_autoencoder() -> None:
    encoder, decoder = classifier(768, 512), classifier(512, 768)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()])
    for _ in range(STEPS):
        patches = data(64, 196, 768).cuda()
        shuffle = torch.rand(64, 196, device="cuda").argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        kept = patches.gather(1, shuffle[:, :49, None].expand(-1, -1, 768))
        mask = torch.ones(64, 196, device="cuda")
        mask[:, :49] = 0
        mask = mask.gather(1, restore)
        hidden = torch.cat([encoder(kept), torch.zeros(64, 147, 512, device="cuda")], 1)
        rebuilt = decoder(hidden.gather(1, restore[..., None].expand(-1, -1, 512)))
        loss = (((rebuilt - patches) ** 2).mean(-1) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item(), int(mask.sum()))


@program
def distillation_with_accumulation() -> None:
    student, teacher = classifier(), classifier()
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    running, history = 0.0, []
    for step in range(2 * STEPS):
        x = data(32, 2048).cuda()
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        loss = F.kl_div(student(x).log_softmax(-1), soft, reduction="batchmean") / 2
        loss.backward()
        running += loss.item()
        if (step + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            history.append(running)
            if len(history) >= 2 and history[-1] > history[-2]:
                print("the loss rose")
            running = 0.0


@program
def experts_by_dense_dispatch() -> None:
    """Capacity is fixed, so no size depends on where tokens go."""
    gate, experts = nn.Linear(512, 8).cuda(), nn.Parameter(torch.randn(8, 512, 512, device="cuda"))
    optimizer = torch.optim.AdamW([*gate.parameters(), experts])
    for _ in range(STEPS):
        x = data(1024, 512).cuda()
        gates = gate(x).softmax(-1)
        hot = F.one_hot(gates.argmax(-1), 8).float()
        place = (hot.cumsum(0) - 1) * hot
        dispatch = hot.unsqueeze(-1) * F.one_hot(place.long().clamp(max=159), 160)
        inputs = torch.einsum("tec,td->ecd", dispatch, x)
        out = torch.einsum("tec,ecd->td", dispatch, torch.bmm(inputs, experts))
        balance = (hot.mean(0) * gates.mean(0)).sum() * 8
        loss = out.pow(2).mean() + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(balance.item(), hot.sum(0).tolist())


@program
def metrics_of_a_library() -> None:
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    right, area, mean = MulticlassAccuracy(10).cuda(), MulticlassAUROC(10, thresholds=50).cuda(), MeanMetric().cuda()
    for _ in range(STEPS):
        logits, target = model(data(64, 2048).cuda()), data(64, classes=10).cuda()
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.update(logits, target)
        area.update(logits.softmax(-1), target)
        mean.update(loss.detach())
    print(right.compute().item(), area.compute().item(), mean.compute())


@program
def gradient_penalty() -> None:
    critic = classifier(2048, 1)
    optimizer = torch.optim.Adam(critic.parameters())
    for _ in range(STEPS):
        mixed = data(32, 2048).cuda().requires_grad_()
        gradients = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
        penalty = ((gradients.norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        norms = [p.grad.norm() for p in critic.parameters() if p.grad is not None]
        print(torch.stack(norms).norm().item(), max(norms).item())


def transformers_model(name: str, **inputs: torch.Tensor) -> None:
    import transformers

    tiny = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    configs = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_layer=2, n_embd=512, n_head=8),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(**tiny, num_key_value_heads=2),
        "BertForSequenceClassification": lambda: transformers.BertConfig(**tiny),
        "ViTForImageClassification": lambda: transformers.ViTConfig(**tiny),
        "T5ForConditionalGeneration": lambda: transformers.T5Config(
            d_model=512, num_layers=2, decoder_start_token_id=0
        ),
    }
    model = getattr(transformers, name)(configs[name]()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        loss = model(**{key: value.cuda() for key, value in inputs.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


@program
def transformers_llama_with_padding() -> None:
    ids, mask = data(4, 128, classes=30_000), torch.ones(4, 128, dtype=torch.long)
    mask[1, 100:] = 0
    transformers_model("LlamaForCausalLM", input_ids=ids, labels=ids, attention_mask=mask)


@program
def transformers_bert() -> None:
    mask = torch.ones(8, 128, dtype=torch.long)
    mask[3:, 50:] = 0
    transformers_model(
        "BertForSequenceClassification",
        input_ids=data(8, 128, classes=30_000),
        attention_mask=mask,
        labels=data(8, classes=2),
    )


@program
def transformers_vit() -> None:
    transformers_model("ViTForImageClassification", pixel_values=data(4, 3, 224, 224), labels=data(4, classes=2))


@program
def transformers_t5() -> None:
    transformers_model(
        "T5ForConditionalGeneration", input_ids=data(4, 64, classes=30_000), labels=data(4, 32, classes=30_000)
    )


@program
def lightning_module() -> None:
    import lightning.pytorch as pl
    from maya_lightning import MayaEmulator  # noqa: F401  (its patches are installed, as under `maya run`)

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data(256, 2048), data(256, classes=10)), 64)
    pl.Trainer(max_epochs=1, accelerator="gpu", devices=1, logger=False, enable_checkpointing=False).fit(Lit(), loader)
