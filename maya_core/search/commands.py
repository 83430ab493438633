"""`maya recipes`, `maya search`, `maya size` and `maya check`: the command line of this folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maya_core.errors import MayaError
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu, use_hardware_file
from maya_core.hardware.units import read_count, read_duration, read_share
from maya_core.launch.signals import ended_by_signal
from maya_core.report.files import FileKind, check_target, write_file
from maya_core.report.prediction import Prediction
from maya_core.search import result
from maya_core.search.executors import Executor, LocalExecutor, RayExecutor
from maya_core.search.recipe import CheckedRecipe
from maya_core.search.shipped import find_recipe, new_recipe, shipped
from maya_core.search.study import OBJECTIVES, SAMPLERS, Goal, Plan, Search, Trial
from maya_core.search.trial import task_of

recipes = typer.Typer(help="Jobs as files: those that are shipped, and new ones.")

RecipeArgument = Annotated[str, typer.Argument(help="A recipe's file, or the name of a shipped one.", metavar="RECIPE")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="A calibration of yours by name, or 'none'. Default: the GPU's newest.")
]
HardwareOption = Annotated[
    Path | None, typer.Option("--hardware", help="A TOML file with hardware and prices of your own.")
]
TokensOption = Annotated[str | None, typer.Option(help="Of the whole training: 1e12, 300B.")]
SamplesOption = Annotated[str | None, typer.Option(help="The same in samples, of images say: 115M.")]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Trials at a time. Default: the cores, or Ray's CPUs.")]
RayOption = Annotated[str | None, typer.Option(help="Of the Ray cluster. Default: auto.", metavar="ADDRESS")]
ExecutorOption = Annotated[str, typer.Option(help="'local', or 'ray' for an existing Ray cluster.")]


def number(text: str | None, read: object, option: str) -> float | None:
    """An option's quantity as people write it."""
    if text is None:
        return None
    try:
        found = read(text)  # type: ignore[operator]
    except ValueError as error:
        raise MayaError(f"{option} {text}: it {error}.") from error
    return float(found)


def executor_of(name: str, workers: int | None, address: str | None) -> Executor:
    if name not in ("local", "ray"):
        raise MayaError(f"there is no executor '{name}'.", "Give 'local' or 'ray'.")
    if name == "local" and address is not None:
        raise MayaError("--ray-address without --executor ray.", "Give both, or neither.")
    return RayExecutor(address, workers) if name == "ray" else LocalExecutor(workers or len(os.sched_getaffinity(0)))


@recipes.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """Lists the recipes that are shipped."""
    if context.invoked_subcommand is not None:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("recipe", "about", "runs on", "points"):
        table.add_column(title, justify="right" if title == "points" else "left", overflow="fold")
    for path in shipped():
        job = find_recipe(str(path))
        spec = job.recipe.cluster
        where = f"{spec.nodes * (spec.gpus_per_node or 1)} x {spec.gpu or spec.node}"
        table.add_row(job.name, job.recipe.about, where, f"{job.size:,}")
    Console().print(table)
    Console().print(
        Text(
            "maya search NAME looks for the best of its configurations; maya check NAME runs its default.", style="dim"
        )
    )


