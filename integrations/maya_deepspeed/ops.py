"""Stand-ins for DeepSpeed's own ops, which it would compile with nvcc or g++.

Fused optimizers run as torch's own fused kernels, which read and write the same tensors once. Optimizers on the host change nothing,
because there are no weights; the bytes that they would process are recorded, and the simulated host needs time for them. The kernels
of the quantizer read their inputs and write their outputs, with the shapes of DeepSpeed's csrc/quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from maya_core.errors import MayaError
from maya_core.integration import Integration
from maya_core.torch_seam import tensors

Tensors = list[torch.Tensor]


def emulated_op(name: str, integration: Integration) -> SimpleNamespace:
    """The replacement for the op that the builder of this name loads."""
    if name not in OPS:
        raise MayaError(
            f"DeepSpeed's op '{name}' is not emulated.",
            f"The emulated ops are {', '.join(sorted(OPS))}. Choose a DeepSpeed setting that does not need it.",
        )
    return SimpleNamespace(**OPS[name](integration))


def _fused_adam(integration: Integration) -> dict[str, Any]:
    def multi_tensor_adam(chunk: int, flag: torch.Tensor, lists: list[Tensors], *settings: Any) -> None:
        gradients, parameters, averages, squares = lists
        # The kernel gets all numbers as arguments, so there is no step tensor; the flag takes its place.
        tensors.fused_adamw_(
            parameters, gradients, averages, squares, [], [flag] * len(parameters),
            lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return {"multi_tensor_adam": multi_tensor_adam}


def _fused_lion(integration: Integration) -> dict[str, Any]:
    def multi_tensor_lion(chunk: int, flag: torch.Tensor, lists: list[Tensors], *settings: Any) -> None:
        gradients, parameters, averages = lists
        tensors.fused_sgd_(
            parameters, gradients, averages,
            weight_decay=0.0, momentum=0.9, lr=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip

    return {"multi_tensor_lion": multi_tensor_lion}


def _fused_lamb(integration: Integration) -> dict[str, Any]:
    @torch.no_grad()
    def lamb(
        parameter: torch.Tensor,
        copy: torch.Tensor,
        average: torch.Tensor,
        square: torch.Tensor,
        gradient: torch.Tensor,
        *settings: Any,
    ) -> torch.Tensor:
        # Three kernels: the update with sums of squares per block, their sum, and the scaled step.
        tensors.fused_adamw_(
            [parameter], [gradient.to(parameter.dtype)], [average], [square], [], [parameter.new_empty(())],
            lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        norm = torch.linalg.vector_norm(parameter)
        parameter.addcmul_(average, norm)
        if copy.numel():
            copy.copy_(parameter)
        return norm

    return {"lamb": lamb}


def _on_host(update: str) -> Callable[[Integration], dict[str, Any]]:
    """An optimizer on the host. It reads and writes the parameter and the states, and reads the gradient."""
    name = update.partition("_")[0]

    def op(integration: Integration) -> dict[str, Any]:
        def step(*arguments: Any) -> None:
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            gradient = tensors[1]
            integration.record_host_work(sum(2 * one.nbytes for one in tensors) - gradient.nbytes)

        nothing = {f"create_{name}": _nothing, f"destroy_{name}": _nothing}
        return {**nothing, update: step, f"{name}_rollback": step}

    return op


def _quantizer(integration: Integration) -> dict[str, Any]:
    def kernel(name: str, inputs: Tensors, outputs: Tensors) -> None:
        integration.rules.record(f"deepspeed::{name}", inputs, outputs)

    def scales(of: torch.Tensor, groups: int) -> torch.Tensor:
        return torch.empty(groups, 1, dtype=torch.float32, device=of.device)

    def quantize(values: torch.Tensor, groups: int, bits: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        quantized = torch.empty(
            *values.shape[:-1], values.shape[-1] * bits // 8, dtype=torch.int8, device=values.device
        )
        made = quantized, scales(values, groups)
        kernel("quantize", [values], [*made])
        return made

    def dequantize(quantized: torch.Tensor, scale: torch.Tensor, groups: int, bits: int, kind: str) -> torch.Tensor:
        values = torch.empty(
            *quantized.shape[:-1], quantized.shape[-1] * 8 // bits, dtype=torch.float16, device=quantized.device
        )
        kernel("dequantize", [quantized, scale], [values])
        return values

    def swizzle_quant(values: torch.Tensor, groups: int, bits: int, *layout: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.empty(values.numel() * bits // 8, dtype=torch.int8, device=values.device), scales(values, groups)
        kernel("swizzle_quant", [values], [*made])
        return made

    def quantized_reduction(
        values: torch.Tensor, scale: torch.Tensor, groups: int, out_groups: int, bits: int, kind: str, devices: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = values.new_empty(*values.shape[:-1], values.shape[-1] // devices)
        made = reduced, scales(values, out_groups)
        kernel("quantized_reduction", [values, scale], [*made])
        return made

    return {
        "Symmetric": "symmetric",
        "quantize": quantize,
        "dequantize": dequantize,
        "swizzle_quant": swizzle_quant,
        "quantized_reduction": quantized_reduction,
    }


def _flatten(integration: Integration) -> dict[str, Any]:
    return {"flatten": tensors.flatten, "unflatten": tensors.unflatten}


def _nothing(*_: Any) -> None:
    return None


OPS: dict[str, Callable[[Integration], dict[str, Any]]] = {
    "fused_adam": _fused_adam,
    "fused_lion": _fused_lion,
    "fused_lamb": _fused_lamb,
    "cpu_adam": _on_host("adam_update"),
    "cpu_adagrad": _on_host("adagrad_update"),
    "cpu_lion": _on_host("lion_update"),
    "quantizer": _quantizer,
    "utils": _flatten,
}
