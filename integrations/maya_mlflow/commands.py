"""The commands for MLflow: `maya compare`, `maya calibrate --from-mlflow` and `maya mlflow upload`. MLflow itself is only imported when
one of them runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from maya_core.command_options import HardwareOption
from maya_core.errors import MayaError
from maya_mlflow import keys
from maya_mlflow import pairs as pairing
from maya_mlflow.pairs import Pair, Run

DRIFTED = 4  # exit code

UriOption = Annotated[
    str | None,
    typer.Option("--tracking-uri", help="The MLflow server or database. Default: MLflow's own configuration."),
]
ExperimentOption = Annotated[
    str | None,
    typer.Option(help="The name of the experiment. Default: MLFLOW_EXPERIMENT_NAME, or 'maya'.", metavar="NAME"),
]

mlflow = typer.Typer(help="Manages runs that are stored on disk for MLflow.", no_args_is_help=True)


@mlflow.callback()
def _mlflow() -> None:
    """Manages runs that are stored on disk for MLflow."""


@mlflow.command()
def upload(
    folders: Annotated[
        list[Path], typer.Argument(help="The folder of a stored run: maya-mlflow/predicted-...", metavar="FOLDER...")
    ],
    uri: UriOption = None,
) -> None:
    """Sends runs that could not be sent when they were recorded. Sending a run twice does not duplicate it."""
    from maya_mlflow.upload import require_mlflow
    from maya_mlflow.upload import upload as send

    require_mlflow()
    for folder in folders:
        sent = send(folder, uri)
        Console().print(f"{folder} is uploaded: {sent.address}", soft_wrap=True, highlight=False)


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="A predicted and an actual run, by id. Default: all pairs of the experiment.",
            metavar="[PREDICTED ACTUAL]",
        ),
    ] = None,
    experiment: ExperimentOption = None,
    threshold: Annotated[
        float,
        typer.Option(
            min=0,
            help="Percent. Exit with 4 if the median error of a metric over the newest 10 pairs is larger; 'inf' for never.",
        ),
    ] = 10.0,
    out: Annotated[Path, typer.Option(help="The folder for the figures.")] = Path("maya-compare"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the errors of every pair to this file.", metavar="FILE")
    ] = None,
    log: Annotated[bool, typer.Option(help="Log the errors on the runs, as error/..._pct.")] = True,
    uri: UriOption = None,
) -> None:
    """Compares predictions in MLflow with the actual runs that they predicted."""
    from maya_mlflow import compare as comparing

    if runs is not None and len(runs) not in (0, 2):
        raise MayaError(
            f"{len(runs)} run{'s' * (len(runs) != 1)} cannot be compared.",
            "Give a predicted and an actual run, or an --experiment.",
        )
    comparing.check_folder(out)
    _check_json(json_file)
    client = pairing.client(uri)
    if runs:
        predicted, actual = (pairing.run_of(pairing.ask(client.get_run, run_id)) for run_id in runs)
        pairs = [_given_pair(predicted, actual)]
    else:
        found = pairing.find_experiment(client, experiment)
        every = pairing.runs_of(client, found.experiment_id)
        pairs = pairing.pairs_of(every)
        if not pairs:
            raise MayaError(*_no_pairs(found.name, every))
    console = Console()
    console.print(comparing.one_pair(pairs[0]) if len(pairs) == 1 else comparing.many_pairs(pairs))
    counted = [pair for pair in pairs if not pair.is_of_other_hardware]
    if len(counted) > 1:
        console.print(comparing.summary(counted))
    comparing.say_differences(console, pairs)
    for path in comparing.write_figures(counted, out):
        console.print(f"[dim]Written: {path}[/dim]", highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps({"format": "maya-compare", "pairs": comparing.as_json(pairs)}, indent=2) + "\n")
    if log:
        comparing.log_errors(client, pairs)
    _check_drift(comparing.drift(counted), threshold, min(len(counted), comparing.NEWEST))


def _given_pair(predicted: Run, actual: Run) -> Pair:
    if (predicted.kind, actual.kind) == ("actual", "predicted"):
        predicted, actual = actual, predicted
    pair = Pair(predicted, actual, "given")
    if not pair.errors():
        raise MayaError(
            f"runs {predicted.run_id[:8]} and {actual.run_id[:8]} have no metric in common.",
            "Give a run that `maya run --mlflow` logged, and one that `maya_mlflow.record_actual` did.",
        )
    return pair


def _no_pairs(name: str, runs: list[Run]) -> tuple[str, str]:
    counts = {kind: sum(run.kind == kind for run in runs) for kind in ("predicted", "actual")}
    problem = f"experiment '{name}' has no pairs: {counts['predicted']} predicted and {counts['actual']} actual runs."
    if not counts["predicted"] or not counts["actual"]:
        return (
            problem,
            "`maya run --mlflow` logs predicted runs, `maya_mlflow.record_actual` logs actual ones (`maya help mlflow`).",
        )
    if not any(run.kind == "actual" and keys.STEP_TIME in run.metrics for run in runs):
        return problem, "None of the actual runs was timed: put the training into `maya_mlflow.record_actual()`."
    return (
        problem,
        "Their fingerprints differ: give both the same pair id (MAYA_PAIR_ID), or compare two runs by their ids to see how they differ.",
    )


def _check_json(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise MayaError(f"--json {path}: no file can be written there.", "Give a file in an existing folder.")
    if path.exists() and '"format": "maya-compare"' not in path.read_text(errors="replace")[:200]:
        raise MayaError(
            f"{path} already exists and was not written by Maya, so it is not overwritten.", "Give another name."
        )


def _check_drift(drift: dict[str, float], threshold: float, count: int) -> None:
    from maya_mlflow.compare import NAMES

    over = {key: error for key, error in drift.items() if error > threshold}
    if over:
        pairs = f"the newest {count} pairs" if count > 1 else "this pair"
        errors = ", ".join(f"{NAMES[key]} {error:.1f} %" for key, error in over.items())
        Console(stderr=True).print(
            f"The median error of {pairs} is larger than {threshold:g} %: {errors}.", highlight=False, soft_wrap=True
        )
        raise typer.Exit(DRIFTED)


def calibrate_runs(
    context: typer.Context,
    from_mlflow: Annotated[
        str | None,
        typer.Option(
            "--from-mlflow",
            help="Calibrate from the actual runs of this experiment and their predictions.",
            metavar="EXPERIMENT",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --from-mlflow: the GPU, if the experiment has runs on several.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="With --from-mlflow: the name of the calibration. Default: the name of the GPU and '-runs'."),
    ] = None,
    add_to: Annotated[
        bool,
        typer.Option(
            "--add", help="With --from-mlflow: keep the kernel measurements of the calibration with that name."
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --from-mlflow: overwrite the calibration of that name.")
    ] = False,
    uri: UriOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Corrects predictions by your own measurements: profiler traces, nccl-tests, micro-benchmarks, actual runs in MLflow."""
    if from_mlflow is None:
        if context.invoked_subcommand is None:
            raise MayaError(
                "there is nothing to calibrate from.",
                "Give --from-mlflow EXPERIMENT, or a command: `maya calibrate --help`.",
            )
        if gpu or name or add_to or replace or uri or hardware:
            raise MayaError(
                f"options before '{context.invoked_subcommand}' only apply to --from-mlflow.",
                "Give them after the command.",
            )
        return
    if context.invoked_subcommand is not None:
        raise MayaError(f"--from-mlflow and {context.invoked_subcommand} do not work together.", "Give one of them.")
    from maya_core.hardware.catalog import use_hardware_file
    from maya_mlflow.calibrate import calibrate

    use_hardware_file(hardware)
    calibrate(from_mlflow, uri, gpu, name, add_to, replace)


def add(app: typer.Typer, calibrate: typer.Typer) -> None:
    """The entry point `mlflow` of the group maya.commands."""
    if any(group.name == "mlflow" for group in app.registered_groups):
        return
    app.add_typer(mlflow, name="mlflow")
    app.command()(compare)
    calibrate.callback(invoke_without_command=True)(calibrate_runs)