@recipes.command()
def new(
    path: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE.yaml")],
    command: Annotated[list[str], typer.Argument(help="The command, as you would type it.", metavar="-- COMMAND")],
    gpu: Annotated[str, typer.Option(help="Which GPU it runs on.")] = DEFAULT_GPU,
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Writes a recipe for a command: options with numbers that people turn become knobs."""
    if path.exists():
        raise MayaError(f"{path} is there already: it will not be overwritten.", "Give another name.")
    if not path.parent.is_dir():
        raise MayaError(f"there is no folder {path.parent}.", "Make it, or give another path.")
    nodes, gpus_per_node = _world_in(command, nodes, gpus_per_node)
    path.write_text(new_recipe(command, find_gpu(gpu).name, nodes, gpus_per_node))
    try:
        find_recipe(str(path))
    except MayaError:
        path.unlink()
        raise
    Console().print(f"Written: {path}. Look at its `space`, then: maya search {path}", highlight=False, soft_wrap=True)


def _world_in(command: list[str], nodes: int, gpus_per_node: int) -> tuple[int, int]:
    """Of torchrun's options, or of those that other launchers have for it."""
    from maya_core.launch import torchrun

    args = torchrun.parse(command)
    if args is None:
        given = {}
        for place, word in enumerate(command):
            name, equals, value = word.partition("=")
            given[name] = value if equals else (command[place + 1 : place + 2] or [""])[0]
        for name in ("--num_nodes", "--num_machines"):
            nodes = int(given[name]) if given.get(name, "").isdigit() else nodes
        if given.get("--num_gpus", "").isdigit():
            gpus_per_node = int(given["--num_gpus"])
        return nodes, gpus_per_node
    world = torchrun.world_of(args, gpus_per_node)
    return world.nodes, world.ranks_per_node


def search(
    recipe: RecipeArgument,
    trials: Annotated[int, typer.Option(min=1, help="At most so many; the grid takes all.")] = 100,
    sampler: Annotated[str, typer.Option(help="tpe, cmaes, nsga2 (time and cost both), grid or random.")] = "tpe",
    objective: Annotated[str | None, typer.Option(help=f"{', '.join(OBJECTIVES)}. Default: the recipe's.")] = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    deadline: Annotated[str | None, typer.Option(help="The whole training must be done by then. 72h, 3d.")] = None,
    budget: Annotated[str | None, typer.Option(help="US dollars that the whole training may cost. 200k.")] = None,
    memory_margin: Annotated[
        str | None, typer.Option(help="Share of a GPU's memory to leave free, like 5%. Default: the recipe's.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Folder of the search; it goes on where it was. Default: maya-search/NAME.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of predictions that several searches share. Default: the study's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one searches another way.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Configurations that are chosen at a time.")] = 4,
    prune: Annotated[
        bool, typer.Option(help="Leave out what surely does not fit, by what the recipe declares.")
    ] = True,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    ray_address: RayOption = None,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log the search to MLflow, its trials as nested runs.")
    ] = False,
    mlflow_experiment: Annotated[str | None, typer.Option(help="The same, in this experiment.", metavar="NAME")] = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Looks for the best configuration of a recipe that fits. Killed, the same command goes on where it was."""
    use_hardware_file(hardware)
    job = find_recipe(recipe)
    if sampler not in SAMPLERS:
        raise MayaError(f"there is no sampler '{sampler}'.", f"There are: {', '.join(SAMPLERS)}.")
    if objective is not None and objective not in OBJECTIVES:
        raise MayaError(f"there is no objective '{objective}'.", f"There are: {', '.join(OBJECTIVES)}.")
    goal = goal_of(job, objective, sampler == "nsga2", tokens, samples, deadline, budget, memory_margin)
    tracker = _search_tracker(mlflow_experiment or mlflow)
    folder = study or Path("maya-search") / job.name
    plan = Plan(sampler=sampler, seed=seed, batch=batch, prune=prune)  # type: ignore[arg-type]
    known = cache or folder
    found = Search(
        job, goal, plan, folder, lambda point: task_of(job, point, known, profile=profile, hardware=hardware)
    )
    limit = job.size if sampler == "grid" else trials
    where = executor_of(executor, workers, ray_address)
    console = Console()
    possible = f", {found.possible:,} possible and different" if found.possible is not None else ""
    console.print(
        f"{job.name}: {len(job.knobs)} knob{'s' * (len(job.knobs) != 1)}, {job.size:,} points{possible}; {sampler}, at most {min(limit, found.possible or limit):,} trials, {min(where.workers, batch)} at a time."
        + (f" {found.stored:,} are there from before." if found.stored else ""),
        highlight=False,
    )
    if where.workers > batch:
        console.print(Text(f"{where.workers} could run at a time: --batch {where.workers} uses them all.", style="dim"))
    try:
        with ended_by_signal():
            _run(found, limit, where)
    except (KeyboardInterrupt, SystemExit):
        console.print(f"Ended: {len(found.trials):,} trials are kept, and the same command goes on from there.")
        raise
    finally:
        where.close()
        found.close()
        if found.trials:
            for path in result.write(found, folder):
                console.print(Text(f"Written: {path}", style="dim"))
    console.print(result.told(found))
    if best := found.best():
        console.print(Text("The best one is launched by:", style="bold"))
        console.print(f"  {job.program(best[0].point).typed}", soft_wrap=True, highlight=False, markup=False)
    if tracker is not None:
        tracker(found)
    if not found.best():
        raise typer.Exit(1)


def goal_of(
    job: CheckedRecipe, objective: str | None, pareto: bool, tokens: str | None, samples: str | None, deadline: str | None,
    budget: str | None, margin: str | None,
) -> Goal:  # fmt: skip
    constraints = job.recipe.constraints
    asked = number(margin, read_share, "--memory-margin")
    goal = Goal(
        objective=objective or job.recipe.objective,  # type: ignore[arg-type]
        pareto=pareto,
        memory_margin=constraints.memory_margin if asked is None else asked,
        max_step_time_s=constraints.max_step_time_s,
        max_usd_per_1k_steps=constraints.max_usd_per_1k_steps,
        tokens=number(tokens, read_count, "--tokens"),
        samples=number(samples, read_count, "--samples"),
        deadline_s=number(deadline, read_duration, "--deadline"),
        budget_usd=number(budget, read_count, "--budget"),
    )
    if goal.tokens is not None and goal.samples is not None:
        raise MayaError("both --tokens and --samples.", "Give the training in one of them.")
    whole = goal.tokens is not None or goal.samples is not None
    if not whole and (goal.deadline_s is not None or goal.budget_usd is not None):
        raise MayaError(
            "a deadline or a budget, and neither --tokens nor --samples.",
            "Say how long the training is: --tokens 1e12, or --samples 115M.",
        )
    return goal


def _run(search: Search, limit: int, executor: Executor) -> None:
    """With what is known so far on a terminal's last lines."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    total = min(limit, search.possible or limit)
    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=total)

    def status() -> Table:
        grid = Table.grid()
        grid.add_row(bar)
        grid.add_row(Text(_so_far(search), style="dim"))
        return grid

    with Live(status(), console=console, refresh_per_second=4, transient=True) as live:

        def on_trial(trial: Trial) -> None:
            bar.update(task, completed=len(search.trials))
            live.update(status())
            if not sys.stderr.isatty() and len(search.trials) % 25 == 0:
                console.print(
                    f"{len(search.trials)} of {total} trials: {_so_far(search)}", highlight=False, soft_wrap=True
                )

        search.run(limit, executor, on_trial)


