"""The `maya` command."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from maya_core.calibrate import commands as calibrate
from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu, find_node, use_hardware_file
from maya_core.hardware.cluster import Cluster, cluster
from maya_core.predictor.attention_kind import DEFAULT_ATTENTION, SLOWER_THAN_FLASH2, check_attention
from maya_core.predictor.calibration import load_calibration
from maya_core.report.analysis import Options
from maya_core.report.files import write_prediction
from maya_core.report.outputs import Outputs
from maya_core.report.prediction import Prediction
from maya_core.report.tracking import mlflow_tracker
from maya_core.search import commands as search
from maya_core.simulator.host import Host
from maya_core.trace.job import PREDICTION, JobTrace, read_job

HANGS = 3  # exit code of a run whose job would hang
KILLED = (137, -9)
# Entry points: functions that are given the command and its `calibrate`, and add what their integration has.
COMMANDS = "maya.commands"

app = typer.Typer(
    name="maya",
    help="What a training job will do to its GPUs, before any GPU is reserved.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(calibrate.app, name="calibrate")
search.add(app)

HardwareOption = Annotated[
    Path | None,
    typer.Option(
        "--hardware",
        help="A TOML file with GPUs, nodes, networks and prices of your own. Default: $MAYA_HARDWARE, or maya/hardware.toml in your configuration folder.",
    ),
]


FolderArgument = Annotated[Path, typer.Argument(help="The --out folder of a `maya run`.", metavar="DIR")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the prediction as JSON to this file.", metavar="FILE")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", help="Write a page with the prediction, timeline and memory to this file.", metavar="FILE"),
]
NodeOption = Annotated[
    str | None, typer.Option(help="A kind of node, a cloud's instance say; `maya gpus --nodes` lists them.")
]
NetworkOption = Annotated[
    str | None,
    typer.Option(help="The network between nodes; `maya gpus --networks` lists them. Default: the node's own."),
]
PriceOption = Annotated[
    float | None, typer.Option(min=0.0001, help="What a GPU costs you an hour, in US dollars, instead of list prices.")
]
SamplesOption = Annotated[
    float | None, typer.Option(min=1, help="Samples in a step of the whole job, where Maya cannot tell.")
]
TokensOption = Annotated[
    float | None, typer.Option(min=1, help="Tokens in a step of the whole job, where Maya cannot tell.")
]
AttentionOption = Annotated[
    str, typer.Option(help=f"Which generation of flash attention the job will run: {', '.join(SLOWER_THAN_FLASH2)}.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="A calibration of yours by name (`maya calibrate list`), or 'none'. Default: the GPU's newest.",
        metavar="NAME",
    ),
]
HostOption = Annotated[
    Host,
    typer.Option(
        help="The host's time: 'modelled' by call, the same on every machine, or as 'measured' while emulating."
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
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"Which GPU to emulate; `maya gpus` lists them. Default: {DEFAULT_GPU}, or the --node's.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of the cluster; torchrun's --nnodes says it as well.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="GPUs of a node, all seen by the program. Default: what the launcher asks for, or 1."
        ),
    ] = None,
    node: NodeOption = None,
    network: NetworkOption = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Which ranks to emulate: 'auto' (rank 0, and whom it exchanges messages with), 'all', or numbers: 0,5,7"
        ),
    ] = "auto",
    steps: Annotated[
        str, typer.Option(help="Stop after this many optimizer steps; 'all' lets the program run to its end.")
    ] = "3",
    out: Annotated[Path, typer.Option(help="Folder for the traces and the prediction.")] = Path("maya-out"),
    json_file: JsonOption = None,
    html: HtmlOption = None,
    samples_per_step: SamplesOption = None,
    tokens_per_step: TokensOption = None,
    price_per_gpu_hour: PriceOption = None,
    attention: AttentionOption = DEFAULT_ATTENTION,
    host: HostOption = Host.MODELLED,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log the prediction to MLflow as a run, by MLflow's own configuration.")
    ] = False,
    mlflow_experiment: Annotated[
        str | None, typer.Option(help="The same, in this experiment.", metavar="NAME", show_default=False)
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            help="A name that the real run will have too (MAYA_PAIR_ID): `maya compare` pairs by it.", metavar="ID"
        ),
    ] = None,
) -> None:
    """Runs a training command on emulated GPUs and predicts what it does to real ones: time, memory, cost."""
    use_hardware_file(hardware)
    chosen = find_gpu(gpu).name if gpu is not None else find_node(node).gpu if node is not None else DEFAULT_GPU
    options = Options(host, attention, samples_per_step, tokens_per_step)
    tracker = mlflow_tracker(mlflow_experiment or mlflow, pair)
    outputs = Outputs(json_file, html, tracker=tracker)
    check_attention(attention, find_gpu(chosen))
    load_calibration(chosen, profile)  # whether it is there and can be read, before anything is run
    how_many, which = _steps(steps), _ranks(ranks)

    from maya_core.launch.run import run_command, split_command  # and torch: what is wrong was said before
    from maya_core.report.what_if import recorded_cluster

    if command[0].startswith("-"):
        raise MayaError(
            f"there is no option {command[0].partition('=')[0]}.",
            "`maya run --help` lists them; the command comes after `--`.",
        )
    done = run_command(
        split_command(command),
        gpu=chosen,
        nodes=nodes,
        gpus=gpus_per_node,
        steps=how_many,
        ranks=which,
        out=out,
        node=node,
        network=network,
        attention=attention,
        host=host.value,
        check=lambda world: cluster(chosen, world.ranks_per_node, world.nodes, node=node, network=network),
    )
    if done.job is None:
        reason = (
            f"it ended with exit code {done.exit_code}"
            if done.exit_code
            else "it asked nothing of a GPU (is its device 'cuda'?), or never imported torch"
        )
        advice = "Its own output above says more."
        if done.exit_code in KILLED:
            advice = "It was killed, most likely for this machine's memory: models are made on the host unless the program makes them on 'cuda' or 'meta'."
        raise MayaError(f"the command left no trace: {reason}.", advice)
    machine = recorded_cluster(done.job, price_per_gpu_hour=price_per_gpu_hour)
    prediction = outputs.tell(done.job, machine, options.calibrated(machine.gpu, profile))
    write_prediction(done.out / PREDICTION, prediction)
    told = f"Trace: {done.out}; `maya report {done.out} --html FILE` draws it, `maya what-if {done.out} --gpu ...` tells of other hardware."
    Console().print(Text(told, style="dim"))
    if done.exit_code or prediction.hangs:
        raise typer.Exit(done.exit_code or HANGS)


@app.command()
def report(
    folder: FolderArgument,
    json_file: JsonOption = None,
    html: HtmlOption = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            help="Write the timeline in Kineto's format, for Perfetto, chrome://tracing and HolisticTraceAnalysis: FILE.json or FILE.json.gz; of several ranks one file each.",
            metavar="FILE",
        ),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--memory-snapshot",
            help="Write a memory snapshot for pytorch.org/memory_viz. It is a pickle, because that page wants one.",
            metavar="FILE",
        ),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's timeline and snapshot.")] = None,
    samples_per_step: SamplesOption = None,
    tokens_per_step: TokensOption = None,
    price_per_gpu_hour: PriceOption = None,
    network: NetworkOption = None,
    attention: AttentionOption = DEFAULT_ATTENTION,
    host: HostOption = Host.MODELLED,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Predicts from a recorded run again, and draws it: page, timeline, memory snapshot."""
    from maya_core.report.what_if import recorded_cluster

    use_hardware_file(hardware)
    outputs = Outputs(json_file, html, timeline, snapshot, rank)
    job = read_job(folder)
    machine = recorded_cluster(job, network=network, price_per_gpu_hour=price_per_gpu_hour)
    options = Options(host, attention, samples_per_step, tokens_per_step)
    outputs.tell(job, machine, options.calibrated(machine.gpu, profile))


