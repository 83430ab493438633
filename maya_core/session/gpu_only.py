"""Packages that are built for a GPU and cannot be installed without one: advice for a program that misses one."""

from __future__ import annotations

# By module: what to emulate instead.
INSTEAD = {
    "flash_attn": "Call torch.nn.functional.scaled_dot_product_attention, which runs the same kernels; with transformers, attn_implementation="
    "'flash_attention_2' is emulated without the package.",
    "flash_attn_interface": "Call torch.nn.functional.scaled_dot_product_attention; `maya run --attention flash3` uses the speed of FlashAttention 3.",
    "xformers": "Call torch.nn.functional.scaled_dot_product_attention, which runs the same kernels.",
    "apex": "Use torch's own: fused=True optimizers, torch.nn.functional.layer_norm, torch.amp.",
    "bitsandbytes": "Emulate with a fused AdamW (8 bytes of state per parameter, where 8-bit has 2) or without quantization, and subtract the difference in "
    "weights and states from the predicted memory.",
    "transformer_engine": "Emulate with torch's own layers in bfloat16.",
    "liger_kernel": "Emulate the model with PyTorch's own ops. They take more time and memory, so the prediction is an upper bound.",
    "deep_ep": "Emulate with all_to_all of torch.distributed.",
    "mamba_ssm": "Maya does not know its kernels, so there is no replacement.",
    "causal_conv1d": "Maya does not know its kernels, so there is no replacement.",
}


def advice(error: BaseException | None) -> str | None:
    """Advice for a program that ended with this error, if it missed such a package."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ImportError) and error.name:
            package = error.name.partition(".")[0]
            if package in INSTEAD:
                return f"{package} is built for a GPU and cannot be emulated as it is. {INSTEAD[package]}"
        error = error.__cause__ or error.__context__
    return None
