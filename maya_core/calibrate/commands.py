"""The commands of `maya calibrate`, which make a calibration from your own measurements.

The readers of measurements are in this folder; how a calibration changes predictions is defined in `predictor.calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from maya_core.command_options import HardwareOption, option
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu, find_network, use_hardware_file
from maya_core.hardware.cluster import cluster
from maya_core.predictor.calibration import (
    Calibration,
    Collective,
    Measured,
    Origin,
    calibrations,
    path_of,
    read_calibration,
    remove_calibration,
    write_calibration,
)
from maya_core.predictor.profile import user_folder

app = typer.Typer(
    help="Corrects predictions by your own measurements: profiler traces, nccl-tests, micro-benchmarks.",
    no_args_is_help=True,
)

NameOption = Annotated[str | None, typer.Option(help="The name of the calibration. Default: the name of the GPU.")]
GpuOption = Annotated[str | None, typer.Option(help="The GPU, if the measurements do not name it.")]
ReplaceOption = Annotated[bool, typer.Option("--replace", help="Overwrite the calibration of that name.")]
AddOption = Annotated[bool, typer.Option("--add", help="Add to the calibration of that name.")]
NetworkOption = Annotated[
    str | None,
    option(
        "network", "The network between nodes. `maya gpus --networks` lists them. Default: the one of the usual node."
    ),
]


@app.command()
def kineto(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces of torch.profiler with record_shapes=True, .json or .json.gz.")
    ],
    gpu: GpuOption = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs per node of the run. Default: those of the usual node.")
    ] = None,
    network: NetworkOption = None,
    name: NameOption = None,
    add: AddOption = False,
    replace: ReplaceOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Calibrates from profiler traces of a real run, of one rank or of several."""
    from maya_core.calibrate import profiler_trace as reader

    use_hardware_file(hardware)
    loaded = [reader.load(path) for path in traces]
    for path, trace in zip(traces, loaded, strict=True):
        reader.refuse_predicted(path, trace)
    names = [each for trace in loaded for each in reader.device_names(trace)]
    board = reader.agreed_gpu(names, gpu, ", ".join(str(path) for path in traces))
    _check_name(name or board.name, add, replace)
    usual = cluster(board.name)
    found = reader.measure(
        traces,
        board,
        gpus_per_node=gpus_per_node or usual.gpus_per_node,
        network=find_network(network).name if network else usual.network.name,
        loaded=loaded,
    )
    console = Console()
    _print_counts(console, found.counts)
    if not found.measured and not found.collectives:
        raise MayaError(
            f"nothing in {', '.join(str(path) for path in traces)} could be used.",
            "Profile a few steps of eager PyTorch with record_shapes=True; kernels that torch.compile generates are not recognized.",
        )
    sources = [Origin(kind="kineto", name=path.name, note=", ".join(sorted(set(names)))) for path in traces]
    _keep(console, name or board.name, board.name, sources, found.measured, found.collectives, add, replace)


def _print_counts(console: Console, counts: object) -> None:
    from maya_core.calibrate.profiler_trace import Counts

    assert isinstance(counts, Counts)
    console.print(f"{counts.kernels:,} kernels and copies, {counts.used:,} used", highlight=False)
    lines = [
        (counts.warm_up, "were the first of their shape (warm-up)"),
        (counts.contended, "ran at the same time as NCCL's kernels, which slow them down"),
        (counts.pageable, "copied memory that was not pinned"),
        (counts.without_op, "were not launched by an ATen op (CUDA graphs, Triton, other libraries)"),
        *((number, reason) for reason, number in counts.unknown.most_common()),
    ]
    if counts.unpaired:
        worst = ", ".join(f"{op} {number}" for op, number in counts.unpaired.most_common(4))
        lines.append((counts.unpaired.total(), f"are not the kernels that Maya expects from their op ({worst})"))
    for number, reason in lines:
        if number:
            console.print(f"  [dim]{number:>7,}[/dim] {reason}", highlight=False, soft_wrap=True)
    if counts.nccl:
        described = counts.nccl - counts.nccl_untold
        console.print(f"{counts.nccl:,} NCCL kernels, {described:,} of them with op, sizes and ranks", highlight=False)
    if counts.tf32:
        console.print(
            f"{counts.tf32:,} float32 products ran in TF32 and count as TF32: they apply to programs that allow it.",
            soft_wrap=True,
        )
    if not counts.shapes:
        console.print(
            "[yellow]The trace has no shapes, so only collectives are used. Profile with record_shapes=True.[/yellow]"
        )
    elif not counts.strides:
        console.print(
            "[yellow]The trace has no strides (torch before 2.2): tensors are assumed to be contiguous, so layouts of products may be wrong.[/yellow]",
            soft_wrap=True,
        )