@app.command("what-if")
def what_if(
    folder: FolderArgument,
    gpu: Annotated[list[str] | None, typer.Option(help="Another GPU; give it several times to compare.")] = None,
    node: NodeOption = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="So many nodes, with as many GPUs in all as were recorded.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, max=64, help="The same GPUs in nodes of so many.")] = None,
    network: NetworkOption = None,
    price_per_gpu_hour: PriceOption = None,
    json_file: JsonOption = None,
    html: HtmlOption = None,
    samples_per_step: SamplesOption = None,
    tokens_per_step: TokensOption = None,
    attention: AttentionOption = DEFAULT_ATTENTION,
    host: HostOption = Host.MODELLED,
    hardware: HardwareOption = None,
) -> None:
    """What a recorded run would do on other GPUs, nodes or networks, without running it again."""
    from maya_core.report.summary import predict
    from maya_core.report.what_if import comparison, notes, other_cluster, recorded_cluster

    use_hardware_file(hardware)
    outputs = Outputs(json_file, html)
    if not any((gpu, node, nodes, gpus_per_node, network, price_per_gpu_hour, attention != DEFAULT_ATTENTION)):
        raise MayaError(
            "nothing to change.",
            "Give --gpu, --node, --nodes, --gpus-per-node, --network, --price-per-gpu-hour or --attention.",
        )
    job = read_job(folder)
    machines = [
        other_cluster(
            job,
            gpu=each,
            node=node,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            network=network,
            price_per_gpu_hour=price_per_gpu_hour,
        )
        for each in (gpu or (None,))
    ]
    if len(machines) > 1 and (json_file or html):
        raise MayaError("--json and --html are for one cluster, and several were given.", "Give one --gpu.")
    recorded = recorded_cluster(job)
    same = Options(host, DEFAULT_ATTENTION, samples_per_step, tokens_per_step)
    other = Options(host, attention, samples_per_step, tokens_per_step)
    before = predict(job, recorded, same.calibrated(recorded.gpu))
    console = Console()
    if len(machines) == 1:
        told = {_name(machines[0]): outputs.tell(job, machines[0], other.calibrated(machines[0].gpu))}
    else:
        told, refused = _each(job, machines, other)
        for refusal in refused:
            console.print(Text.assemble(("maya:", "bold red"), f" {refusal}"))
    if not told:
        raise typer.Exit(2)
    console.print(comparison(["as recorded", *told], [before, *told.values()]))
    if len(machines) > 1:  # of one they stand under its own prediction
        console.print(notes(before, told.values()))


