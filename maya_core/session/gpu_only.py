"""Packages that are built for a GPU and cannot be there without one: what to say to a program that misses one."""

from __future__ import annotations

# module: what to emulate in its place
INSTEAD = {
    "flash_attn": "Call torch.nn.functional.scaled_dot_product_attention, which takes the same kernels; with transformers, attn_implementation="
    "'flash_attention_2' is emulated without the package.",
    "flash_attn_interface": "Call torch.nn.functional.scaled_dot_product_attention; `maya run --attention flash3` takes its speed for FlashAttention 3's.",
    "xformers": "Call torch.nn.functional.scaled_dot_product_attention, which takes the same kernels.",
    "apex": "Use torch's own: fused=True optimizers, torch.nn.functional.layer_norm, torch.amp.",
    "bitsandbytes": "Emulate with a fused AdamW (8 bytes of state a parameter, where 8-bit has 2) or without quantization, and take the difference in "
    "weights and states off the predicted memory.",
    "transformer_engine": "Emulate with torch's own layers in bfloat16.",
    "liger_kernel": "Emulate the model in PyTorch's own ops: it takes longer and more memory, an upper bound.",
    "deep_ep": "Emulate with all_to_all of torch.distributed.",
    "mamba_ssm": "Its kernels are not known: there is no stand-in.",
    "causal_conv1d": "Its kernels are not known: there is no stand-in.",
}


def advice(error: BaseException | None) -> str | None:
    """What a program that ended with this error is to be told, if it missed such a package."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ImportError) and error.name:
            package = error.name.partition(".")[0]
            if package in INSTEAD:
                return f"{package} is built for a GPU, and cannot be emulated as it is. {INSTEAD[package]}"
        error = error.__cause__ or error.__context__
    return None
