"""Summarizes an analysed job as a Prediction: time, FLOPs, cost, energy, and caveats.

Throughput, memory, the breakdown of time and torch.compile have modules of their own; this one puts everything together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from maya_core.hardware.catalog import gpus
from maya_core.hardware.cluster import Cluster
from maya_core.hardware.dtypes import dtype
from maya_core.hardware.host_costs import KERNEL_GAP_S, LAUNCH_S, Host
from maya_core.hardware.models import Price
from maya_core.marking import HOW_TO_MARK
from maya_core.ops.attention_choice import changes_layout
from maya_core.ops.kernel import Convolution, Gemm, GroupedGemm, Kernel, Recurrent, Streaming, TritonGemm
from maya_core.ops.plan import flops_of
from maya_core.predictor.calibration import shipped_digest
from maya_core.predictor.pricing import Predictor, settled_calls
from maya_core.report import breakdown, stand_ins, wording
from maya_core.report.analysis import Analysis
from maya_core.report.compilation import caveats as caveats_of_compiling
from maya_core.report.compilation import compiled
from maya_core.report.data_loading import data_loading
from maya_core.report.gpu_memory import memory, unplaced_bytes
from maya_core.report.gpu_use import caveats as use_caveats
from maya_core.report.gpu_use import idle_gpus
from maya_core.report.prediction import (
    Assumptions,
    ClusterPart,
    Confidence,
    Cost,
    Energy,
    Flops,
    Prediction,
    RankTime,
    Throughput,
    Time,
    TracePart,
    UnknownOp,
    Workload,
    WorldPart,
)
from maya_core.report.throughput import throughput
from maya_core.report.unknown_values import caveats as caveats_of_values
from maya_core.report.unknown_values import unknown_values
from maya_core.report.validation import validation
from maya_core.simulator.simulate import RankTimeline
from maya_core.torch_seam.version import COMPARED, numbers, text
from maya_core.trace.call import Call, tensors_in
from maya_core.trace.call_names import abbreviated
from maya_core.trace.job import JobTrace
from maya_core.trace.memory_peaks import devices_used
from maya_core.trace.rank import RankTrace
from maya_core.trace.schema import EventKind, Phase
from maya_core.version import __version__

# What is uncertain about some ops. docs/memory.md explains more.
CAVEATS = {
    "aten::convolution": "cuDNN's workspaces for convolutions are not included in memory.",
    "aten::_cudnn_rnn": "The reserve space of cuDNN's recurrent networks is an estimate.",
    "aten::_scaled_dot_product_cudnn_attention": "The workspace of cuDNN's attention is an estimate.",
}
# The relative error of a time, by its provenance: the range around step_time_s. docs/prediction.md explains where it comes from.
ERROR = {"measured": 0.03, "interpolated": 0.08, "extrapolated": 0.25, "bound": 0.5}
# The share of its power limit that a GPU draws, by what it does; estimates. NCCL's kernels wait busily.
POWER = {"compute_s": 0.9, "exposed_communication_s": 0.45, "waiting_s": 0.35, "copy_s": 0.3, "host_s": 0.2}
# The share of a fused attention's backward that recomputes the scores.
SCORES_AGAIN = 1 / 5


def summarize(analysis: Analysis) -> Prediction:
    job, cluster = analysis.job, analysis.cluster
    ranks = [each for each in (breakdown.rank_time(analysis, one) for one in _timelines(analysis)) if each is not None]
    step = analysis.step_time_s
    flops = _flops(analysis)
    work = throughput(analysis)
    known = breakdown.confidence(analysis)
    time = _mean(ranks)
    shown = max(ranks, key=lambda rank: rank.compute_s).rank if ranks else next(iter(job.ranks))
    unknown, values = breakdown.unknown_ops(analysis, shown), unknown_values(job)
    peak = flops.peak_flops_per_gpu * job.world_size if flops else 0.0
    tokens = work.tokens_per_step / step if step and work.tokens_per_step else None
    return Prediction(
        maya=__version__,
        step_time_s=step,
        step_time_range_s=_range(step, known),
        warm_up_s=float(analysis.timeline.step_ends[0]) if step and analysis.timeline and analysis.steps > 1 else None,
        recorded_s=analysis.timeline.end if analysis.timeline else None,
        samples_per_s=work.samples_per_step / step if step and work.samples_per_step else None,
        tokens_per_s=tokens,
        tokens_per_s_per_gpu=tokens / job.world_size if tokens else None,
        mfu=flops.model / step / peak if flops and step and peak else None,
        hfu=flops.hardware / step / peak if flops and step and peak else None,
        memory=memory(job, cluster.gpu),
        time=time,
        ranks=ranks,
        flops=flops,
        throughput=work,
        data_loading=data_loading(analysis),
        cost=_cost(cluster, step, work),
        energy=_energy(cluster, job.world_size, step, time),
        confidence=known,
        detailed_rank=shown,
        top_kernels=breakdown.top_kernels(analysis, shown),
        top_modules=breakdown.top_modules(analysis, shown),
        communication=breakdown.communication(analysis, shown),
        world=_world(analysis),
        cluster=_cluster(cluster),
        assumptions=_assumptions(analysis),
        trace=_trace(analysis, shown),
        workload=_workload(job),
        validation=validation(analysis),
        compiled=compiled(job),
        unknown_ops=unknown,
        unknown_values=values,
        caveats=[*caveats_of_values(values), *_caveats(analysis), *_unknown_op_caveats(unknown, ranks)],
        hangs=analysis.hangs,
        failures=_failures(job),
    )


def _timelines(analysis: Analysis) -> list[RankTimeline]:
    return list(analysis.timeline.ranks.values()) if analysis.timeline is not None else []


def _mean(ranks: list[RankTime]) -> Time | None:
    if not ranks:
        return None
    numbers = [name for name, field in Time.model_fields.items() if field.annotation is float]
    families: Counter[str] = Counter()
    for rank in ranks:
        families.update({name: seconds / len(ranks) for name, seconds in rank.by_family_s.items()})
    means = {name: float(np.mean([getattr(rank, name) for rank in ranks])) for name in numbers}
    return Time(**means, by_family_s=dict(families.most_common()))


def _range(step: float | None, known: Confidence | None) -> tuple[float, float] | None:
    if step is None or known is None:
        return None
    less = sum(getattr(known, name) * error for name, error in ERROR.items() if name != "bound")
    return step * (1 - less), step * (1 + less + known.bound * ERROR["bound"])


def _flops(analysis: Analysis) -> Flops | None:
    """The FLOPs per step of the whole job. Every emulated rank represents others."""
    model, hardware = 0.0, 0.0
    weights = stand_ins.weights(analysis.job)
    dtypes: dict[str, float] = defaultdict(float)
    for rank, trace in analysis.job.ranks.items():
        where, steps = analysis.steady_events(rank)
        events = trace.events[where]
        ops = events[events["kind"] == EventKind.OP]
        each = np.array([flops_of(call) for call in trace.calls] or [0], float)
        times = np.bincount(ops["subject"], minlength=len(each)) / steps
        again = np.bincount(ops["subject"][ops["phase"] == Phase.RECOMPUTE], minlength=len(each)) / steps
        scores = np.array([SCORES_AGAIN * ("_attention_backward" in call.op) for call in trace.calls] or [0.0])
        hardware += weights[rank] * float((each * times).sum())
        model += weights[rank] * float((each * (times - again) * (1 - scores)).sum())
        for number in np.flatnonzero(each * times).tolist():
            dtypes[_rate(trace.calls[number], analysis.durations[rank].kernels[number])] += float(
                each[number] * times[number]
            )
    if not hardware:
        return None
    share = analysis.job.processes / sum(weights.values())
    rate = max(dtypes, key=lambda name: dtypes[name])
    gpu = analysis.cluster.gpu
    peak = gpu.peak_flops.get(rate) or gpu.peak_flops["float32"]
    return Flops(model=round(model * share), hardware=round(hardware * share), peak_flops_per_gpu=peak, dtype=rate)


# The arguments whose dtype determines the rate at which an op is computed.
OPERANDS = ("query", "mat2", "weight", "other", "batch2")


def _rate(call: Call, kernels: Sequence[Kernel]) -> str:
    """The name of the peak rate that the call's FLOPs are compared with: that of its products, otherwise of its operands."""
    for kernel in kernels:
        if isinstance(kernel, Gemm | GroupedGemm | TritonGemm | Convolution | Recurrent):
            return kernel.dtype
    tensors = [tensor for name in OPERANDS if (tensor := call.tensor(name)) is not None]
    tensors += [tensor for argument in call.arguments for tensor in tensors_in(argument) if len(tensor.sizes) > 1]
    return dtype(tensors[0].dtype).rate if tensors else "float32"


