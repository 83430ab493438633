"""Refuses packages that only work on a real GPU and have no stand-in (flash_attention.py and triton_kernels.py contain stand-ins).
transformers would advise to install them, which would not help."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from maya_core.errors import MayaError
from maya_core.integration import Integration
from maya_core.session import gpu_only

# package: what to do without it
INSTEAD = {
    "apex": "Set optim='adamw_torch_fused', which is the same.",
    "bitsandbytes": f"Set optim='adamw_torch_fused', or remove quantization. {gpu_only.INSTEAD['bitsandbytes']}",
    "torchao": "Emulate with optim='adamw_torch_fused', and subtract the difference of the optimizer states from the predicted memory.",
    "liger_kernel": f"Set use_liger_kernel=False. {gpu_only.INSTEAD['liger_kernel']}",
    "quantization": "Emulate the model without it: memory and time are then those of its own dtype.",
}
# package: words in the names of its optimizers (optim=)
OPTIMIZERS = {
    "apex": ("apex",),
    "bitsandbytes": ("bnb", "paged_", "adamw_8bit", "ademamix", "lion", "galore_adamw_8bit"),
    "torchao": ("torch_4bit", "torch_8bit"),
}


def install(integration: Integration) -> None:
    patches = integration.patches

    def trainer(module: ModuleType) -> None:
        original = module.Trainer.get_optimizer_cls_and_kwargs

        @functools.wraps(original)
        def get_optimizer_cls_and_kwargs(args: Any, *rest: Any, **kwargs: Any) -> Any:
            name = str(getattr(args.optim, "value", args.optim))
            for package, words in OPTIMIZERS.items():
                if any(word in name for word in words):
                    raise refusal(f"optim='{name}'", package)
            return original(args, *rest, **kwargs)

        patches.set(module.Trainer, "get_optimizer_cls_and_kwargs", staticmethod(get_optimizer_cls_and_kwargs))
        # Before transformers 5.1, Trainer asked whether it is available and applied it itself.
        liger = "apply_liger_kernel" if hasattr(module, "apply_liger_kernel") else "is_liger_kernel_available"
        patches.set(module, liger, _refusing("use_liger_kernel=True", "liger_kernel"))

    def quantizers(module: ModuleType) -> None:
        patches.set(
            module.AutoHfQuantizer, "from_config", staticmethod(_refusing("a quantization_config", "quantization"))
        )

    def quantization(module: ModuleType) -> None:
        patches.set(module.BitsAndBytesConfig, "__init__", _refusing("BitsAndBytesConfig", "bitsandbytes"))

    patches.when_imported("transformers.trainer", trainer)
    patches.when_imported("transformers.quantizers.auto", quantizers)
    patches.when_imported("transformers.utils.quantization_config", quantization)


def refusal(setting: str, package: str) -> MayaError:
    kernels = "kernels of its own" if package == "quantization" else f"kernels of {package}'s own"
    return MayaError(
        f"{setting} cannot be emulated: it needs {kernels}, whose time and memory are not known.", INSTEAD[package]
    )


def _refusing(setting: str, package: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise refusal(setting, package)

    return refuse
