"""Models of transformers under DistributedDataParallel, in 16 bits by autocast, on generated data. Nothing in it refers to Maya:

torchrun --nproc-per-node 8 recipes/programs/ddp.py --model resnet-50 --batch 128
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

IMAGE, CLASSES = 224, 1000


def bert_large() -> torch.nn.Module:
    return BertForMaskedLM(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    )


def resnet_50() -> torch.nn.Module:
    return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))


def vit_large() -> torch.nn.Module:
    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=CLASSES
    )
    return ViTForImageClassification(config)


MODELS = {"bert-large": bert_large, "resnet-50": resnet_50, "vit-large": vit_large}


class Data(Dataset):
    """A data set of the requested length whose samples are all alike."""

    def __init__(self, text: bool, tokens: int) -> None:
        self.sample = (
            {"input_ids": torch.randint(30522, (tokens,)), "labels": torch.randint(30522, (tokens,))}
            if text
            else {"pixel_values": torch.randn(3, IMAGE, IMAGE), "labels": torch.tensor(1)}
        )

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, _: int) -> dict:
        return self.sample


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--batch", type=int, default=32, help="samples of a GPU at a time")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bucket-mb", type=int, default=25)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = MODELS[args.model]().cuda()
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=args.dtype == "float16")
    loader = iter(DataLoader(Data("bert" in args.model, args.tokens), args.batch, pin_memory=True))
    while True:
        for micro in range(args.accumulate):
            batch = {name: value.cuda(non_blocking=True) for name, value in next(loader).items()}
            if args.channels_last and "pixel_values" in batch:
                batch["pixel_values"] = batch["pixel_values"].to(memory_format=torch.channels_last)
            model.require_backward_grad_sync = micro + 1 == args.accumulate
            with torch.autocast("cuda", getattr(torch, args.dtype)):
                loss = model(**batch).loss / args.accumulate
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