def _cost(cluster: Cluster, step: float | None, work: Throughput) -> Cost | None:
    hourly = cluster.price_per_hour()
    if hourly is None:
        return None
    quotes = cluster.quotes()
    if cluster.price_per_gpu_hour is not None:
        price = f"${cluster.price_per_gpu_hour:,.2f} per GPU-hour, as you gave it"
    else:
        price = _price_in_words(quotes[0].price)
    per_step = hourly * step / 3600 if step else None
    return Cost(
        usd_per_hour=hourly,
        usd_per_step=per_step,
        usd_per_1k_steps=per_step * 1000 if per_step else None,
        usd_per_epoch=per_step * work.steps_per_epoch if per_step and work.steps_per_epoch else None,
        usd_per_million_tokens=per_step / work.tokens_per_step * 1e6 if per_step and work.tokens_per_step else None,
        price=price,
    )


def _price_in_words(price: Price) -> str:
    """Which price was used: price of h100 at runpod, 2026-08"""
    region = price.region if price.region != "all" else ""
    details = [part for part in (region, price.date) if part]
    return ", ".join([f"price of {price.node or price.gpu} at {price.provider}", *details])


def _energy(cluster: Cluster, world: int, step: float | None, time: Time | None) -> Energy | None:
    if not step or time is None:
        return None
    whole = sum(getattr(time, name) for name in POWER) or 1.0
    watts = cluster.gpu.power_limit_w * sum(share * getattr(time, name) for name, share in POWER.items()) / whole
    joules = watts * step * world
    return Energy(average_w_per_gpu=watts, joules_per_step=joules, kwh_per_1k_steps=joules * 1000 / 3.6e6)


