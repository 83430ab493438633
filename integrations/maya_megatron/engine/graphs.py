"""make_graphed_callables: captures layers as CUDA graphs, one for the forward and one for the backward of each microbatch, in the order
of a pipeline's schedule and in one memory pool. Follows transformer_engine/pytorch/graph.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from maya_core.torch_seam.tensors import pytree, storage_at
from maya_megatron.engine.device import device
from maya_megatron.engine.precision import fp8_autocast

Tensors = tuple[Any, ...]


class _Layer:
    """One layer and microbatch: the inputs that its graphs read, and the tensors that they write."""

    def __init__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], context: Callable[[], Any]) -> None:
        self.module, self.args, self.kwargs, self.context = module, args, kwargs, context
        self.names = list(kwargs)
        flat = [*pytree.tree_leaves(args), *pytree.tree_leaves([kwargs[name] for name in self.names])]
        self.given = len(flat)
        self.inputs: Tensors = (*flat, *module.parameters())
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.outputs: Tensors = ()
        self.known: list[Any] = []
        self.grad_outputs: Tensors = ()
        self.grad_inputs: Tensors = ()

    def run(self) -> Tensors:
        with self.context():
            outputs, self.form = pytree.tree_flatten(self.module(*self.args, **self.kwargs))
        return tuple(outputs)

    def gradients(self, outputs: Tensors, grads: Tensors, retain: bool = False) -> Tensors:
        wanted = [one for one in self.inputs if one.requires_grad]
        of = tuple(one for one in outputs if one.requires_grad)
        found = iter(
            torch.autograd.grad(
                of, wanted, tuple(one for one in grads if one is not None), allow_unused=True, retain_graph=retain
            )
        )
        return tuple(next(found) if one.requires_grad else None for one in self.inputs)

    def warm_up(self, times: int) -> None:
        for _ in range(times):
            outputs = self.run()
            grads = self.gradients(outputs, _like(outputs))
            # Parameters of other layers of the module are not inputs of this graph.
            used = [one is not None or index < self.given for index, one in enumerate(_aligned(self.inputs, grads))]
            self.inputs = tuple(one for one, is_used in zip(self.inputs, used, strict=True) if is_used)
            del outputs, grads
        for one in self.module.modules():
            if hasattr(one, "is_first_microbatch"):
                setattr(one, "is_first_microbatch", True)  # noqa: B010 (only on Megatron's modules)

    def capture_forward(self, pool: Any) -> None:
        with torch.cuda.graph(self.forward_graph, pool=pool):
            self.outputs = self.run()
        # Integers, such as the number of tokens of each expert, also hold for what a replay writes.
        self.known = [None if one.is_floating_point() else device().rules.read(one, "") for one in self.outputs]

    def capture_backward(self, pool: Any, shared: dict[Any, Tensors] | None, retain: bool) -> None:
        key = tuple((one.shape, one.dtype) for one in self.outputs if one.requires_grad)
        if shared is None or key not in shared:
            self.grad_outputs = _like(self.outputs)
            if shared is not None:
                shared[key] = self.grad_outputs
        else:
            self.grad_outputs = shared[key]
        with torch.cuda.graph(self.backward_graph, pool=pool):
            self.grad_inputs = self.gradients(self.outputs, self.grad_outputs, retain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = [*pytree.tree_leaves(args), *pytree.tree_leaves([kwargs[name] for name in self.names])]
        outputs = _Replay.apply(self, *flat, *self.inputs[self.given :])
        return pytree.tree_unflatten(list(outputs), self.form)

    def let_go_of_outputs(self) -> None:
        """Except for integers, whose values would be lost with the memory."""
        self.outputs = tuple(
            make_weak_ref(one) if known is None else one for one, known in zip(self.outputs, self.known, strict=True)
        )

    def let_go_of_gradients(self) -> None:
        self.grad_inputs = make_weak_ref(self.grad_inputs)

    def reset(self) -> None:
        self.forward_graph.reset()
        self.backward_graph.reset()


def _aligned(inputs: Tensors, grads: Tensors) -> Tensors:
    return tuple(grad if one.requires_grad else None for one, grad in zip(inputs, grads, strict=True))


def _like(outputs: Tensors) -> Tensors:
    return tuple(torch.empty_like(one) if one.requires_grad else None for one in outputs)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, *inputs: Any) -> Any:
        for static, given in zip(layer.inputs[: layer.given], inputs, strict=False):
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)
        layer.forward_graph.replay()
        for output, known in zip(layer.outputs, layer.known, strict=True):
            if known is not None:
                device().rules.remember(output, known.value, known.made_up)
        ctx.layer = layer
        return tuple(one.detach() for one in layer.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer: _Layer = ctx.layer
        for static, given in zip(layer.grad_outputs, grads, strict=True):
            if static is not None and given is not None and static.data_ptr() != given.data_ptr():
                static.copy_(given)
        layer.backward_graph.replay()
        return None, *(None if one is None else one.detach() for one in layer.grad_inputs)


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    sample_kwargs: Any = None,
    fp8_enabled: Any = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    **_: Any,
) -> Any:
    modules = modules if isinstance(modules, tuple) else (modules,)
    order = _order or [1, -1]
    layers_of = _num_layers_per_chunk or [len(modules) // max(order)] * max(order)
    microbatches = len(order) // len(layers_of) // 2
    eight = fp8_enabled if isinstance(fp8_enabled, tuple) else (fp8_enabled,) * len(modules)
    args, kwargs = list(sample_args), list(sample_kwargs or [{}] * len(sample_args))
    begins = [sum(layers_of[:chunk]) * microbatches for chunk in range(len(layers_of))]
    reuse = _reuse_graph_input_output_buffers
    if reuse:
        _share_inputs(order, layers_of, begins, args, kwargs)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def context(enabled: bool) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: fp8_autocast(True, fp8_recipe=fp8_recipe, fp8_group=fp8_group) if enabled else nullcontext()

    made: list[_Layer] = []
    start = 0
    for count in layers_of:  # chunk by chunk, all microbatches of each
        for _microbatch in range(microbatches):
            for number in range(start, start + count):
                index = len(made)
                made.append(_Layer(modules[number], args[index], kwargs[index], context(eight[number])))
        start += count

    with torch.cuda.stream(torch.cuda.Stream()):
        for layer in made:
            layer.warm_up(num_warmup_iters)
    _capture(made, order, layers_of, begins, pool, reuse, retain_graph_in_backward)
    return made[0] if len(made) == 1 else tuple(made)


def _capture(
    made: list[_Layer], order: list[int], layers_of: list[int], begins: list[int], pool: Any, reuse: bool, retain: bool
) -> None:
    done = {True: [0] * len(layers_of), False: [0] * len(layers_of)}
    shared: dict[Any, Tensors] | None = {} if reuse else None
    first_of_last_chunk: _Layer | None = None
    for number in order:
        chunk, forward = abs(number) - 1, number > 0
        start = begins[chunk] + done[forward][chunk] * layers_of[chunk]
        done[forward][chunk] += 1
        together = made[start : start + layers_of[chunk]]
        if forward:
            for layer in together:
                layer.capture_forward(pool)
            continue
        before: _Layer | None = None
        for layer in reversed(together):
            layer.capture_backward(pool, shared, retain)
            if reuse:  # nothing needs what the next graph has read
                layer.let_go_of_outputs()
                if before is not None:
                    before.let_go_of_gradients()
            before = layer
        if reuse and first_of_last_chunk is not None:
            first_of_last_chunk.let_go_of_gradients()
        first_of_last_chunk = before


def nothing(*_: Any, **__: Any) -> None:
    """Replaces what marks a capture, and what prevents scales from changing during it."""


def make_weak_ref(tensors: Any) -> Any:
    """The same memory, which graphs that are captured later may reuse."""
    return pytree.tree_map_only(torch.Tensor, _weak, tensors)


def _weak(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    same = storage_at(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


def _share_inputs(
    order: list[int], layers_of: list[int], begins: list[int], args: list[Any], kwargs: list[Any]
) -> None:
    """Reuses the inputs of a microbatch of the same shapes whose backward has finished."""
    waiting: list[list[int]] = [[] for _ in layers_of]
    free: dict[Any, list[int]] = {}
    done = [0] * len(layers_of)

    def kind(index: int) -> Any:
        leaves = pytree.tree_leaves((args[index], kwargs[index]))
        return tuple((one.shape, one.dtype) for one in leaves)

    for number in order:
        chunk = abs(number) - 1
        count = layers_of[chunk]
        if number > 0:
            first = begins[chunk] + done[chunk] * count
            done[chunk] += 1
            for index in range(first, first + count):
                waiting[chunk].append(index)
                if free.get(kind(index)):
                    other = free[kind(index)].pop(0)
                    args[index], kwargs[index] = args[other], kwargs[other]
        else:
            for index in waiting[chunk][:count]:
                free.setdefault(kind(index), []).append(index)
            del waiting[chunk][:count]
