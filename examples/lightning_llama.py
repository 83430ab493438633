"""Llama pre-training with Lightning: FSDP2 and activation checkpointing, on random tokens.

    python examples/lightning_llama.py                     # on this machine, with emulated GPUs
    python examples/lightning_llama.py --layers 80 --hidden 8192 --heads 64 --kv-heads 8 --intermediate 28672 --nodes 8

Only one line refers to Maya: `plugins=`. Without it the same script trains on real GPUs, and also runs under `maya run`.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from maya_lightning import MayaEmulator
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


class Tokens(Dataset):
    def __init__(self, vocabulary: int, sequence: int) -> None:
        self.vocabulary, self.sequence = vocabulary, sequence

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(self.vocabulary, (self.sequence,), generator=torch.Generator().manual_seed(index))


class Llama(L.LightningModule):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):  # no memory yet: the strategy allocates each rank's part on its GPU
            self.model = LlamaForCausalLM(self.config)
        mesh, policy = self.device_mesh["data_parallel"], MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in self.model.model.layers:
            checkpoint(layer)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        steps = self.trainer.estimated_stepping_batches
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 100, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("hidden", 4096), ("heads", 32), ("kv-heads", 8), ("intermediate", 14336)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1, help="sequences per GPU")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs per node")
    args = parser.parse_args()
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.sequence,
    )
    trainer = L.Trainer(
        devices=args.gpus,
        num_nodes=args.nodes,
        strategy=ModelParallelStrategy(data_parallel_size=args.nodes * args.gpus, tensor_parallel_size=1),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        plugins=[MayaEmulator("h100")],
    )
    data = Tokens(args.vocabulary, args.sequence)
    trainer.fit(Llama(config), DataLoader(data, batch_size=args.batch, num_workers=2))


if __name__ == "__main__":
    main()
