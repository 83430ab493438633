"""Renders a prediction for the terminal: first the headline figures, then the tables that explain them.

Which figures exist is decided by `prediction.py`; how a number is written is decided by `wording.py`.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from maya_core.marking import HOW_TO_MARK
from maya_core.report import wording
from maya_core.report.data_loading import NOTICED, noticed_loading
from maya_core.report.prediction import Compiled, DeviceMemory, Prediction, RankTime, Time
from maya_core.report.unknown_values import memory_in_words
from maya_core.trace.call_names import ranks_in_words

MOST_RANKS, MOST_ROWS, MOST_TOP, BAR = 16, 8, 6, 44

COLOURS = ("green", "red", "yellow", "blue", "magenta")  # of the parts of a step
PARTS = [(field, name, colour) for (field, name), colour in zip(wording.STEP_PARTS.items(), COLOURS, strict=True)]
ENDINGS = {
    "completed": "the program ran to its end",
    "stopped": "then stopped as requested",
    "failed": "then the program failed",
    "hung": "then the ranks hung",
}
PROVENANCE = {
    "measured": "measured on this GPU",
    "interpolated": "interpolated between measurements",
    "extrapolated": "extrapolated beyond them",
    "bound": "only a lower bound",
}

Figure = tuple[str, str | Text, str]  # a headline figure: its name, its value, a remark


def render(prediction: Prediction) -> Group:
    lines: list[RenderableType] = [Text(_title(prediction), style="bold")]
    lines += [Text(hang, style="bold red") for hang in prediction.hangs]
    lines += [Text(sentence, style="bold red") for sentence in _failed(prediction)]
    lines.append(_headline(prediction))
    if prediction.time is not None and prediction.step_time_s:
        lines.append(_step_bar(prediction.time))
    if len(prediction.world.emulated_ranks) > 1:
        lines.append(_ranks(prediction))
    fullest = prediction.memory.fullest
    if fullest is not None:
        lines.append(_memory(fullest, prediction))
    if prediction.validation:
        lines.append(_validation(prediction))
    if prediction.top_modules and prediction.step_time_s:
        lines += [_modules(prediction), _kernels(prediction)]
    if prediction.communication:
        lines.append(_communication(prediction))
    if prediction.confidence is not None:
        lines.append(Text(_confidence(prediction), style="dim"))
    if prediction.compiled is not None:
        lines.append(Text(_compiled(prediction.compiled), style="dim"))
    lines += [Text(f"Note: {caveat}", style="yellow") for caveat in prediction.caveats]
    return Group(*lines)


def _failed(prediction: Prediction) -> list[str]:
    """What failed first. Running out of memory is told by the verdict on memory."""
    if not prediction.failures or prediction.memory.fits is False:
        return []
    more = len(prediction.failures) - 1
    others = f" {more} other rank{'s' * (more != 1)} failed, too." if more else ""
    return [
        f"THE JOB FAILED: {prediction.failures[0]}.{others} All figures below describe what it did until then, not a healthy run."
    ]


def _compiled(compiled: Compiled) -> str:
    graphs = f"{compiled.graphs} graph{'s' * (compiled.graphs != 1)}"
    kernels = (
        f"{compiled.triton_kernels_per_step:,} Triton kernel{'s' * (compiled.triton_kernels_per_step != 1)} per step"
    )
    took = wording.seconds(compiled.compile_s)
    return f"torch.compile: {graphs}, {kernels}. Compiling took {took} on this machine; no time above includes it."


def _title(prediction: Prediction) -> str:
    world = prediction.world
    whole = f"{world.size:,} x {prediction.cluster.gpu_name}"
    if world.size > 1:
        network = f", {prediction.cluster.network}" if world.nodes > 1 else ""
        whole += f" ({world.nodes:,} node{'s' * (world.nodes != 1)} of {world.gpus_per_node}{network})"
        whole += f", {ranks_in_words(world.emulated_ranks)} emulated"
        if len(world.emulated_ranks) == 1 < world.size - world.idle_gpus:
            whole += " for all"
    if world.idle_gpus:
        whole += f", {world.idle_gpus:,} idle"
    steps, ended = prediction.trace.steps, prediction.trace.ended
    return f"{whole}: {steps} step{'s' * (steps != 1)}, {ENDINGS.get(ended, ended)}"


class PlainTable(Table):
    """A table whose cells are plain text, never markup: names in them come from the user's program."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        plain = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*plain, style=style, end_section=end_section)