def _world(analysis: Analysis) -> WorldPart:
    return WorldPart(
        size=analysis.job.world_size,
        nodes=analysis.cluster.nodes,
        gpus_per_node=analysis.cluster.gpus_per_node,
        emulated_ranks=list(analysis.job.ranks),
        idle_gpus=idle_gpus(analysis.job),
        stands_for={rank: abbreviated(ranks) for rank, ranks in stand_ins.stands_for(analysis.job).items()},
    )


def _assumptions(analysis: Analysis) -> Assumptions:
    calibration = analysis.calibration
    return Assumptions(
        host=analysis.options.host.value,
        clocks="burst" if analysis.options.burst else "sustained",
        attention=analysis.options.attention,
        calibration=calibration.name if calibration else "",
        calibrated_by=str(calibration.runs) if calibration and calibration.runs else "",
    )


def _trace(analysis: Analysis, shown: int) -> TracePart:
    """What the prediction was made from. Kernels are those of the shown rank."""
    traces = list(analysis.job.ranks.values())
    return TracePart(
        steps=analysis.steps,
        ended=_ended(traces, analysis.job),
        torch=traces[0].meta["torch"],
        python=traces[0].meta["python"],
        events=sum(len(trace.events) for trace in traces),
        kernels_per_step=_kernels(analysis, shown),
    )


def _cluster(cluster: Cluster) -> ClusterPart:
    return ClusterPart(
        gpu=cluster.gpu.name,
        gpu_name=cluster.gpu.driver_name,
        node=cluster.node.name,
        network=cluster.network.name,
        gpu_memory_bytes=cluster.gpu.memory_bytes,
        power_limit_w=cluster.gpu.power_limit_w,
        nvlink_bytes_per_s=cluster.nvlink_bytes_per_s,
        nic_bytes_per_s=cluster.nic_bytes_per_s,
        nics_per_node=cluster.nics_per_node,
    )


def _workload(job: JobTrace) -> Workload | None:
    found = job.ranks[min(job.ranks)].meta.get("workload")
    return None if found is None else Workload(**found)


def _ended(traces: list[RankTrace], job: JobTrace) -> str:
    """How the job ended: the worst ending of any rank, also of one that left no trace."""
    order = ("completed", "stopped", "hung", "failed")
    if set(job.failed) - set(job.ranks):
        return "failed"
    return max((str(trace.meta["ended"]) for trace in traces), key=order.index)


def _failures(job: JobTrace) -> list[str]:
    """Ranks that failed, in the order in which they did."""
    order = [*job.failed, *(rank for rank in job.ranks if rank not in job.failed)]
    found = []
    for rank in order:
        trace = job.ranks.get(rank)
        if trace is None:
            found.append(f"rank {rank} ended with exit code {job.failed[rank]} and left no trace")
        elif trace.meta["ended"] == "failed":
            who = f"rank {rank}" if job.processes > 1 else "the program"
            steps = f"after {trace.steps} step{'s' * (trace.steps != 1)}"
            found.append(f"{who} failed {steps}: {trace.meta.get('failure') or 'it ended with an error'}")
    return found


