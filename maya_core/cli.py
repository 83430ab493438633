"""The `maya` command: reads options, calls the pipeline, prints. What an option means is in `request.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from maya_core import documentation, pipeline
from maya_core.calibrate import commands as calibrate
from maya_core.command_options import FolderArgument, HardwareOption, takes
from maya_core.documentation import add_integrations
from maya_core.errors import MayaError
from maya_core.hardware.catalog import find_gpu, use_hardware_file
from maya_core.hardware.cluster import Cluster
from maya_core.installation import version_of
from maya_core.overlay import files as overlay
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION
from maya_core.predictor.calibration import load_calibration
from maya_core.report.outputs import Outputs
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import write_prediction
from maya_core.report.terminal import plain_table
from maya_core.report.written_files import written_files
from maya_core.request import ClusterOptions, EmulationOptions, FileOptions, PredictionOptions, Request
from maya_core.search import commands as search
from maya_core.torch_seam.version import INSTALL
from maya_core.trace.job import PREDICTION, JobTrace, read_job
from maya_core.trace.run_folder import DEFAULT_OUT, keep_newest, new_run
from maya_core.version import __version__

HANGS = 3  # exit code of a run whose job would hang
KILLED = (137, -9)

app = typer.Typer(
    name="maya",
    help="Predicts what a training job will do to its GPUs and its budget, before any GPU is reserved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate.app, name="calibrate")
search.add(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        torch = version_of("torch")
        typer.echo(f"maya {__version__}" + (f", torch {torch}" if torch else ""))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Predicts what a training job will do to its GPUs and its budget, before any GPU is reserved."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@takes(ClusterOptions, EmulationOptions, PredictionOptions, FileOptions, tracked=True)
def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The command to run, as you would type it: python train.py ...", metavar="-- COMMAND"),
    ],
    request: Request,
) -> None:
    """Runs a training command on emulated GPUs and predicts what it does to real ones: time, memory, cost."""
    request.check()
    outputs = Outputs.of(request)
    load_calibration(request.gpu_name, request.profile)  # whether it exists and can be read, before anything runs

    from maya_core.launch.run import plan_run, split_command, without_secrets  # imports torch

    _refuse_option(command, "run")
    words = split_command(command)
    planned = plan_run(words, request, lambda world: request.cluster(world.ranks_per_node, world.nodes))
    with new_run(request.out or DEFAULT_OUT, without_secrets(words), request.gpu_name, request.name) as kept:
        folder = kept.path
        done = planned.run(folder)
        if done.job is None:
            raise _no_trace(done.exit_code)
        prediction = pipeline.report(done.job, request, outputs)
        write_prediction(folder / PREDICTION, prediction)
    if done.files:
        kept_files = folder / overlay.KEPT if request.keep_files else None
        Console().print(Text(written_files(done.files, kept_files), style="dim"))
    given = "" if request.out is None else f" {request.out}"
    hint = (
        f"Kept in {folder}. `maya report{given} --html FILE` draws the newest run; `maya what-if{given} --gpu NAME` predicts it on other "
        f"hardware; `maya runs{given}` lists all runs."
    )
    Console().print(Text(hint, style="dim"))
    if done.exit_code or prediction.hangs:
        raise typer.Exit(done.exit_code or HANGS)


def _refuse_option(command: list[str], of: str) -> None:
    """Raises if what should be a program is an option that does not exist."""
    if command[0].startswith("-"):
        raise MayaError(
            f"there is no option {command[0].partition('=')[0]}.",
            f"`maya {of} --help` lists them; the command comes after `--`.",
        )


def _no_trace(exit_code: int) -> MayaError:
    reason = (
        f"it ended with exit code {exit_code}"
        if exit_code
        else "it used no GPU (is its device 'cuda'?), or never imported torch, or ran in a Python without Maya"
    )
    advice = "Its own output above says more; `maya doctor -- COMMAND` tells which Python it uses."
    if exit_code in KILLED:
        advice = "It was killed, most likely because this machine ran out of memory: models are created on the host unless the program creates them on 'cuda' or 'meta'."
    return MayaError(f"the command left no trace: {reason}.", advice)


@app.command()
@takes(
    PredictionOptions, FileOptions, ClusterOptions,
    but=("gpu", "nodes", "gpus_per_node", "node"),
    help={"network": "Another network between nodes than the recorded one."},
    tracked=True,
)  # fmt: skip
def report(
    *,
    folder: FolderArgument = DEFAULT_OUT,
    request: Request,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Write the timeline in Kineto's format, for Perfetto, chrome://tracing and HolisticTraceAnalysis: FILE.json or FILE.json.gz. Several ranks get one file each.",
            metavar="FILE",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--memory-snapshot",
            help="Write a memory snapshot for pytorch.org/memory_viz. It is a pickle, because that page reads nothing else.",
            metavar="FILE",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Write the timeline and the snapshot of this rank only.")
    ] = None,
) -> None:
    """Predicts from a recorded run again, and draws it: page, timeline, memory snapshot."""
    outputs = Outputs.of(request, timeline, snapshot, rank)
    pipeline.report(read_job(folder), request, outputs)


@app.command("what-if")
@takes(
    ClusterOptions, PredictionOptions, FileOptions,
    but=("gpu",),
    help={
        "nodes": "The number of nodes, with as many GPUs in total as were recorded.",
        "gpus_per_node": "The GPUs of each node, with as many GPUs in total as were recorded.",
    },
)  # fmt: skip
def what_if(
    *,
    folder: FolderArgument = DEFAULT_OUT,
    request: Request,
    gpu: Annotated[list[str] | None, typer.Option(help="Another GPU. Give it several times to compare.")] = None,
) -> None:
    """Predicts what a recorded run would do on other GPUs, nodes or networks, without running it again."""
    from maya_core.report.comparison import comparison, notes

    outputs = Outputs.of(request)
    if not gpu and not request.model_fields_set & CHANGES:
        raise MayaError(
            "nothing to change.",
            "Give --gpu, --node, --nodes, --gpus-per-node, --network, --price-per-gpu-hour or --attention.",
        )
    job = read_job(folder)
    requests = [request.model_copy(update={"gpu": each}) for each in (gpu or (None,))]
    machines = [pipeline.other_cluster(job, each) for each in requests]
    if len(machines) > 1 and (request.json_file or request.html):
        raise MayaError("--json and --html are for one cluster, but several were given.", "Give one --gpu.")
    as_recorded = request.model_copy(
        update=dict.fromkeys(ClusterOptions.model_fields) | {"attention": DEFAULT_ATTENTION, "profile": None}
    )
    before = pipeline.predict(job, as_recorded)
    console = Console()
    if len(machines) == 1:
        others = {_name(machines[0]): pipeline.report(job, requests[0], outputs, machines[0])}
    else:
        others = _each(job, request, machines, console)
    if not others:
        raise typer.Exit(2)
    console.print(comparison(["as recorded", *others], [before, *others.values()]))
    if len(machines) > 1:  # the notes of a single one stand under its own prediction
        console.print(notes(before, others.values()))


# What makes a what-if: with none of these, nothing would change.
CHANGES = {"node", "nodes", "gpus_per_node", "network", "price_per_gpu_hour", "attention", "burst"}


def _each(job: JobTrace, request: Request, machines: list[Cluster], console: Console) -> dict[str, Prediction]:
    """Predictions by the clusters' names. Why there is none for a cluster is printed."""
    found = {}
    for machine in machines:
        try:
            found[_name(machine)] = pipeline.predict(job, request, machine)
        except MayaError as refusal:
            console.print(Text.assemble(("maya:", "bold red"), f" {refusal}"))
    return found