def plain_table(title: str, *columns: str) -> Table:
    """An empty table. A column whose heading begins with '>' contains numbers and is aligned to the right."""
    table = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _headline(prediction: Prediction) -> Padding:
    table = PlainTable(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(style="bold cyan")
    table.add_column(style="dim", overflow="fold")
    figures = [
        *_step_time(prediction),
        *_throughput(prediction),
        *_utilization(prediction),
        *_cost(prediction),
        *_energy(prediction),
    ]
    fullest = prediction.memory.fullest
    if fullest is not None:
        figures.append(("memory", _used(fullest), _verdict(fullest, prediction)))
    for figure in figures:
        table.add_row(*figure)
    return Padding(table, (1, 0, 0, 0))


def _unknown() -> Text:
    return Text("not known", style="yellow")


def _step_time(prediction: Prediction) -> list[Figure]:
    if prediction.step_time_s is not None:
        low, high = prediction.step_time_range_s or (prediction.step_time_s,) * 2
        remark = f"plausible range {wording.seconds(low)} to {wording.seconds(high)}"
        if prediction.warm_up_s:
            remark += f"; start-up and first step take {wording.seconds(prediction.warm_up_s)}"
        return [("step time", wording.seconds(prediction.step_time_s), remark), *_whole_step(prediction)]
    why = (
        "the job would hang"
        if prediction.hangs
        else f"the program did not complete an optimizer step. If it trains, {HOW_TO_MARK}"
    )
    figures: list[Figure] = [("step time", _unknown(), why)]
    if prediction.recorded_s and prediction.trace.ended != "failed":
        figures.append(("whole run", wording.seconds(prediction.recorded_s), "all GPU work of the program"))
    return figures


def _whole_step(prediction: Prediction) -> list[Figure]:
    """The step with its data loading, where that makes a difference."""
    loading, step = noticed_loading(prediction), prediction.step_time_s
    if loading is None or not step:
        return []
    remarks = []
    if loading.wait_s:
        who = f"{loading.workers} worker{'s' * (loading.workers != 1)}" if loading.workers else "no workers"
        remarks.append(f"a batch takes {wording.seconds(loading.batch_s)} on this host, with {who}")
    if loading.pageable_s >= (NOTICED - 1) * step:
        copied = wording.size(loading.pageable_bytes_per_step)
        remarks.append(f"copying {copied} that is not pinned takes {wording.seconds(loading.pageable_s)} longer")
    return [("with data loading", wording.seconds(loading.whole_step_s), "; ".join(remarks))]


def _throughput(prediction: Prediction) -> list[Figure]:
    work = prediction.throughput
    figures: list[Figure] = []
    if prediction.tokens_per_s and prediction.tokens_per_s_per_gpu:
        per_gpu, per_step = wording.count(prediction.tokens_per_s_per_gpu), wording.count(work.tokens_per_step)
        remark = f"{per_gpu} per GPU; {per_step} per step ({work.detail})"
        figures.append(("throughput", f"{wording.count(prediction.tokens_per_s)} tokens/s", remark))
    if prediction.samples_per_s:
        remark = f"{wording.count(work.samples_per_step)} per step" + ("" if figures else f" ({work.detail})")
        name = "" if figures else "throughput"
        figures.append((name, f"{wording.count(prediction.samples_per_s)} samples/s", remark))
    if work.source == "unknown" and prediction.step_time_s:
        figures.append(("throughput", _unknown(), work.detail))
    return figures


def _utilization(prediction: Prediction) -> list[Figure]:
    if prediction.mfu is None or prediction.hfu is None or not prediction.flops:
        return []
    peak = f"{prediction.flops.peak_flops_per_gpu / 1e12:,.0f} TFLOP/s, the {prediction.flops.dtype} peak"
    remark = f"HFU {wording.share(prediction.hfu)}; of {peak}; {wording.flops(prediction.flops.model)} per step"
    return [("MFU", wording.share(prediction.mfu), remark)]


def _cost(prediction: Prediction) -> list[Figure]:
    cost = prediction.cost
    if cost is None:
        missing = "there is no price for this GPU: give one with --price-per-gpu-hour"
        return [("cost", _unknown(), missing)] if prediction.step_time_s else []
    if cost.usd_per_1k_steps is None or cost.usd_per_hour is None:
        return []
    remarks = [f"{wording.money(cost.usd_per_hour)} per hour ({cost.price})"]
    if cost.usd_per_million_tokens is not None:
        remarks.append(f"{wording.money(cost.usd_per_million_tokens)} per million tokens")
    if cost.usd_per_epoch is not None:
        steps = prediction.throughput.steps_per_epoch
        remarks.append(f"{wording.money(cost.usd_per_epoch)} per epoch of {steps:,} steps")
    return [("cost", f"{wording.money(cost.usd_per_1k_steps)} per 1,000 steps", "; ".join(remarks))]


def _energy(prediction: Prediction) -> list[Figure]:
    energy = prediction.energy
    if energy is None:
        return []
    value = f"{wording.energy(energy.kwh_per_1k_steps)} per 1,000 steps"
    return [("energy", value, f"{energy.average_w_per_gpu:,.0f} W per GPU on average")]


def _used(memory: DeviceMemory) -> str:
    return wording.size(memory.peak_reserved_bytes + memory.outside_allocator_bytes)


def _verdict(memory: DeviceMemory, prediction: Prediction) -> str:
    """Whether the GPU's memory is enough, as in "of 79.2 GiB: fits, 43.3 GiB free on the fullest GPU"."""
    free = memory.capacity_bytes - memory.peak_reserved_bytes - memory.outside_allocator_bytes
    verdict = f"of {wording.size(memory.capacity_bytes)}: "
    if memory.fits and prediction.memory.depends_on:
        return verdict + memory_in_words(prediction.memory)
    if memory.fits:
        fullest = " on the fullest GPU" if prediction.world.size > 1 else ""
        return verdict + f"fits, {wording.size(free)} free{fullest}"
    if memory.fits is None:
        if prediction.trace.ended in ("failed", "hung"):
            return verdict + "not known to fit, because the program did not run to its end"
        return verdict + "not known to fit, because only an emulation on this GPU can show it"
    verdict += "DOES NOT FIT"
    if memory.out_of_memory_bytes is not None:
        wanted = wording.size(memory.out_of_memory_bytes)
        validates = memory.out_of_memory_phase == "validation"
        where = "validation" if validates else f"step {memory.out_of_memory_step}"
        verdict += f": {where} ran out of memory when it requested {wanted} more"
    return verdict


def _step_bar(time: Time) -> Padding:
    """The parts of a step, as a bar and as a legend."""
    parts = [(name, style, getattr(time, field)) for field, name, style in PARTS]
    total = sum(seconds for _, _, seconds in parts) or 1.0
    bar, legend = Text(), Text()
    for name, style, seconds in parts:
        bar.append("█" * round(BAR * seconds / total), style=style)
        if seconds / total >= 0.001:
            legend.append("■ ", style=style)
            legend.append(f"{name} {wording.share(seconds / total)}  ")
    if time.communication_s > 0:
        hidden = wording.percent(time.hidden_communication_s / time.communication_s)
        legend.append(f"({hidden} of {wording.seconds(time.communication_s)} communication is hidden)", style="dim")
    return Padding(Group(bar, legend), (1, 0, 1, 0))


def _ranks(prediction: Prediction) -> Table:
    table = plain_table(
        "Emulated ranks",
        ">rank",
        "stands for",
        ">step",
        ">compute",
        ">exposed",
        ">waiting",
        ">host",
        ">allocated",
        ">reserved",
        "",
    )
    times = {rank.rank: rank for rank in prediction.ranks}
    for memory in prediction.memory.ranks[:MOST_RANKS]:
        fits = "" if memory.fits else "does not fit" if memory.fits is False else "not known to fit"
        sizes = wording.size(memory.peak_allocated_bytes), wording.size(memory.peak_reserved_bytes)
        others = prediction.world.stands_for.get(memory.rank, "")
        table.add_row(str(memory.rank), others, *_shares(times.get(memory.rank)), *sizes, fits)
    if len(prediction.memory.ranks) > MOST_RANKS:
        table.caption = f"and {len(prediction.memory.ranks) - MOST_RANKS} more"
    return table


def _shares(time: RankTime | None) -> list[str]:
    """A rank's step time, and the shares of its parts."""
    if time is None:
        return ["-"] * 5
    parts = time.compute_s, time.exposed_communication_s, time.waiting_s, time.host_s
    return [wording.seconds(time.step_time_s), *(wording.percent(part / time.step_time_s) for part in parts)]


def _memory(memory: DeviceMemory, prediction: Prediction) -> Table:
    fits = prediction.memory.fits if memory.fits else memory.fits
    style = "green" if fits else "yellow" if fits is None else "bold red"
    several = len(prediction.memory.ranks) > 1
    table = PlainTable(
        title=f"Memory of the fullest GPU (rank {memory.rank}, GPU {memory.device})" if several else "Memory",
        title_justify="left", title_style="bold",
        caption=Text(f"{_used(memory)} {_verdict(memory, prediction)}\n", style=style),
        caption_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False,
    )  # fmt: skip
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    table.add_row("peak allocated", wording.size(memory.peak_allocated_bytes), _peak_place(memory))
    for category, count in memory.by_category_bytes.items():
        if count:
            name = f"  {category.replace('_', ' ')}"
            table.add_row(name, wording.size(count), _category_remark(memory, category, count))
    table.add_row("peak reserved", wording.size(memory.peak_reserved_bytes), "held by PyTorch's caching allocator")
    for name, count in memory.outside_bytes.items():
        if count:
            table.add_row(name, wording.size(count), "an estimate, outside PyTorch")
    table.add_row("capacity", wording.size(memory.capacity_bytes), "")
    return table


def _peak_place(memory: DeviceMemory) -> str:
    """When and where the peak is reached."""
    validates = memory.peak_phase == "validation"
    when = wording.moment(memory.peak_step, memory.peak_phase if validates else None)
    places = ["" if validates else memory.peak_phase, memory.peak_module, wording.short_source(memory.peak_source)]
    return ": ".join(part for part in (f"reached in {when}", ", ".join(place for place in places if place)) if part)


def _category_remark(memory: DeviceMemory, category: str, count: int) -> str:
    """The category's share of the peak, and where its largest part was allocated."""
    remark = wording.percent(count / memory.peak_allocated_bytes)
    largest = next((row for row in memory.at_peak if row.category == category), None)
    if largest is None:
        return remark
    place = ", ".join(part for part in (largest.module, wording.short_source(largest.source)) if part)
    if not place:
        return remark
    part = "mostly" if largest.bytes > count / 2 else f"{wording.size(largest.bytes)} of it"
    return f"{remark}, {part} from {place}"


def _validation(prediction: Prediction) -> Table:
    table = plain_table(
        "Validation, which is not part of the step time",
        "loop", ">batches", ">batch", ">whole loop", ">every", ">adds", ">peak allocated",
    )  # fmt: skip
    step = prediction.step_time_s
    for loop in prediction.validation[:MOST_ROWS]:
        batches = "-" if loop.batches is None else f"{loop.batches:,}"
        every = "-" if loop.every_steps is None else f"{wording.count(loop.every_steps)} steps"
        adds = (
            wording.share(loop.loop_s / loop.every_steps / step) if loop.loop_s and loop.every_steps and step else "-"
        )
        times = wording.seconds(loop.batch_s), wording.seconds(loop.loop_s)
        table.add_row(loop.name, batches, *times, every, adds, wording.size(loop.peak_allocated_bytes))
    return table


def _modules(prediction: Prediction) -> Table:
    table = plain_table(
        "GPU time per step by module", "module", ">forward", ">backward", ">recomputed", ">optimizer", ">share"
    )
    whole = sum(module.seconds for module in prediction.top_modules) or 1.0
    for module in prediction.top_modules[:MOST_TOP]:
        recomputed, optimizer = (
            wording.seconds(part) if part else "-" for part in (module.recompute_s, module.optimizer_s)
        )
        passes = wording.seconds(module.forward_s), wording.seconds(module.backward_s)
        table.add_row(module.name, *passes, recomputed, optimizer, wording.percent(module.seconds / whole))
    return table


def _kernels(prediction: Prediction) -> Table:
    table = plain_table("GPU time per step by op", "op", "inputs", ">calls", ">time", "source of the time")
    for kernel in prediction.top_kernels[:MOST_TOP]:
        name = kernel.name.removeprefix("_scaled_dot_product_")
        table.add_row(name, kernel.shapes, f"{kernel.calls:,}", wording.seconds(kernel.seconds), kernel.provenance)
    return table


def _communication(prediction: Prediction) -> Table:
    table = plain_table("Communication per step", "op", "group", ">ranks", ">calls", ">data", ">time", ">GB/s")
    for row in prediction.communication[:MOST_ROWS]:
        rate = f"{row.bytes_per_s / 1e9:,.0f}" if row.bytes_per_s else "-"
        counts = f"{row.group_size:,}", f"{row.calls:,}"
        group = f"{row.backend} {row.group}"
        table.add_row(row.op, group, *counts, wording.size(row.bytes), wording.seconds(row.seconds), rate)
    return table


def _confidence(prediction: Prediction) -> str:
    known, assumed = prediction.confidence, prediction.assumptions
    assert known is not None
    shares = ", ".join(
        f"{wording.percent(getattr(known, name))} {meaning}"
        for name, meaning in PROVENANCE.items()
        if getattr(known, name) >= 0.005
    )
    calibration = f"; calibration '{assumed.calibration}'" if assumed.calibration else ""
    if assumed.calibrated_by:
        calibration += f", fitted to {assumed.calibrated_by}"
    return (
        f"How well times are known: {shares}. Assumptions: host times {assumed.host}; {assumed.clocks} clocks; "
        f"flash attention of generation {assumed.attention}{calibration}."
    )