def _so_far(search: Search) -> str:
    best = search.best()
    if not best:
        return f"{result.counts_in_words(search)}; nothing fits yet"
    figures = result._figures(best[0])
    return f"{result.counts_in_words(search)}; best so far {figures[0]}, trial {best[0].number}: {result.knobs_in_words(search.job, best[0].point)}"


def _search_tracker(asked: bool | str):  # type: ignore[no-untyped-def]
    """What logs a search, by an integration's entry point."""
    if asked is False:
        return None
    from importlib.metadata import entry_points

    from maya_core.report.tracking import TRACKERS

    for entry in entry_points(group=TRACKERS, name="mlflow_search"):
        return entry.load()(None if asked is True else asked)
    raise MayaError("Maya's part for MLflow is not installed.", "pip install 'maya-emulator[mlflow]'")


def size(
    recipe: RecipeArgument,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    deadline: Annotated[str | None, typer.Option(help="It must be done by then. 72h, 30d.")] = None,
    budget: Annotated[str | None, typer.Option(help="US dollars it may cost. 200k, 1.5M.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="A GPU to look at; several times. Default: the recipe's.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Numbers of nodes to look at: 1,2,4,8. Default: the recipe's.")
    ] = None,
    memory_margin: Annotated[
        str | None, typer.Option(help="Share of memory to leave free. Default: the recipe's.")
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(help="Write a Slurm script, a PyTorchJob and a SkyPilot task for the choice here.", metavar="DIR"),
    ] = None,
    study: Annotated[Path | None, typer.Option(help="Folder for what is found. Default: maya-search/NAME.")] = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    ray_address: RayOption = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
) -> None:
    """The cheapest cluster that trains so many tokens in time, and the runners-up. The job's knobs are at the recipe's default."""
    from maya_core.search import sizing
    from maya_core.search.launch_files import write_files

    use_hardware_file(hardware)
    job = find_recipe(recipe)
    if tokens is None and samples is None:
        raise MayaError("how much is to be trained?", "Give --tokens 1e12, or --samples 115M.")
    goal = goal_of(job, "cost", False, tokens, samples, deadline, budget, memory_margin)
    gpus = [find_gpu(one).name for one in gpu or job.recipe.sizes.gpus or [job.recipe.cluster.gpu or ""] if one]
    counts = _counts(nodes) or job.recipe.sizes.nodes
    folder = study or Path("maya-search") / job.name
    where = executor_of(executor, workers, ray_address)
    console, status = Console(), Console(stderr=True)
    try:
        with ended_by_signal(), status.status(f"{len(gpus) * len(counts)} clusters") as shown:
            done: list[sizing.Size] = []

            def on_size(found: sizing.Size) -> None:
                done.append(found)
                shown.update(f"{len(done)} of {len(gpus) * len(counts)} clusters: {found.name}")

            sizes = sizing.walk(
                job, gpus, counts, goal, folder, where, profile=profile, hardware=hardware, on_size=on_size
            )  # fmt: skip
    finally:
        where.close()
    console.print(_sizes_table(job, sizes, goal))
    for one in sizes:
        if one.broken in ("failed", "hangs"):
            console.print(Text(f"{one.name} {one.broken}: {one.outcome.why}", style="dim"))
    best = sizes[0]
    if best.broken is not None:
        console.print(Text(f"None of these {len(sizes)} clusters does: the nearest {best.broken}.", style="bold red"))
        raise typer.Exit(1)
    there = sizing.sized(job, best.gpu, best.nodes)
    console.print(f"Launched by:\n  {there.program(best.point).typed}", soft_wrap=True, highlight=False, markup=False)
    if emit is not None:
        for path in write_files(there, best.point, emit):
            console.print(Text(f"Written: {path}", style="dim"))


def _counts(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError as error:
        raise MayaError(f"--nodes {text}: not numbers.", "Give them like 1,2,4,8.") from error
    if min(found) < 1:
        raise MayaError(f"--nodes {text}: a cluster has at least one node.")
    return found


def _sizes_table(job: CheckedRecipe, sizes: list, goal: Goal) -> Table:
    from maya_core.report import wording
    from maya_core.report.terminal import plain_table

    title = f"{job.name}, {wording.count(goal.tokens or goal.samples)} {'tokens' if goal.tokens else 'samples'}"
    table = plain_table(title, "cluster", ">time", ">cost", ">step time", ">MFU", "")
    for one in sizes:
        days = (
            f"{one.seconds / 86400:.1f} d"
            if one.seconds and one.seconds > 2 * 86400
            else f"{one.seconds / 3600:.1f} h"
            if one.seconds
            else "-"
        )
        table.add_row(
            one.name, days, f"${one.usd:,.0f}" if one.usd else "-", wording.seconds(one.outcome.step_time_s),
            f"{one.outcome.mfu:.1%}" if one.outcome.mfu is not None else "-", one.broken or "does",
        )  # fmt: skip
    return table


def check(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Recipes, or --out folders of `maya run`; of a recipe its default is run.", metavar="RECIPE|DIR..."
        ),
    ],
    max_memory: Annotated[str | None, typer.Option(help="Of a GPU, like 76GiB.")] = None,
    max_step_time: Annotated[str | None, typer.Option(help="Seconds, or like 900ms.")] = None,
    max_cost_per_1k_steps: Annotated[str | None, typer.Option(help="US dollars.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Figures of before: what --write-baseline wrote, or a prediction.")
    ] = None,
    max_regression: Annotated[str | None, typer.Option(help="Against the baseline, like 3%.")] = None,
    write_baseline: Annotated[Path | None, typer.Option(help="Write the figures of now here.", metavar="FILE")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.", metavar="FILE")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table here.", metavar="FILE")] = None,
    study: Annotated[
        Path | None, typer.Option(help="Folder for what recipes' runs leave. Default: maya-search/NAME.")
    ] = None,
    profile: ProfileOption = None,
    hardware: HardwareOption = None,
) -> None:
    """Whether jobs fit, and keep to limits, for a CI: exits with 1 if one does not."""
    from maya_core.hardware.units import read_size
    from maya_core.search import gate

    use_hardware_file(hardware)
    limits = gate.Limits(
        number(max_memory, read_size, "--max-memory"),
        number(max_step_time, read_duration, "--max-step-time"),
        number(max_cost_per_1k_steps, read_count, "--max-cost-per-1k-steps"),
        number(max_regression, read_share, "--max-regression"),
    )
    if (max_regression is None) != (baseline is None):
        raise MayaError("--baseline and --max-regression belong together.", "Give both, or neither.")
    before = gate.read_baseline(baseline) if baseline else None
    kept = gate.read_baseline(write_baseline) if write_baseline and write_baseline.exists() else None
    written = (
        (write_baseline, FileKind.BASELINE, lambda verdicts: gate.baseline_of(verdicts, kept)),
        (junit, FileKind.JUNIT, gate.junit),
        (markdown, FileKind.MARKDOWN, gate.markdown),
    )
    for path, kind, _ in written:
        if path is not None:
            check_target(path, kind)
    named = [_subject(subject) for subject in subjects]
    names = [one.name for one in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MayaError(f"two of these jobs are called {twice[0]}.", "Rename one, or check them apart.")
    verdicts = []
    for one in named:
        found = _prediction_of(one, study, profile, hardware)
        verdicts.append(
            gate.failed(one.name, found) if isinstance(found, str) else gate.judge(one.name, found, limits, before)
        )
    console = Console()
    for verdict in verdicts:
        console.print(_verdict_table(verdict))
    for path, kind, text in written:
        if path is not None:
            write_file(path, text(verdicts), kind)
            console.print(Text(f"Written: {path}", style="dim"))
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Subject:
    """What `maya check` is asked about: a recipe, or the folder of a run."""

    name: str
    recipe: CheckedRecipe | None = None
    folder: Path | None = None


def _subject(given: str) -> _Subject:
    path = Path(given)
    if path.is_dir():
        return _Subject(path.resolve().name, folder=path)
    recipe = find_recipe(given)
    return _Subject(recipe.name, recipe)


def _prediction_of(
    subject: _Subject, study: Path | None, profile: str | None, hardware: Path | None
) -> Prediction | str:
    """Of a folder what was predicted there, of a recipe what its default configuration does now; in words why there is none."""
    from maya_core.search.executors import guarded
    from maya_core.search.trial import close_worker, predicted

    if subject.folder is not None:
        return _recorded(subject.folder, profile, hardware)
    recipe = subject.recipe
    assert recipe is not None
    folder = study or Path("maya-search") / recipe.name
    task = task_of(recipe, recipe.default, folder, profile=profile, hardware=hardware)
    with ended_by_signal(), Console(stderr=True).status(f"emulating {recipe.name}"):
        try:
            outcome = guarded(task, Path.cwd())
        finally:
            close_worker()
    found = predicted(task) if outcome.status != "failed" else None
    return found or f"{outcome.why}\nIts command: {recipe.program(recipe.default).typed}"


def _recorded(folder: Path, profile: str | None, hardware: Path | None) -> Prediction:
    """As `maya run` told it, by its own options; anew where other hardware or another calibration is asked for."""
    from maya_core.report.analysis import Options
    from maya_core.report.files import read_prediction
    from maya_core.report.summary import predict
    from maya_core.report.what_if import recorded_cluster
    from maya_core.trace.job import PREDICTION, read_job

    if profile is None and hardware is None and (folder / PREDICTION).exists():
        return read_prediction(folder / PREDICTION)
    job = read_job(folder)
    machine = recorded_cluster(job)
    return predict(job, machine, Options().calibrated(machine.gpu, profile))


def _verdict_table(verdict) -> Table:  # type: ignore[no-untyped-def]
    from maya_core.report.terminal import plain_table
    from maya_core.search import gate

    table = plain_table(verdict.job, "", "check", ">predicted", ">limit")
    for one in verdict.checks:
        mark = Text("ok", style="green") if one.ok else Text("failed", style="bold red")
        table.add_row(mark, one.name + (f" ({one.why})" if one.why else ""), one.found, one.limit)
    judged = " ".join(one.name for one in verdict.checks)
    for name, attribute, tell, _ in gate.JUDGED[1:]:  # memory is judged always
        if name not in judged:
            table.add_row("", name, tell(getattr(verdict.figures, attribute)), "")
    return table


def add(app: typer.Typer) -> None:
    app.add_typer(recipes, name="recipes")
    for command in (search, size, check):
        app.command()(command)
