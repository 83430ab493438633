"""The 1F1B pipeline schedule of Megatron, one stage per rank: which microbatch goes forward or backward when, and what is
sent to the neighbours meanwhile. With tensor parallelism, every rank of a stage sends its part of an activation and the
receiving ranks put the parts together ("scatter/gather").
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


class Neighbours:
    """The stages before and after this one in its pipeline."""

    def __init__(self, pipeline: Group, shape: tuple[int, ...], dtype: torch.dtype, tp: Group | None = None) -> None:
        self.place, self.stages = pipeline.rank(), pipeline.size()
        ranks = dist.get_process_group_ranks(pipeline)
        self.previous = ranks[self.place - 1] if self.place > 0 else None
        self.next = ranks[self.place + 1] if self.place < self.stages - 1 else None
        self.group, self.shape, self.dtype = pipeline, shape, dtype
        self.tp = tp if tp is not None and tp.size() > 1 else None

    def _empty(self) -> Tensor:
        whole = torch.Size(self.shape).numel()
        part = whole // self.tp.size() if self.tp is not None else whole
        return torch.empty(part, dtype=self.dtype, device="cuda")

    def _part(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1)
        return flat.chunk(self.tp.size())[self.tp.rank()].contiguous() if self.tp is not None else flat

    def _whole(self, part: Tensor) -> Tensor:
        if self.tp is not None:
            whole = part.new_empty(part.numel() * self.tp.size())
            dist.all_gather_into_tensor(whole, part, group=self.tp)
            part = whole
        return part.view(self.shape).requires_grad_()

    def exchange(
        self,
        to_next: Tensor | None = None,
        to_previous: Tensor | None = None,
        ask_next: bool = False,
        ask_previous: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends and receives at once: what comes from the next stage and what comes from the previous one."""
        calls, from_next, from_previous = list[dist.P2POp](), None, None
        if self.previous is not None and to_previous is not None:
            calls.append(dist.P2POp(dist.isend, self._part(to_previous), self.previous, self.group))
        if self.previous is not None and ask_previous:
            from_previous = self._empty()
            calls.append(dist.P2POp(dist.irecv, from_previous, self.previous, self.group))
        if self.next is not None and to_next is not None:
            calls.append(dist.P2POp(dist.isend, self._part(to_next), self.next, self.group))
        if self.next is not None and ask_next:
            from_next = self._empty()
            calls.append(dist.P2POp(dist.irecv, from_next, self.next, self.group))
        if calls:
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            torch.cuda.synchronize()
        return (
            self._whole(from_next) if from_next is not None else None,
            self._whole(from_previous) if from_previous is not None else None,
        )


def one_forward_one_backward(
    forward: Callable[[int, Tensor | None], Tensor], microbatches: int, near: Neighbours
) -> None:
    """`forward` takes a microbatch's number and its input (None in the first stage); in the last stage it gives the loss."""
    waiting: deque[tuple[Tensor | None, Tensor]] = deque()

    def backward(grad: Tensor | None) -> Tensor | None:
        given, result = waiting.popleft()
        torch.autograd.backward(result, grad)
        return given.grad if given is not None else None

    warmup = min(near.stages - near.place - 1, microbatches)
    for number in range(warmup):
        _, given = near.exchange(ask_previous=True)
        waiting.append((given, result := forward(number, given)))
        near.exchange(to_next=result)
    steady = microbatches - warmup
    given = near.exchange(ask_previous=True)[1] if steady else None
    for number in range(warmup, microbatches):
        waiting.append((given, result := forward(number, given)))
        grad, _ = near.exchange(to_next=result, ask_next=True)
        to_input = backward(grad)
        _, given = near.exchange(to_previous=to_input, ask_previous=number < microbatches - 1)
    for _ in range(warmup):
        grad, _ = near.exchange(ask_next=True)
        near.exchange(to_previous=backward(grad))