def _each(job: JobTrace, machines: list[Cluster], options: Options) -> tuple[dict[str, Prediction], list[MayaError]]:
    """Predictions by the clusters' names, and why there is none for others."""
    from maya_core.report.summary import predict

    told, refused = {}, []
    for machine in machines:
        try:
            told[_name(machine)] = predict(job, machine, options.calibrated(machine.gpu))
        except MayaError as refusal:
            refused.append(refusal)
    return told, refused


def _name(machine: Cluster) -> str:
    return f"{machine.gpus} x {machine.gpu.name}" + (f", {machine.network.name}" if machine.nodes > 1 else "")


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
    from maya_core.predictor.pricing import Predictor, durations_of
    from maya_core.report.kernel_table import entries, render

    job = read_job(folder)
    traces = {int(trace.meta.get("rank", 0)): trace for trace in job.ranks.values()}
    if rank is not None and rank not in traces:
        raise MayaError(f"rank {rank} was not emulated.", f"There are: {', '.join(map(str, traces))}.")
    for number, trace in traces.items():
        if rank is not None and number != rank:
            continue
        machine = cluster(gpu or trace.meta["gpu"], job.gpus_per_node, job.nodes)
        predictor = Predictor(machine.gpu, burst=burst, calibration=load_calibration(machine.gpu))
        priced = durations_of(trace, machine, predictor, job.command)
        Console().print(render(number, machine.gpu.name, entries(trace, priced), top))


def entry() -> None:
    """The console script: errors meant for the user are printed without a traceback."""
    for integration in entry_points(group=COMMANDS):
        integration.load()(app, calibrate.app)
    try:
        app()
    except MayaError as error:
        console = Console(stderr=True)
        console.print(Text.assemble(("maya:", "bold red"), f" {error.problem}"))
        if error.advice:
            console.print(Text(error.advice))
        raise SystemExit(2) from None
    except PermissionError as error:  # of the file system: what was asked for cannot be written
        Console(stderr=True).print(Text.assemble(("maya:", "bold red"), f" {error.filename}: {error.strerror}."))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("[bold red]maya:[/bold red] interrupted: the run was ended, and there is no result.")
        raise SystemExit(130) from None
