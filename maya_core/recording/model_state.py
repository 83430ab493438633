"""Restores a model after an emulated training, which moves, shards and wraps it but computes no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
# Where Lightning stores a module's device and dtype, and which parameters it froze for another optimizer's step.
PLACE = ("_device", "_dtype", "_param_requires_grad_state")
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of tensors


class ModelState:
    """Remembers the modules and tensors of a model by reference, and restores them on the host, with their values."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), dict(vars(module)), _registries(module)) for module in model.modules()]
        tensors: dict[int, torch.Tensor] = {id(one): one for one in (*model.parameters(), *model.buffers())}
        self._tensors = [(one, one.data, one.grad, _data(one.grad), _extras(one)) for one in tensors.values()]
        self._trained = [(one, one.requires_grad) for one in tensors.values() if one.is_leaf]

    def put_back(self) -> None:
        for module, kind, attributes, registries in self._modules:
            now = vars(module)
            module.__class__ = kind
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update({name: attributes[name] for name in attributes.keys() - now.keys()})
            now.update({name: attributes[name] for name in PLACE if name in attributes})
            for name, (registry, content) in registries.items():
                registry.clear()
                registry.update(content)
                now[name] = registry
        for tensor, data, grad, grad_data, extras in self._tensors:
            tensor.grad = None
            tensor.data = data
            if grad is not None and grad_data is not None:
                grad.data = grad_data  # moving a module also moves the gradient object itself
                tensor.grad = grad
            for name in vars(tensor).keys() - extras.keys():
                delattr(tensor, name)
            for name in HOOKS:
                setattr(tensor, name, extras.get(name))
        for tensor, trained in self._trained:  # an interrupted step may have frozen some of them
            tensor.requires_grad_(trained)


def _registries(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The dictionaries of parameters, buffers, submodules and hooks, each with a copy of its content."""
    return {name: (vars(module)[name], vars(module)[name].copy()) for name in REGISTRIES if name in vars(module)}


def _data(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.data


def _extras(tensor: torch.Tensor) -> dict[str, Any]:
    hooks = {name: copied for name in HOOKS if (copied := _copy(getattr(tensor, name, None))) is not None}
    return {**vars(tensor), **hooks}


def _copy(hooks: Any) -> Any:
    return hooks.copy() if hooks is not None else None
