"""FusedAdam, FusedSGD and the kernels over lists of tensors. Every tensor is read and written once, and there are no step counters on the
device.

States, including master weights, may have less than 32 bits (--use-precision-aware-optimizer). They are converted to 32 bits for the
step, all of a group at once. Follows transformer_engine/pytorch/optimizers/fused_adam.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from maya_megatron.engine.device import launch

Tensors = list[torch.Tensor]


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weight_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.adam_w_mode, self.capturable, self.use_decoupled_grad = (
            1 if adam_w_mode else 0,
            capturable,
            use_decoupled_grad,
        )
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.dtypes["master_param"] = master_weight_dtype
        # If the upper half of a 32-bit weight is the parameter, only the lower half is stored.
        self.store_param_remainders = store_param_remainders and master_weight_dtype == torch.float32

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool | None = None) -> None:
        for name in self.dtypes:
            self.state[param][name] = torch.zeros_like(param, dtype=self._dtype(name, param))

    def _dtype(self, name: str, param: torch.Tensor) -> torch.dtype:
        halves = name == "master_param" and self.store_param_remainders and param.dtype == torch.bfloat16
        return torch.int16 if halves else self.dtypes[name]

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        state: torch.Tensor = self.state[param][name]
        return state if state.dtype in (torch.float32, torch.int16) else state.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        self.state[param][name].copy_(unscaled)

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        loss = closure() if closure is not None else None
        grad_name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [one for one in group["params"] if getattr(one, grad_name, None) is not None]
            for one in params:
                if not self.state[one]:
                    self.initialize_state(one)
            if params:
                wide = {name: [self.get_unscaled_state(one, name) for one in params] for name in self.dtypes}
                lists = list(wide.values())
                grads = [getattr(one, grad_name) for one in params]
                launch(
                    "multi_tensor_adam", [grads, params, *lists], [*params, *(one for each in lists for one in each)]
                )
                for name, states in wide.items():
                    for param, state in zip(params, states, strict=True):
                        if state is not self.state[param][name]:
                            self.set_scaled_state(param, name, state)
        return loss


class FusedSGD(torch.optim.SGD):
    pass


def multi_tensor_applier(op: Callable[..., Any], flag: torch.Tensor, lists: list[Tensors], *args: Any) -> Any:
    return op(2048 * 32, flag, lists, *args)


def multi_tensor_scale(chunk: int, flag: torch.Tensor, lists: list[Tensors], *_: Any) -> None:
    source, target = lists
    if source:
        launch("multi_tensor_scale", [source], target)


def multi_tensor_l2norm(
    chunk: int, flag: torch.Tensor, lists: list[Tensors], per_tensor: bool = False, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = lists[0]
    norm = torch.empty(1, dtype=torch.float32, device="cuda")
    each = torch.empty(len(tensors) if per_tensor else 0, dtype=torch.float32, device="cuda")
    if tensors:
        launch("multi_tensor_l2norm", [tensors], [norm])
    return norm, each


def multi_tensor_unscale_l2norm(chunk: int, flag: torch.Tensor, lists: list[Tensors], scale: Any, *rest: Any) -> Any:
    return multi_tensor_l2norm(chunk, flag, lists, *rest)
