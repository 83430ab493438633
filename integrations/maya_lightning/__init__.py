"""Maya in Lightning:

    from maya_lightning import MayaEmulator

    trainer = Trainer(..., plugins=[MayaEmulator("h100", nodes=8, gpus_per_node=8)])
    trainer.fit(model)

Works for `lightning.pytorch`, `pytorch_lightning` and Fabric. Under `maya run -- python train.py` no line of the script changes.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["MayaEmulator"]

if TYPE_CHECKING:
    from maya_lightning.plugin import MayaEmulator


def __getattr__(name: str) -> Any:
    # Every emulated process loads this package (hooks.py), whether or not it uses Lightning.
    if name == "MayaEmulator":
        from maya_lightning.plugin import MayaEmulator

        return MayaEmulator
    raise AttributeError(f"module 'maya_lightning' has no attribute '{name}'")