def _kernels(analysis: Analysis, rank: int) -> int | None:
    """The number of kernel launches in the last step."""
    trace, steps = analysis.job.ranks[rank], analysis.steps
    if not 0 < steps <= trace.steps:
        return None
    step = trace.step(steps)
    return int(analysis.durations[rank].launches[step["subject"][step["kind"] == EventKind.OP]].sum())


NOTICED = 2**20  # fewer bytes get no caveat


def _memory_caveat(analysis: Analysis, emulated: str) -> str:
    """The caveat about memory on a GPU other than the recorded one."""
    gpu = analysis.cluster.gpu
    if emulated not in gpus():
        return f"The trace was recorded on {emulated}, which is not in the catalog: memory is that of {emulated}, not of {gpu.name}."
    unplaced = max((unplaced_bytes(trace, gpu) for trace in analysis.job.ranks.values()), default=0)
    more = f" One call may need up to {wording.size(unplaced)} more than is counted." if unplaced >= NOTICED else ""
    return (
        f"The trace was recorded on {emulated} and replanned for {gpu.name}, so reserved memory is an estimate.{more}"
    )


COPIES = 8  # of an attention's result, if its layout changes: one in forward, gradients and casts in backward


def _layout_caveats(analysis: Analysis) -> list[str]:
    """The caveat about attention calls whose result has another memory layout on this GPU than on the recorded one."""
    predictor, seconds, count = Predictor(analysis.cluster.gpu), 0.0, 0
    rank, trace = next(iter(analysis.job.ranks.items()))
    calls = settled_calls(trace)
    where, steps = analysis.steady_events(rank) if analysis.steps else (slice(None), 1)
    events = trace.events[where]
    times = np.bincount(events["subject"][events["kind"] == EventKind.OP], minlength=len(trace.calls)) / steps
    for number in np.flatnonzero(times).tolist():
        call = calls[number]
        if changes_layout(call, predictor.platform):
            copy = Streaming("strided", call["query"].nbytes, call["query"].nbytes, call["query"].numel)
            each = float(predictor.kernels([copy]).seconds[0]) + KERNEL_GAP_S + LAUNCH_S
            seconds += times[number] * COPIES * each
            count += round(times[number])
    if not count:
        return []
    return [
        f"On {analysis.cluster.gpu.name}, {count} attention call{'s' * (count != 1)} per step return{'s' * (count == 1)} a different memory layout, "
        f"so the copies around them may differ by up to {wording.seconds(seconds)} per step. Emulate the job on that GPU to be sure."
    ]


def _unknown_op_caveats(unknown: list[UnknownOp], ranks: list[RankTime]) -> list[str]:
    if not unknown:
        return []
    total = max((sum(rank.by_family_s.values()) for rank in ranks), default=0.0)
    seconds = sum(op.seconds for op in unknown)
    names = ", ".join(op.name for op in unknown[:MOST_NAMES]) + (", ..." if len(unknown) > MOST_NAMES else "")
    share = f" ({wording.share(seconds / total)} of the GPU time)" if total else ""
    return [
        f"Nobody has measured {len(unknown)} op{'s' * (len(unknown) != 1)}: {names}. Their times{share} are lower bounds, from the bytes that they "
        "move and the arithmetic that is known. `maya help extending` shows how to describe an op."
    ]


MOST_NAMES = 5
UNEVEN = 1.2  # if the longest step takes this much longer than the shortest, their mean is not typical


def _step_caveats(analysis: Analysis, trace: RankTrace) -> list[str]:
    """Caveats about steps that may not be what the user considers a step."""
    found = []
    if idle := trace.meta.get("idle_optimizers", 0):
        found.append(
            f"{idle} of the program's optimizers never stepped, so memory and time do not include it. Record more steps, for example with --steps 20."
        )
    if len(devices_used(trace)) > 1:
        found.append(
            "One process used several GPUs: copies between them are priced as if they were copies within one GPU."
        )
    found += _host_caveats(analysis, trace)
    steady = np.diff(analysis.timeline.step_ends[: analysis.steps]) if analysis.timeline is not None else np.zeros(0)
    if len(steady) > 1 and steady.max() > UNEVEN * steady.min():
        found.append(
            f"Steps differ: the shortest takes {wording.seconds(float(steady.min()))}, the longest {wording.seconds(float(steady.max()))}. "
            f"The step time is their mean and includes validation or logging between steps. If a step is something else, {HOW_TO_MARK}."
        )
    return found


