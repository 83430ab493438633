"""InternLM under InternEvo's pipeline parallelism (1F1B, layers dealt out evenly), with its Hybrid Zero optimizer."""

import argparse
import os

import torch
import torch.distributed as dist
from fused_kernels import RmsNorm
from internevo import HybridZero, Layer, loss_of
from pipeline import Neighbours, one_forward_one_backward
from tensor_parallel import ColumnEmbedding, ColumnLinear, Group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh


class Stage(nn.Module):
    def __init__(self, args: argparse.Namespace, tp: Group, place: int) -> None:
        super().__init__()
        spare = args.pp - args.layers % args.pp  # stages before have one less where layers do not divide
        layers = args.layers // args.pp + (place >= spare)
        self.embedding = ColumnEmbedding(args.vocabulary, args.width, tp) if place == 0 else None
        self.layers = nn.ModuleList(Layer(args, tp) for _ in range(layers))
        last = place == args.pp - 1
        self.norm = RmsNorm(args.width) if last else None
        self.head = ColumnLinear(args.width, args.vocabulary, tp, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x.float()))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "inner", "vocabulary", "context", "micro-batch", "accumulate", "pp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    replicas = dist.get_world_size() // args.pp
    mesh = init_device_mesh("cuda", (args.pp, replicas, 1), mesh_dim_names=("pp", "dp", "tp"))
    dp, tp, place = mesh["dp"].get_group(), mesh["tp"].get_group(), mesh["pp"].get_local_rank()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        stage = Stage(args, tp, place)
    torch.set_default_dtype(torch.float32)
    optimizer = HybridZero(stage, dp, dp)
    shape = (args.micro_batch, args.context, args.width)
    near = Neighbours(mesh["pp"].get_group(), shape, torch.bfloat16)

    while True:
        batch = torch.randint(0, args.vocabulary, (args.accumulate, args.micro_batch, args.context + 1)).cuda()

        def forward(number: int, given: Tensor | None, batch: Tensor = batch) -> Tensor:
            result = stage(batch[number, :, :-1] if given is None else given)
            if near.next is not None:
                return result
            return loss_of(result, batch[number, :, 1:], tp) / args.accumulate

        one_forward_one_backward(forward, args.accumulate, near)
        for parameter in optimizer.parameters:
            optimizer.bucket.append(parameter)
        optimizer.step()


if __name__ == "__main__":
    main()