@app.command()
def nccl(
    outputs: Annotated[list[Path], typer.Argument(help="The output of all_reduce_perf and other nccl-tests.")],
    gpu: GpuOption = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Needed if the file does not list its ranks.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Needed if the file does not list its ranks.")
    ] = None,
    network: NetworkOption = None,
    op: Annotated[str | None, typer.Option(help="The test, if the file does not name it: all_reduce ...")] = None,
    name: NameOption = None,
    add: AddOption = False,
    replace: ReplaceOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Calibrates from the output of nccl-tests, within a node or across several."""
    from maya_core.calibrate.nccl_tests import read

    use_hardware_file(hardware)
    console = Console()
    rows: list[Collective] = []
    boards = set()
    for path in outputs:
        found = read(path, gpu=gpu, nodes=nodes, gpus_per_node=gpus_per_node, network=network, op=op)
        rows += found.collectives
        boards.add(found.gpu)
        for note in found.notes:
            console.print(f"[yellow]{path.name}: {note}[/yellow]", highlight=False)
    if len(boards) > 1:
        raise MayaError(
            f"the files were measured on several GPUs: {', '.join(sorted(boards))}.", "Calibrate one GPU at a time."
        )
    board = boards.pop()
    sources = [Origin(kind="nccl-tests", name=path.name) for path in outputs]
    _keep(console, name or board, board, sources, [], rows, add, replace)


@app.command()
def measure(
    gpu: Annotated[str, typer.Option(help="The GPU's name in the catalog; 'auto' asks the driver.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes, shorter runs: a minute or two.")] = False,
    name: NameOption = None,
    add: AddOption = False,
    replace: ReplaceOption = False,
    hardware: HardwareOption = None,
) -> None:
    """Calibrates by micro-benchmarks on the GPU of this machine."""
    from maya_core.calibrate.measure import require_gpu

    use_hardware_file(hardware)
    driver_name = require_gpu()
    import torch

    from maya_core.calibrate.cases import cases
    from maya_core.calibrate.measure import EventTimer, run
    from maya_core.calibrate.profiler_trace import agreed_gpu

    board = agreed_gpu([driver_name], None if gpu == "auto" else gpu, "this machine's GPU")
    _check_name(name or board.name, add, replace)
    torch.backends.cuda.matmul.allow_tf32 = False  # so that float32 means float32
    every = list(cases(quick=quick))
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(every))

        def next_case(case: str) -> None:
            bar.update(task, description=f"{case:<48.48}", advance=1)

        timer = EventTimer(board.l2_bytes, sustain_s=0.1 if quick else 1.0)
        outcome = run(every, board, timer, memory_bytes=torch.cuda.mem_get_info()[0], progress=next_case)
    for reason, number in outcome.skipped.most_common():
        console.print(f"  [dim]{number:>7,}[/dim] {reason}", highlight=False)
    if outcome.slowdown is not None:
        console.print(
            f"Under sustained load, products and attention take {outcome.slowdown:.2f} times as long as in a burst."
        )
    note = f"torch {torch.__version__}, {len(outcome.measured)} kernels" + ", quick" * quick
    sources = [Origin(kind="measure", name=driver_name, note=note)]
    _keep(console, name or board.name, board.name, sources, outcome.measured, [], add, replace)


@app.command("list")
def list_all() -> None:
    """Lists your calibrations, and which of them are used."""
    console, found = Console(), calibrations()
    if not found:
        console.print(f"No calibrations in {user_folder()}.", highlight=False, soft_wrap=True)
        return
    table = Table()
    for title in ("name", "gpu", "created", "kernels", "factors", "collectives", "used"):
        table.add_column(title, justify="right" if title in ("kernels", "factors", "collectives") else "left")
    seen: set[str] = set()
    for each in found:
        used = "yes" if each.gpu not in seen else "no, a newer one exists"
        seen.add(each.gpu)
        table.add_row(
            each.name,
            each.gpu,
            each.created.strftime("%Y-%m-%d %H:%M"),
            f"{len(each.measured):,}",
            f"{len(each.factors):,}",
            f"{len(each.collectives):,}",
            used,
        )
    console.print(table)
    console.print(f"[dim]{user_folder()}[/dim]", highlight=False, soft_wrap=True)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The name of the calibration; `maya calibrate list` lists them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the file itself.")] = False,
) -> None:
    """Shows the content of a calibration, and how much it helps."""
    path = path_of(name)
    found = read_calibration(path) if path.exists() else None
    if found is None:
        known = ", ".join(each.name for each in calibrations()) or "none"
        raise MayaError(f"there is no calibration '{name}' in {user_folder()}.", f"Your calibrations are: {known}.")
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    console = Console()
    console.print(f"{found.name}: {find_gpu(found.gpu).driver_name}, {found.created:%Y-%m-%d %H:%M}", highlight=False)
    for source in found.sources:
        console.print(f"  from {source.kind} {source.name}" + f" ({source.note})" * bool(source.note), highlight=False)
    _print(console, found)


@app.command()
def remove(name: Annotated[str, typer.Argument(help="The name of the calibration.")]) -> None:
    """Deletes one of your calibrations."""
    Console().print(f"Removed {remove_calibration(name)}.", highlight=False, soft_wrap=True)


def _check_name(name: str, add: bool, replace: bool) -> None:
    """Checks, before any work is done, that the calibration may be written."""
    if add and replace:
        raise MayaError("--add and --replace do not work together.", "Give one of them.")
    path = path_of(name)
    if path.exists() and not add and not replace:
        raise MayaError(
            f"a calibration '{name}' already exists ({path}).",
            "Give --add to add these measurements to it, --replace to overwrite it, or --name for a new one.",
        )


def _keep(
    console: Console,
    name: str,
    gpu: str,
    sources: list[Origin],
    measured: list[Measured],
    collectives: list[Collective],
    add: bool,
    replace: bool,
) -> None:
    from maya_core.predictor.calibration_factors import make, merge

    _check_name(name, add, replace)
    older = read_calibration(path_of(name)) if add and path_of(name).exists() else None
    if older is not None and older.gpu != gpu:
        raise MayaError(
            f"'{name}' is a calibration of {older.gpu}, but these measurements are of {gpu}.", "Give another --name."
        )
    made = merge(older, sources, measured, collectives) if older else make(name, gpu, sources, measured, collectives)
    path = write_calibration(made, replace=add or replace)
    _print(console, made)
    if older is not None and older.runs is not None:
        console.print(
            "[yellow]Its factors of actual runs were fitted without these measurements: fit them to your actual runs again (`maya help calibrate`).[/yellow]",
            soft_wrap=True,
        )
    console.print(f"Written: {path}. Predictions for {gpu} use it from now on.", highlight=False, soft_wrap=True)
    others = [each.name for each in calibrations(gpu) if each.name != name]
    if others:
        console.print(f"[yellow]These older calibrations are not used any more: {', '.join(others)}.[/yellow]")


def _print(console: Console, found: Calibration) -> None:
    if found.measured:
        console.print(_kernel_table(found))
        _print_unused(console, found)
        if found.checks:
            rows = sum(check.rows for check in found.checks)
            before, after = (
                sum(getattr(check, which) * check.rows for check in found.checks) / rows
                for which in ("before_pct", "after_pct")
            )
            console.print(
                f"Error on {rows} held-out shapes: {before:.1f} % before, {after:.1f} % after.",
                highlight=False,
            )
    if found.collectives:
        console.print(_collective_table(found.collectives))
    if found.runs:
        console.print(
            f"{found.runs}: error of step time {found.runs.before_pct:.1f} % before, {found.runs.after_pct:.1f} % after, each run predicted from the others.",
            highlight=False,
            soft_wrap=True,
        )


def _print_unused(console: Console, found: Calibration) -> None:
    by_reason: dict[str, list[str]] = {}
    for each in found.unused:
        by_reason.setdefault(each.reason, []).append(f"{each.family} {each.model}")
    if by_reason:
        console.print("These have no factor, so only the measured shapes are corrected:", highlight=False)
    for reason, kernels in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        console.print(f"  [dim]{reason}:[/dim] {', '.join(kernels)}", highlight=False, soft_wrap=True)


def _kernel_table(found: Calibration) -> Table:
    table = Table()
    for title in ("kernels", "shapes", "runs", "factor", "held-out", "error before", "after"):
        table.add_column(
            title, justify="left" if title in ("kernels", "factor") else "right", no_wrap=title == "kernels"
        )
    checks = {(check.family, check.model): check for check in found.checks}
    groups: dict[tuple[str, str], list[Measured]] = {}
    for row in found.measured:
        groups.setdefault((row.family, row.model), []).append(row)
    for key, rows in groups.items():
        factor, check = found.factor_of.get(key), checks.get(key)
        text = "-"
        if factor is not None:
            text = f"{factor.short:.2f}"
            if not math.isclose(factor.short, factor.long, rel_tol=0.005):
                text += f" to {factor.long:.2f}"
        table.add_row(
            " ".join(key),
            f"{len(rows):,}",
            f"{sum(row.samples for row in rows):,}",
            text,
            *((f"{check.rows}", f"{check.before_pct:.1f} %", f"{check.after_pct:.1f} %") if check else ("", "", "")),
        )
    return table


def _collective_table(rows: Iterable[Collective]) -> Table:
    table = Table()
    for title in ("collective", "ranks", "network", "sizes", "fastest", "slowest"):
        table.add_column(title)
    groups: dict[tuple[str, int, int, str], list[Collective]] = {}
    for row in rows:
        groups.setdefault((row.op, row.nodes, row.ranks_per_node, row.network), []).append(row)
    for (op, nodes, each, network), found in groups.items():
        sizes = sorted(row.bytes for row in found)
        times = sorted(row.seconds for row in found)
        table.add_row(
            op,
            f"{nodes} x {each}",
            network or "within the node",
            f"{len(sizes)}: {_size(sizes[0])} to {_size(sizes[-1])}",
            _time(times[0]),
            _time(times[-1]),
        )
    return table


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.3g} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
