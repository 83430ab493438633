"""Finds how many samples and tokens a step of the whole job processes.

The numbers come from the program's data loader, from the ids that its embedding looks up, or from the user's options. Rates per
second are computed from them in `summary.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from maya_core.report.analysis import Analysis
from maya_core.report.prediction import Throughput
from maya_core.trace.call import Call, Tensor
from maya_core.trace.communication import POINT_TO_POINT
from maya_core.trace.job import JobTrace
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind, Phase

INTEGERS = ("Long", "Int")
# In a forward pass these combine the parts of several ranks into one result, so the ranks work on the same samples. (FSDP only
# gathers in the forward pass.)
SHARES_SAMPLES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def throughput(analysis: Analysis) -> Throughput:
    """Samples and tokens per step of the whole job. Options that the user gave come first."""
    options, job = analysis.options, analysis.job
    found = _from_loader(analysis)
    looked_up = _from_integers(analysis, found)
    found = looked_up if found is None else found.model_copy(update={"tokens_per_step": _tokens(found, looked_up)})
    given = [name for name in ("samples_per_step", "tokens_per_step") if getattr(options, name) is not None]
    if found is None and not given:
        return Throughput(
            samples_per_step=None, tokens_per_step=None, data_parallel=None, source="unknown",
            detail="the program used no data loader and no embedding: give --samples-per-step and --tokens-per-step",
        )  # fmt: skip
    found = found or Throughput(
        samples_per_step=None, tokens_per_step=None, data_parallel=_replicas(job), source="unknown", detail=""
    )
    if not given:
        return found
    return found.model_copy(
        update={name: getattr(options, name) for name in given}
        | {"source": "given", "detail": f"{' and '.join(name.replace('_', ' ') for name in given)} as you gave them"}
    )


def _tokens(loaded: Throughput, looked_up: Throughput | None) -> float | None:
    """The tokens per step: what the embedding looks up, if the batch contains about as many integers.

    A batch may have one or two more tokens per row, as labels. Integers that no embedding looks up are not tokens, and neither are
    looked-up ids that are not in the batch, such as classes or time steps.
    """
    if looked_up is None or not loaded.tokens_per_step or not looked_up.tokens_per_step:
        return None
    spare = loaded.tokens_per_step - looked_up.tokens_per_step
    near = abs(spare) <= 2 * (loaded.samples_per_step or 0)
    packed = (
        looked_up.tokens_per_step >= loaded.tokens_per_step / 2
    )  # padding may be removed, or the context may be cut
    return looked_up.tokens_per_step if near or packed else None


def _expected(loaded: Throughput | None) -> tuple[float, float]:
    """The fewest and the most tokens per step that one rank should look up, judged by its batches; see `_tokens`."""
    if loaded is None or not loaded.tokens_per_step:
        return 0.0, 0.0
    ranks = loaded.data_parallel or 1
    return loaded.tokens_per_step / 2 / ranks, (loaded.tokens_per_step + 2 * (loaded.samples_per_step or 0)) / ranks


def _from_loader(analysis: Analysis) -> Throughput | None:
    """Counts the batches that the program took in its steady steps."""
    best = None
    for trace in analysis.job.ranks.values():
        data = trace.meta.get("data") or {}
        steps = data.get("steps", [])[: analysis.steps]
        steady = steps[1:] if len(steps) > 1 else steps
        samples = float(np.mean([step["samples"] for step in steady])) if steady else 0.0
        if samples and (best is None or samples > best[0]):
            tokens = float(np.mean([step["tokens"] for step in steady]))
            batches = float(np.mean([step["batches"] for step in steady]))
            best = samples, tokens, batches, data
    if best is None:
        return None
    samples, tokens, batches, data = best
    replicas = data.get("replicas") or _replicas(analysis.job)
    length = data.get("length")
    ranks = ""
    if analysis.job.world_size > 1:
        reason = "according to the sampler" if data.get("replicas") else "according to their communication"
        ranks = f" on each of {replicas:,} data-parallel ranks, {reason}"
    return Throughput(
        samples_per_step=samples * replicas,
        tokens_per_step=tokens * replicas or None,
        data_parallel=replicas,
        source="data loader",
        detail=f"{batches:g} batch{'es' * (batches != 1)} from the data loader{ranks}",
        steps_per_epoch=round(length / batches) if length and batches else None,
    )


def _from_integers(analysis: Analysis, loaded: Throughput | None) -> Throughput | None:
    """Counts the ids that the most used embedding looks up: the inputs of a language model.

    If the batches of a data loader contain about as many integers as one embedding looks up, that embedding is used: a table of
    relative positions (T5) is looked up far more often than the words.
    """
    best = (0.0, 0.0)
    fitting = best
    least, most = _expected(loaded)
    for rank, trace in analysis.job.ranks.items():
        where, steps = analysis.steady_events(rank)
        ops = trace.events[where]
        ops = ops[ops["kind"] == EventKind.OP]
        totals: dict[
            tuple[int, int, str], list[float]
        ] = {}  # by module and phase: forward and backward look up the same ids. A compiled module has several embeddings
        for number, call in enumerate(trace.calls):
            found = _looked_up(call)
            if found is None:
                continue
            ids, phase = found
            those = ops[(ops["subject"] == number) & (ops["phase"] == phase)]
            for module, count in zip(*np.unique(those["module"], return_counts=True), strict=True):
                total = totals.setdefault((int(module), phase, call.op if call.triton else ""), [0.0, 0.0])
                total[0] += count * (ids.sizes[0] if len(ids.sizes) > 1 else 0) / steps
                total[1] += count * ids.numel / steps
        # A lookup without a backward belongs to validation, unless no embedding has a backward because it is frozen.
        trained = {key: total for key, total in totals.items() if key[1] == Phase.BACKWARD} or totals
        each = [(tokens, samples) for samples, tokens in trained.values()]
        best = max([best, *each])
        fitting = max([fitting, *(one for one in each if least <= one[0] <= most)])
    tokens, samples = fitting if fitting[0] else best
    if tokens < 2:
        return None
    replicas = _replicas(analysis.job)
    return Throughput(
        samples_per_step=samples * replicas or None,
        tokens_per_step=tokens * replicas,
        data_parallel=replicas,
        source="integer inputs",
        detail="the ids that the most used embedding looks up"
        + (f" on each of {replicas:,} data-parallel ranks" if replicas > 1 else ""),
    )


def _looked_up(call: Call) -> tuple[Tensor, Phase] | None:
    """The indices of an embedding, and the phase of the call. The forward is recorded as index_select, whose indices are flat."""
    if call.triton is not None:
        return _looked_up_compiled(call, call.triton.ops)
    if call.name == "aten::embedding_dense_backward":
        ids, phase = call["indices"], Phase.BACKWARD
    elif call.name == "aten::index_select" and call["dim"] == 0 and len(call["self"].sizes) == 2:
        ids, phase = call["index"], Phase.FORWARD
    else:
        return None
    return (ids, phase) if isinstance(ids, Tensor) and ids.dtype in INTEGERS else None


def _looked_up_compiled(call: Call, ops: list[str]) -> tuple[Tensor, Phase] | None:
    """The same for a compiled kernel that contains an embedding: the indices are the largest integer tensor that it reads."""
    phases = {"embedding_dense_backward": Phase.BACKWARD, "embedding": Phase.FORWARD}
    phase = next((phase for name, phase in phases.items() if name in ops), None)
    integers = [one for one in call.arguments if isinstance(one, Tensor) and one.dtype in INTEGERS]
    return None if phase is None or not integers else (max(integers, key=lambda one: one.numel), phase)


def _replicas(job: JobTrace) -> int:
    """The number of ranks with their own data. Ranks that exchange messages or reduce in the forward pass share their data."""
    if job.processes == 1:
        return 1
    joined = {rank: rank for rank in range(job.world_size)}

    def root(rank: int) -> int:
        while joined[rank] != rank:
            rank = joined[rank] = joined[joined[rank]]
        return rank

    for trace in job.ranks.values():
        for ranks in _sharing(trace):
            first, *others = ranks
            for other in others:
                joined[root(other)] = root(first)
    first = next(iter(job.ranks))
    together = sum(root(rank) == root(first) for rank in range(job.world_size))
    return max(1, job.world_size // together)


def _sharing(trace: RankTrace) -> Iterable[tuple[int, ...]]:
    """The groups of ranks that work on the same samples."""
    collectives = trace.events[
        (trace.events["kind"] == EventKind.COLLECTIVE) & (trace.events["phase"] == Phase.FORWARD)
    ]
    # A forward reduction outside any module belongs to the training loop, which may average a loss for its log.
    inside = set(np.unique(collectives["subject"][collectives["module"] > 0]).tolist())
    for number, call in enumerate(trace.collectives):
        group = trace.communicators[call.communicator]
        if group.backend != "nccl":
            continue
        if call.op in POINT_TO_POINT:
            yield group.ranks[group.rank], group.ranks[call.peer]
        elif call.op in SHARES_SAMPLES and number in inside and call.elements_in > 1:
            yield group.ranks
