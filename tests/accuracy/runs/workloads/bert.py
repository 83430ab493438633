"""BERT-large of NVIDIA's DeepLearningExamples, on one GPU or under DDP: pretraining (masked tokens and next sentence, with
gradient accumulation) and fine-tuning for SQuAD; float32, or a float16 model with float32 copies in the optimizer.
"""

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (part(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_width) + mask
        attended = torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)
        attended = attended.transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm1(self.dropout(self.out(attended)) + x)
        return self.norm2(self.dropout(self.down(F.gelu(self.up(x)))) + x)


class Bert(nn.Module):
    """Answers with a loss: in float16 too, losses are in float32."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, self.task = args.width, args.task
        vocabulary = -(-args.vocabulary // 8) * 8  # Tensor Cores want multiples of 8
        self.tokens, self.positions, self.kinds = (nn.Embedding(rows, width) for rows in (vocabulary, 512, 2))
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(width, args.heads) for _ in range(args.layers))
        if self.task == "squad":
            self.answer = nn.Linear(width, 2)
            return
        self.pooler, self.next_sentence = nn.Linear(width, width), nn.Linear(width, 2)
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, ids: Tensor, kinds: Tensor, attended: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
        mask = (1.0 - attended[:, None, None, :].to(self.tokens.weight.dtype)) * -10000.0
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)
        x = self.dropout(self.norm(self.tokens(ids) + self.positions(places) + self.kinds(kinds)))
        for layer in self.layers:
            x = layer(x, mask)
        if self.task == "squad":
            start, end = self.answer(x).float().unbind(-1)
            return (F.cross_entropy(start, labels[:, 0]) + F.cross_entropy(end, labels[:, 1])) / 2
        masked = labels.flatten().nonzero().squeeze(-1)
        chosen = x.flatten(0, 1).index_select(0, masked)
        chosen = self.transform_norm(F.gelu(self.transform(chosen)))
        scores = F.linear(chosen, self.tokens.weight) + self.bias
        following = self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        words = F.cross_entropy(scores.float(), labels.flatten().index_select(0, masked))
        return words + F.cross_entropy(following.float(), classes)


class MasterWeights:
    """Adam on float32 copies of a float16 model, its gradients unscaled on the way; on the model itself in float32."""

    def __init__(self, model: nn.Module, half: bool) -> None:
        self.parameters, self.half = list(model.parameters()), half
        masters = [nn.Parameter(each.detach().float()) for each in self.parameters] if half else self.parameters
        self.masters = masters
        self.adam = torch.optim.AdamW(masters, lr=6e-3, weight_decay=0.01, fused=True)

    def step(self) -> None:
        if self.half:
            grads = [each.grad.float() for each in self.parameters if each.grad is not None]
            torch._foreach_mul_(grads, 1.0 / 65536)
            for master, grad in zip(self.masters, grads, strict=True):
                master.grad = grad
        self.adam.step()
        if self.half:
            torch._foreach_copy_([each.data for each in self.parameters], [each.data for each in self.masters])
        for each in (*self.parameters, *self.masters):
            each.grad = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=["pretrain", "squad"], required=True)
    for name in ("layers", "width", "heads", "vocabulary", "context", "micro-batch", "accumulate"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--half", action="store_true")
    args = parser.parse_args()

    distributed = "LOCAL_RANK" in os.environ
    if distributed:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    with torch.device("cuda"):
        model = Bert(args)
    if args.half:
        model.half()
    optimizer = MasterWeights(model, args.half)
    trained = DistributedDataParallel(model, gradient_as_bucket_view=True) if distributed else model

    shape = (args.micro_batch, args.context)
    ids, kinds, attended = (torch.ones(shape, dtype=torch.int64).pin_memory() for _ in range(3))
    labels = torch.zeros(shape, dtype=torch.int64)
    labels[:, 1 : 1 + round(0.15 * args.context)] = 1  # the masked ones; of SQuAD: where the answer begins and ends
    classes = torch.zeros(args.micro_batch, dtype=torch.int64)
    while True:
        for index in range(args.accumulate):
            last = index == args.accumulate - 1
            batch = [each.to("cuda", non_blocking=True) for each in (ids, kinds, attended, labels, classes)]
            with trained.no_sync() if isinstance(trained, DistributedDataParallel) and not last else nullcontext():
                loss = trained(*batch) / args.accumulate
                (loss * 65536 if args.half else loss).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