PAUSE_S = 1e-3  # between two calls of a GPU; in shorter ones the host only prepares the next call
NOTICED_PAUSES = 0.02, 0.1  # seconds, and a share of the step


def _host_caveats(analysis: Analysis, trace: RankTrace) -> list[str]:
    """What the program itself did on the host while it was emulated, if its modelled time does not have it."""
    if analysis.options.host is not Host.MODELLED or trace.steps < 2 or not analysis.step_time_s:
        return []
    ends = np.flatnonzero(trace.events["kind"] == EventKind.STEP_END).tolist()
    seen = min(_pauses(trace.events[before : end + 1]) for before, end in pairwise(ends))
    least, share = NOTICED_PAUSES
    if seen < max(least, share * analysis.step_time_s):
        return []
    return [
        f"Between calls of the GPU, the program itself spent about {wording.seconds(float(f'{seen:.1g}'))} of each step on this host: data "
        f"loading, Python, files. The step time of {wording.seconds(analysis.step_time_s)} does not include it; --host measured does."
    ]


def _pauses(events: np.ndarray) -> float:
    """Seconds of a step in which the program called no GPU for long. What the emulation itself takes is not on this clock."""
    between = np.diff(events["time_ns"]) * 1e-9
    return float(between[between > PAUSE_S].sum())


def _caveats(analysis: Analysis) -> list[str]:
    found: list[str] = []
    for rank, trace in analysis.job.ranks.items():
        ops = {call.name for call in analysis.durations[rank].calls}
        found += [CAVEATS[name] for name in sorted(ops & CAVEATS.keys())]
        if assumed := sum(trace.meta.get("stand_ins", {}).values()):
            found.append(
                f"In {assumed} collective{'s' * (assumed != 1)} of host data, ranks that are not emulated were assumed to contribute the same data as the emulated rank."
            )
        found += [*trace.meta.get("notes", []), *_version_caveats(trace)]
        if trace.meta["ended"] == "failed":
            continue
        survived = int(np.count_nonzero(trace.events["kind"] == EventKind.OUT_OF_MEMORY))
        if survived:
            found.append(f"The program ran out of memory {survived} time{'s' * (survived != 1)} and continued.")
        if retries := max(trace.meta["alloc_retries"], default=0):
            found.append(
                f"Memory was so short that the allocator released its cache {retries} time{'s' * (retries != 1)}: expect slow steps."
            )
        found += _step_caveats(analysis, trace)
        found += caveats_of_compiling(trace)
    found += [*_other_gpu_caveats(analysis), *use_caveats(analysis.job), *stand_ins.caveats(analysis.job)]
    calibration = analysis.calibration
    if calibration is not None and calibration.runs is not None and calibration.runs.shipped != shipped_digest():
        found.append(
            f"The factors of calibration '{calibration.name}' were fitted with another version of Maya: fit them to your actual runs again (`maya help calibrate`)."
        )
    if analysis.steps == 1:
        found.append("Only one step was recorded, so the step time includes warm-up. Record at least three steps.")
    return list(dict.fromkeys(found))


def _version_caveats(trace: RankTrace) -> list[str]:
    """What is less sure with another version of torch than the compared one."""
    version = trace.meta["torch"]
    if numbers(version) == COMPARED:
        return []
    return [
        f"This is torch {version}. Maya's ops and training scripts on one GPU were compared with its CUDA build; distributed and compiled programs "
        f"only with that of torch {text(COMPARED)}. `maya help versions` says what is known to differ."
    ]


def _other_gpu_caveats(analysis: Analysis) -> list[str]:
    """Caveats of a prediction for a GPU other than the recorded one."""
    emulated = next(iter(analysis.job.ranks.values())).meta["gpu"]
    if emulated == analysis.cluster.gpu.name:
        return []
    found = [_memory_caveat(analysis, emulated), *_layout_caveats(analysis)]
    queries = [line for trace in analysis.job.ranks.values() for line in trace.meta.get("asked_gpu", [])]
    if queries:
        found.append(
            f"The program queries which GPU it runs on ({', '.join(dict.fromkeys(map(wording.short_source, queries[:MOST_NAMES])))}), "
            f"so it may behave differently on {analysis.cluster.gpu.name}. Emulate the job on that GPU to be sure."
        )
    kept = sorted({call.name for trace in analysis.job.ranks.values() for call in trace.calls if call.kernels})
    if kept:
        found.append(
            f"The program itself describes the kernels of {', '.join(kept[:MOST_NAMES])}: they are those it described for {emulated}."
        )
    return found
