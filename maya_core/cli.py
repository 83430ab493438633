"""The `maya` command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu, use_hardware_file
from maya_core.predictor.calibrate import commands as calibrate

HANGS = 3  # exit code of a run whose job would hang

app = typer.Typer(
    name="maya",
    help="What a training job will do to its GPUs, before any GPU is reserved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate.app, name="calibrate")

HardwareOption = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        help="A TOML file with GPUs, nodes, networks and prices of your own. Default: $MAYA_HARDWARE, or maya/hardware.toml in your configuration folder.",
    ),
]


@app.callback()
def main() -> None:
    """Runs unmodified PyTorch programs on emulated GPUs."""


def _steps(value: str) -> int | None:
    if value == "all":
        return None
    if not value.isdigit() or int(value) < 1:
        raise MayaError(
            f"--steps {value}: not a number of steps.",
            "Give a number from 1, or 'all' to let the program run to its end.",
        )
    return int(value)


def _ranks(value: str) -> tuple[int, ...] | None:
    """The ranks to emulate; () for those needed, None for all."""
    if value in ("auto", "all"):
        return () if value == "auto" else None
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise MayaError(f"--ranks {value}: not ranks.", "Give 'auto', 'all', or numbers separated by commas: 0,5,7")
    return tuple(sorted({int(rank) for rank in value.split(",")}))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The command to run, as you would type it: python train.py ...", metavar="-- COMMAND"),
    ],
    gpu: Annotated[str, typer.Option(help="Which GPU to emulate; `maya gpus` lists them.")] = DEFAULT_GPU,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the cluster; torchrun's --nnodes says it as well.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="GPUs of a node, all seen by the program. Default: what the launcher asks for, or 1."
        ),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Which ranks to emulate: 'auto' (rank 0, and whom it exchanges messages with), 'all', or numbers: 0,5,7"
        ),
    ] = "auto",
    steps: Annotated[
        str, typer.Option(help="Stop after this many optimizer steps; 'all' lets the program run to its end.")
    ] = "3",
    out: Annotated[Path, typer.Option(help="Folder for the trace.")] = Path("maya-out"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary as JSON to this file.")] = None,
    hardware: HardwareOption = None,
) -> None:
    """Runs a training command on emulated GPUs and says what it did to them."""
    from maya_core.launch.run import run_command, split_command
    from maya_core.report.summary import render_job, summarise_job

    use_hardware_file(hardware)
    find_gpu(gpu)
    done = run_command(
        split_command(command),
        gpu=gpu,
        nodes=nodes,
        gpus=gpus_per_node,
        steps=_steps(steps),
        ranks=_ranks(ranks),
        out=out,
    )
    console = Console()
    if done.job is None:
        reason = (
            f"it ended with exit code {done.exit_code}"
            if done.exit_code
            else "it never imported torch, or ended without leaving Python"
        )
        raise MayaError(f"the command left no trace: {reason}.", "Its own output above says more.")
    summary = summarise_job(done.job)
    console.print(render_job(summary))
    console.print(f"[dim]Trace: {done.out}[/dim]")
    if json_file is not None:
        json_file.write_text(json.dumps(summary.model_dump(), indent=2) + "\n")
    if done.exit_code or summary.hangs:
        raise typer.Exit(done.exit_code or HANGS)


@app.command("gpus")
def show_hardware(
    name: Annotated[str | None, typer.Argument(help="All about one GPU, with sources, nodes and prices.")] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="List kinds of node instead.")] = False,
    networks: Annotated[bool, typer.Option("--networks", help="List networks instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    hardware: HardwareOption = None,
) -> None:
    """Lists the GPUs that can be emulated, the nodes they come in, networks and prices."""
    from maya_core.hardware import tables

    use_hardware_file(hardware)
    if (name is not None) + nodes + networks > 1:
        raise MayaError("one list at a time.", "Give the name of a GPU, --nodes or --networks.")
    gpu = find_gpu(name) if name is not None else None
    console = Console()
    if as_json:
        what = "nodes" if nodes else "networks" if networks else "gpus"
        typer.echo(json.dumps(tables.as_json(what, gpu), indent=2))
    elif gpu is not None:
        console.print(tables.gpu_page(gpu, console.width), highlight=False)
    elif nodes:
        console.print(tables.node_table(console.width))
    elif networks:
        console.print(tables.network_table())
    else:
        console.print(tables.gpu_table(console.width))


@app.command()
def kernels(
    folder: Annotated[Path, typer.Argument(help="The --out folder of a `maya run`.", metavar="DIR")],
    gpu: Annotated[str | None, typer.Option(help="Price the trace for this GPU instead of its own.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many ops to list.")] = 20,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    burst: Annotated[bool, typer.Option(help="At the clocks of short bursts, not of sustained load.")] = False,
) -> None:
    """Lists what takes the GPU's time in a recorded step, how long each op takes, and how surely that is known."""
    from maya_core.hardware.cluster import cluster
    from maya_core.predictor.calibration import load_calibration
    from maya_core.predictor.predict import durations_of
    from maya_core.report.kernels import entries, render
    from maya_core.trace.job import read_job

    job = read_job(folder)
    traces = {int(trace.meta.get("rank", 0)): trace for trace in job.ranks.values()}
    if rank is not None and rank not in traces:
        raise MayaError(f"rank {rank} was not emulated.", f"There are: {', '.join(map(str, traces))}.")
    for number, trace in traces.items():
        if rank is not None and number != rank:
            continue
        machine = cluster(gpu or trace.meta["gpu"], job.gpus_per_node, job.nodes)
        priced = durations_of(trace, machine, burst=burst, calibration=load_calibration(machine.gpu))
        Console().print(render(number, machine.gpu.name, entries(trace, priced), top))


def entry() -> None:
    """The console script: errors meant for the user are printed without a traceback."""
    try:
        app()
    except MayaError as error:
        console = Console(stderr=True)
        console.print(f"[bold red]maya:[/bold red] {error.problem}", highlight=False)
        if error.advice:
            console.print(error.advice, highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]maya:[/bold red] interrupted: the run was ended, and there is no result.")
        raise SystemExit(130) from None