def _name(machine: Cluster) -> str:
    return f"{machine.gpus} x {machine.gpu.name}" + (f", {machine.network.name}" if machine.nodes > 1 else "")


@app.command("gpus")
def show_hardware(
    name: Annotated[
        str | None, typer.Argument(help="A GPU, to show everything about it: data sheet, sources, nodes and prices.")
    ] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="List kinds of nodes instead.")] = False,
    networks: Annotated[bool, typer.Option("--networks", help="List networks instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hardware: HardwareOption = None,
) -> None:
    """Lists the GPUs that can be emulated, the nodes they come in, networks and prices."""
    from maya_core.hardware import tables

    use_hardware_file(hardware)
    if (name is not None) + nodes + networks > 1:
        raise MayaError("only one list at a time.", "Give the name of a GPU, --nodes or --networks.")
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
@takes(
    ClusterOptions,
    PredictionOptions,
    only=("gpu", "burst", "attention", "profile", "hardware"),
    help={"gpu": "Price the trace for this GPU instead of the recorded one."},
)
def kernels(
    *,
    folder: FolderArgument = DEFAULT_OUT,
    request: Request,
    top: Annotated[int, typer.Option(min=1, help="How many ops to list.")] = 20,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
) -> None:
    """Lists what takes the GPU's time in a recorded step, how long each op takes, and how well that is known."""
    from maya_core.report.kernel_table import entries, render

    job = read_job(folder)
    if rank is not None and rank not in job.ranks:
        raise MayaError(f"rank {rank} was not emulated.", f"The emulated ranks are {', '.join(map(str, job.ranks))}.")
    if rank is not None:
        job = replace(job, ranks={rank: job.ranks[rank]})
    machine = pipeline.other_cluster(job, request)
    for number, priced in pipeline.durations(job, request, machine).items():
        Console().print(render(number, machine.gpu.name, entries(job.ranks[number], priced), top))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A command, to see which Python it would use: python train.py ...", metavar="[-- COMMAND]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tells whether Maya can run here: Python, torch, compiler, frameworks, cache. The exit code is 1 if it cannot."""
    from maya_core.doctor.diagnosis import diagnose
    from maya_core.doctor.findings import as_json as written
    from maya_core.doctor.findings import can_run, render

    if command:
        _refuse_option(command, "doctor")
    report = diagnose(command)
    if as_json:
        typer.echo(json.dumps(written(report), indent=2))
    else:
        console = Console()
        for each in render(report):
            console.print(each, highlight=False, soft_wrap=isinstance(each, Text))
    if not can_run(report):
        raise typer.Exit(1)


@app.command("runs")
def show_runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs (`maya run --out`).", metavar="[DIR]")] = DEFAULT_OUT,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Remove all runs but the newest N, and list those.", metavar="N")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lists the runs in a folder, the oldest first: when, what, on which GPUs, and what was predicted."""
    from maya_core.report import run_list

    if not folder.is_dir():
        raise MayaError(f"there is no folder {folder}.", "`maya run` makes one; give the folder of its --out.")
    for removed in keep_newest(folder, keep) if keep is not None else ():
        typer.echo(f"Removed: {removed}", err=True)
    rows = run_list.rows(folder)
    if as_json:
        typer.echo(json.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    elif not rows:
        typer.echo(f"There are no runs in {folder}.")
    else:
        Console().print(run_list.table(rows))


@app.command("help")
def show_help(
    topic: Annotated[
        str | None,
        typer.Argument(help="A page of the documentation, or one of its sections: recipes, faq#troubleshooting."),
    ] = None,
) -> None:
    """Prints a page of the documentation; without a topic, lists the pages."""
    console = Console()
    if topic is None:
        table = plain_table("", "topic", "page")
        for name, title in documentation.titles().items():
            table.add_row(name, title)
        console.print(table)
        console.print(
            Text("`maya help TOPIC` prints a page, `maya COMMAND --help` the options of a command.", style="dim")
        )
        return
    text = documentation.page(topic, app)
    if console.is_terminal:
        console.print(documentation.Page(text, hyperlinks=False))
    else:
        typer.echo(text)


def entry() -> None:
    """The console script. Errors that are meant for the user are printed without a traceback."""
    add_integrations(app)
    try:
        app()
    except MayaError as error:
        _print_error(error)
        raise SystemExit(2) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _print_error(MayaError("torch is not installed in this environment.", f"Install it with: {INSTALL}"))
        raise SystemExit(2) from None
    except PermissionError as error:  # of the file system
        _print_error(MayaError(f"{error.filename}: {error.strerror}."))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]maya:[/bold red] interrupted. The run has ended, and there is no result.")
        raise SystemExit(130) from None


def _print_error(error: MayaError) -> None:
    console = Console(
        stderr=True, soft_wrap=True
    )  # terminals break long lines; a command must stay one when it is copied
    console.print(Text.assemble(("maya:", "bold red"), f" {error.problem}"))
    if error.advice:
        console.print(Text(error.advice))
