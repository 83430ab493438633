"""A Lightning model and its data, for either distribution of Lightning."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HIDDEN, CLASSES, BATCH, SAMPLES = 64, 256, 10, 32, 4096
PARAMETERS = WIDTH * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(SAMPLES, WIDTH, generator=generator)
    return DataLoader(TensorDataset(data, (data[:, 0] > 0).long()), BATCH)


def net(package: ModuleType) -> Any:
    class Net(package.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
            )
            self.validated = 0
            self.planned = 0.0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated += 1
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    torch.manual_seed(0)
    return Net()
