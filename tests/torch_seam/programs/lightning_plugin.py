"""A Lightning Trainer on eight emulated GPUs, by the plugin. Writes the traces to the folder that it is given."""

import sys

import lightning.pytorch as pl
import torch
from maya_lightning import MayaEmulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, CLASSES, BATCH = 2048, 1000, 256


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    maya = MayaEmulator("h100", gpus_per_node=8, out=sys.argv[1])
    rows = TensorDataset(torch.randn(32 * BATCH, WIDTH), torch.randint(CLASSES, (32 * BATCH,)))
    trainer = pl.Trainer(plugins=[maya], precision="bf16-mixed", max_steps=4, logger=False, enable_checkpointing=False)
    trainer.fit(Classifier(), DataLoader(rows, batch_size=BATCH))


if __name__ == "__main__":
    main()
