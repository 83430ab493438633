"""The prediction for a terminal: what was asked first, then where it comes from."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from maya_core.report import wording
from maya_core.report.prediction import Compiled, DeviceMemory, Prediction, Time
from maya_core.trace.call_names import ranks_in_words

MOST_RANKS, MOST_ROWS, MOST_TOP, BAR = 16, 8, 6, 44

PARTS = (  # of a step, with what they are called and drawn in
    ("compute_s", "compute", "green"),
    ("exposed_communication_s", "exposed communication", "red"),
    ("waiting_s", "waiting for other ranks", "yellow"),
    ("copy_s", "copies", "blue"),
    ("host_s", "host", "magenta"),
)


def render(prediction: Prediction) -> Any:
    lines: list[Any] = [Text(_title(prediction), style="bold")]
    lines += [Text(hang, style="bold red") for hang in prediction.hangs]
    lines.append(_headline(prediction))
    if prediction.time is not None and prediction.step_time_s:
        lines.append(_where(prediction.time))
    if len(prediction.world.emulated_ranks) > 1:
        lines.append(_ranks(prediction))
    fullest = prediction.memory.fullest
    if fullest is not None:
        lines.append(_memory(fullest, len(prediction.memory.ranks) > 1))
    if prediction.top_modules and prediction.step_time_s:
        lines += [_modules(prediction), _kernels(prediction)]
    if prediction.communication:
        lines.append(_communication(prediction))
    if prediction.confidence is not None:
        lines.append(Text(_known(prediction), style="dim"))
    if prediction.compiled is not None:
        lines.append(Text(_compiled(prediction.compiled), style="dim"))
    lines += [Text(f"Note: {caveat}", style="yellow") for caveat in prediction.caveats]
    return Group(*lines)


def _compiled(compiled: Compiled) -> str:
    graphs = f"{compiled.graphs} graph{'s' * (compiled.graphs != 1)}"
    kernels = f"{compiled.triton_kernels_per_step:,} Triton kernels a step"
    return f"Compiled: {graphs}, {kernels}. Compiling took {wording.seconds(compiled.compile_s)} here and is in none of these times."


def _title(prediction: Prediction) -> str:
    world = prediction.world
    whole = f"{world.size:,} x {prediction.cluster.gpu_name}"
    if world.size > 1:
        joined = f", {prediction.cluster.network}" if world.nodes > 1 else ""
        whole += f" ({world.nodes:,} node{'s' * (world.nodes != 1)} of {world.gpus_per_node}{joined})"
        whole += f", emulated by {ranks_in_words(world.emulated_ranks)}"
    steps = prediction.trace.steps
    return f"{whole}: {steps} step{'s' * (steps != 1)}, {prediction.trace.ended}"


class PlainTable(Table):
    """Cells are text, whatever they look like: names in them come from the user's program."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def plain_table(title: str, *columns: str) -> Table:
    """Columns whose heading begins with '>' are numbers."""
    table = PlainTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _headline(prediction: Prediction) -> Any:
    table = PlainTable(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(style="bold cyan")
    table.add_column(style="dim", overflow="fold")
    for row in _figures(prediction):
        table.add_row(*row)
    return Padding(table, (1, 0, 0, 0))


def _figures(prediction: Prediction) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = []
    if prediction.step_time_s is None:
        why = "it would hang" if prediction.hangs else "no optimizer step was seen to its end"
        rows.append(("step time", Text("not known", style="yellow"), why))
        if prediction.recorded_s and prediction.trace.ended != "failed":
            rows.append(("whole run", wording.seconds(prediction.recorded_s), "all that the program asked of its GPUs"))
    else:
        low, high = prediction.step_time_range_s or (prediction.step_time_s,) * 2
        warm = (
            f"; the first one with its start-up {wording.seconds(prediction.warm_up_s)}" if prediction.warm_up_s else ""
        )
        rows.append(
            (
                "step time",
                wording.seconds(prediction.step_time_s),
                f"{wording.seconds(low)} to {wording.seconds(high)}{warm}",
            )
        )
    work = prediction.throughput
    if prediction.tokens_per_s and prediction.tokens_per_s_per_gpu:
        rows.append(
            (
                "throughput",
                f"{wording.count(prediction.tokens_per_s)} tokens/s",
                f"{wording.count(prediction.tokens_per_s_per_gpu)} per GPU; {wording.count(work.tokens_per_step or 0)} a step: {work.detail}",
            )
        )
    if prediction.samples_per_s:
        detail = "" if prediction.tokens_per_s else f": {work.detail}"
        rows.append(
            (
                "" if prediction.tokens_per_s else "throughput",
                f"{wording.count(prediction.samples_per_s)} samples/s",
                f"{wording.count(work.samples_per_step or 0)} a step{detail}",
            )
        )
    if work.source == "unknown" and prediction.step_time_s:
        rows.append(("throughput", Text("not known", style="yellow"), work.detail))
    if prediction.mfu is not None and prediction.hfu is not None and prediction.flops:
        peak = f"{prediction.flops.dtype} peak of {prediction.flops.peak_flops_per_gpu / 1e12:,.0f} TFLOP/s"
        rows.append(
            (
                "MFU",
                f"{prediction.mfu:.1%}",
                f"HFU {prediction.hfu:.1%}, of the {peak}; {wording.flops(prediction.flops.model)} a step",
            )
        )
    rows += _money(prediction)
    fullest = prediction.memory.fullest
    if fullest is not None:
        rows.append(
            (
                "memory",
                _used(fullest),
                _verdict(fullest),
            )
        )
    return rows


def _money(prediction: Prediction) -> list[tuple[str, Any, str]]:
    rows: list[tuple[str, Any, str]] = []
    cost, energy = prediction.cost, prediction.energy
    if cost is not None and cost.usd_per_1k_steps is not None and cost.usd_per_hour is not None:
        more = [f"{wording.money(cost.usd_per_hour)} an hour ({cost.price})"]
        if cost.usd_per_million_tokens is not None:
            more.append(f"{wording.money(cost.usd_per_million_tokens)} a million tokens")
        if cost.usd_per_epoch is not None:
            more.append(
                f"{wording.money(cost.usd_per_epoch)} an epoch of {prediction.throughput.steps_per_epoch:,} steps"
            )
        rows.append(("cost", f"{wording.money(cost.usd_per_1k_steps)} per 1,000 steps", "; ".join(more)))
    elif cost is None and prediction.step_time_s:
        rows.append(("cost", Text("not known", style="yellow"), "no price for this GPU: give --price-per-gpu-hour"))
    if energy is not None:
        rows.append(
            (
                "energy",
                f"{wording.energy(energy.kwh_per_1k_steps)} per 1,000 steps",
                f"{energy.average_w_per_gpu:,.0f} W a GPU",
            )
        )
    return rows


def _used(memory: DeviceMemory) -> str:
    return wording.size(memory.peak_reserved_bytes + memory.outside_allocator_bytes)


def _verdict(memory: DeviceMemory) -> str:
    free = memory.capacity_bytes - memory.peak_reserved_bytes - memory.outside_allocator_bytes
    if memory.fits:
        return f"of {wording.size(memory.capacity_bytes)}: fits, {wording.size(free)} free at the most fullest"
    if memory.fits is None:
        return f"of {wording.size(memory.capacity_bytes)}: not known to fit, the program did not get to its end on this GPU"
    if memory.out_of_memory_bytes is None:
        return f"of {wording.size(memory.capacity_bytes)}: DOES NOT FIT"
    return f"of {wording.size(memory.capacity_bytes)}: DOES NOT FIT, out of memory asking for {wording.size(memory.out_of_memory_bytes)} in step {memory.out_of_memory_step}"


def _where(time: Time) -> Any:
    """The step as a bar, and in words."""
    parts = [(name, style, getattr(time, field)) for field, name, style in PARTS]
    total = sum(seconds for _, _, seconds in parts) or 1.0
    bar, legend = Text(), Text()
    for name, style, seconds in parts:
        bar.append("█" * round(BAR * seconds / total), style=style)
        if seconds / total >= 0.001:
            legend.append("■ ", style=style)
            legend.append(f"{name} {seconds / total:.1%}  ")
    if time.communication_s > 0:
        legend.append(
            f"({time.hidden_communication_s / time.communication_s:.0%} of the {wording.seconds(time.communication_s)} of communication is hidden)",
            style="dim",
        )
    return Padding(Group(bar, legend), (1, 0, 1, 0))


def _ranks(prediction: Prediction) -> Table:
    table = plain_table(
        "Ranks", ">rank", ">step", ">compute", ">exposed", ">waiting", ">host", ">allocated", ">reserved", ""
    )
    times = {rank.rank: rank for rank in prediction.ranks}
    for memory in prediction.memory.ranks[:MOST_RANKS]:
        time = times.get(memory.rank)
        shares = (
            [wording.seconds(time.step_time_s)]
            + [
                f"{getattr(time, name) / time.step_time_s:.0%}"
                for name in ("compute_s", "exposed_communication_s", "waiting_s", "host_s")
            ]
            if time
            else ["-"] * 5
        )
        fits = "" if memory.fits else "does not fit" if memory.fits is False else "not known to fit"
        table.add_row(
            str(memory.rank),
            *shares,
            wording.size(memory.peak_allocated_bytes),
            wording.size(memory.peak_reserved_bytes),
            fits,
        )
    if len(prediction.memory.ranks) > MOST_RANKS:
        table.caption = f"and {len(prediction.memory.ranks) - MOST_RANKS} more"
    return table


def _memory(memory: DeviceMemory, several: bool) -> Table:
    style = "green" if memory.fits else "yellow" if memory.fits is None else "bold red"
    table = PlainTable(
        title=f"Memory of rank {memory.rank}, GPU {memory.device}, the most fullest" if several else "Memory",
        title_justify="left", title_style="bold", caption=Text(f"{_used(memory)} {_verdict(memory)}\n", style=style),
        caption_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False,
    )  # fmt: skip
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    where = ", ".join(
        part
        for part in (
            f"step {memory.peak_step}",
            memory.peak_phase,
            memory.peak_module,
            wording.short_source(memory.peak_source),
        )
        if part
    )
    table.add_row("peak allocated", wording.size(memory.peak_allocated_bytes), f"made by {where}")
    for category, count in memory.by_category_bytes.items():
        if count:
            largest = next((row for row in memory.at_peak if row.category == category), None)
            told = f"{count / memory.peak_allocated_bytes:.0%}"
            if largest is not None:
                place = " ".join(part for part in (largest.module, wording.short_source(largest.source)) if part)
                told += (
                    f", most of it {place}"
                    if place and largest.bytes > count / 2
                    else f", {wording.size(largest.bytes)} {place}"
                    if place
                    else ""
                )
            table.add_row(f"  {category.replace('_', ' ')}", wording.size(count), told)
    table.add_row("peak reserved", wording.size(memory.peak_reserved_bytes), "held by PyTorch's caching allocator")
    for name, count in memory.outside_bytes.items():
        if count:
            table.add_row("outside", wording.size(count), name)
    table.add_row("capacity", wording.size(memory.capacity_bytes), "")
    return table


def _modules(prediction: Prediction) -> Table:
    table = plain_table("GPU time by module", "module", ">forward", ">backward", ">recomputed", ">optimizer", ">share")
    whole = sum(module.seconds for module in prediction.top_modules) or 1.0
    for module in prediction.top_modules[:MOST_TOP]:
        again, steps = (wording.seconds(part) if part else "-" for part in (module.recompute_s, module.optimizer_s))
        share = f"{module.seconds / whole:.0%}"
        table.add_row(
            module.name, wording.seconds(module.forward_s), wording.seconds(module.backward_s), again, steps, share
        )
    return table


def _kernels(prediction: Prediction) -> Table:
    table = plain_table("GPU time by kernel", "op", "of", ">calls", ">time", "known")
    for kernel in prediction.top_kernels[:MOST_TOP]:
        name = kernel.name.removeprefix("_scaled_dot_product_")
        table.add_row(name, kernel.shapes, f"{kernel.calls:,}", wording.seconds(kernel.seconds), kernel.provenance)
    return table


def _communication(prediction: Prediction) -> Table:
    table = plain_table("Communication a step", "op", "group", ">ranks", ">calls", ">given", ">time", ">GB/s")
    for row in prediction.communication[:MOST_ROWS]:
        rate = f"{row.bytes_per_s / 1e9:,.0f}" if row.bytes_per_s else "-"
        table.add_row(
            row.op,
            f"{row.backend} {row.group}",
            f"{row.group_size:,}",
            f"{row.calls:,}",
            wording.size(row.bytes),
            wording.seconds(row.seconds),
            rate,
        )
    return table


def _known(prediction: Prediction) -> str:
    known, assumed = prediction.confidence, prediction.assumptions
    assert known is not None
    names = ("measured", "interpolated", "extrapolated", "bound")
    shares = ", ".join(f"{getattr(known, name):.0%} {name}" for name in names if getattr(known, name) >= 0.005)
    calibration = f", calibration '{assumed.calibration}'" if assumed.calibration else ""
    if assumed.calibrated_by:
        calibration += f", calibrated by {assumed.calibrated_by}"
    return f"Known by: {shares}. Host {assumed.host}, clocks {assumed.clocks}, flash attention taken as {assumed.attention}{calibration}."
