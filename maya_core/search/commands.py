"""The commands `maya recipes`, `maya search`, `maya size` and `maya check`: their options, their progress and their output.

The work behind them is done by `study.py`, `sizing.py` and `gate.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from maya_core import pipeline
from maya_core.command_options import takes
from maya_core.errors import MayaError
from maya_core.files import FileKind, check_target, write_file
from maya_core.hardware.catalog import DEFAULT_GPU, find_gpu
from maya_core.hardware.units import read_count, read_duration, read_share, read_size
from maya_core.installation import how_to_install
from maya_core.launch.signals import ended_by_signal
from maya_core.report.prediction import Prediction
from maya_core.report.prediction_file import read_prediction
from maya_core.request import PredictionOptions, Request
from maya_core.search import result
from maya_core.search.executors import Executor, LocalExecutor, RayExecutor
from maya_core.search.gate import Limits, Verdict
from maya_core.search.recipe import CheckedRecipe
from maya_core.search.shipped import find_recipe, new_recipe, shipped
from maya_core.search.sizing import Size
from maya_core.search.study import OBJECTIVES, SAMPLERS, Goal, Plan, Search, Trial
from maya_core.search.trial import task_of
from maya_core.trace.job import PREDICTION, read_run
from maya_core.trace.run_folder import find_run
from maya_core.tracking import search_trackers

recipes = typer.Typer(help="Lists the included recipes, and writes new ones. A recipe is a job as a file.")

RecipeArgument = Annotated[
    str, typer.Argument(help="The file of a recipe, or the name of an included one.", metavar="RECIPE")
]
TokensOption = Annotated[str | None, typer.Option(help="The tokens of the whole training, such as 1e12 or 300B.")]
SamplesOption = Annotated[
    str | None, typer.Option(help="The samples of the whole training (images, for example), such as 115M.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="How many trials run at a time. Default: the number of cores, or of Ray's CPUs."),
]
RayOption = Annotated[
    str | None, typer.Option(help="The address of the Ray cluster. Default: auto.", metavar="ADDRESS")
]
ExecutorOption = Annotated[str, typer.Option(help="Where trials run: 'local', or 'ray' for an existing Ray cluster.")]


def number(text: str | None, read: Callable[[object], object], option: str) -> float | None:
    """The value of an option that people write with a unit, such as 72h or 1e12."""
    if text is None:
        return None
    try:
        value = read(text)
    except ValueError as error:
        raise MayaError(f"{option} {text}: it {error}.") from error
    assert isinstance(value, int | float)
    return float(value)


def executor_of(name: str, workers: int | None, address: str | None) -> Executor:
    if name not in ("local", "ray"):
        raise MayaError(f"there is no executor '{name}'.", "Give 'local' or 'ray'.")
    if name == "local" and address is not None:
        raise MayaError("--ray-address was given without --executor ray.", "Give both, or neither.")
    return RayExecutor(address, workers) if name == "ray" else LocalExecutor(workers or len(os.sched_getaffinity(0)))


@recipes.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """Lists the included recipes."""
    if context.invoked_subcommand is not None:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    jobs = [find_recipe(str(path)) for path in shipped()]
    missing = list(dict.fromkeys(package for job in jobs for package in job.missing_packages))
    for title in ("recipe", "about", "runs on", "points", *(["missing"] if missing else [])):
        justify: Literal["right", "left"] = "right" if title == "points" else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title == "recipe")
    for job in jobs:
        spec = job.recipe.cluster
        where = f"{(spec.nodes or 1) * (spec.gpus_per_node or 1)} x {spec.gpu or spec.node}"
        row = [job.name, job.recipe.about, where, f"{job.size:,}"]
        table.add_row(*row, *([Text("\n".join(job.missing_packages), style="yellow")] if missing else []))
    console = Console()
    console.print(table)
    if missing:
        console.print(
            f"To run those with missing packages: {how_to_install(packages=missing)}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    console.print(
        Text("`maya search NAME` finds its best configuration; `maya check NAME` runs its default.", style="dim")
    )


@recipes.command()
def new(
    path: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE.yaml")],
    command: Annotated[list[str], typer.Argument(help="The command, as you would type it.", metavar="-- COMMAND")],
    gpu: Annotated[str, typer.Option(help="The GPU that it runs on.")] = DEFAULT_GPU,
    nodes: Annotated[int, typer.Option(min=1, help="The number of nodes.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each node.")] = 1,
) -> None:
    """Writes a recipe for a command. Options with numbers that people usually tune become knobs."""
    if path.exists():
        raise MayaError(f"{path} already exists and is not overwritten.", "Give another name.")
    if not path.parent.is_dir():
        raise MayaError(f"the folder {path.parent} does not exist.", "Create it, or give another path.")
    nodes, gpus_per_node = _world_in(command, nodes, gpus_per_node)
    path.write_text(new_recipe(command, find_gpu(gpu).name, nodes, gpus_per_node))
    try:
        find_recipe(str(path)).check_can_run()
    except MayaError:
        path.unlink()
        raise
    Console().print(
        f"Written: {path}. Check its `space`, then run: maya search {path}", highlight=False, soft_wrap=True
    )


def _world_in(command: list[str], nodes: int, gpus_per_node: int) -> tuple[int, int]:
    """The nodes and the GPUs per node that the command itself requests from its launcher; otherwise those given."""
    from maya_core.launch import launchers, torchrun

    args = torchrun.parse(command)
    if args is not None:
        world = torchrun.world_of(args, gpus_per_node)
        return world.nodes, world.ranks_per_node
    requested = launchers.requested_world(command)
    return requested[0] or nodes, requested[1] or gpus_per_node


@takes(PredictionOptions, but=("samples_per_step", "tokens_per_step"), tracked=True)
def search(
    recipe: RecipeArgument,
    request: Request,
    trials: Annotated[int, typer.Option(min=1, help="The most trials to run. A grid runs all of its points.")] = 100,
    sampler: Annotated[str, typer.Option(help="tpe, cmaes, nsga2 (time and cost together), grid or random.")] = "tpe",
    objective: Annotated[str | None, typer.Option(help=f"{', '.join(OBJECTIVES)}. Default: the recipe's.")] = None,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    deadline: Annotated[str | None, typer.Option(help="The longest that the whole training may take: 72h, 3d.")] = None,
    budget: Annotated[str | None, typer.Option(help="US dollars that the whole training may cost: 200k.")] = None,
    memory_margin: Annotated[
        str | None, typer.Option(help="Share of a GPU's memory that must stay free, like 5%. Default: the recipe's.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="The search's folder; an interrupted search resumes from it. Default: maya-search/NAME."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="A folder of predictions that several searches share. Default: the study's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the sampler.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="How many configurations are chosen at a time.")] = 4,
    prune: Annotated[
        bool, typer.Option(help="Skip configurations that certainly do not fit, according to what the recipe declares.")
    ] = True,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    ray_address: RayOption = None,
) -> None:
    """Finds the best configuration of a recipe that fits. If it is interrupted, the same command resumes it."""
    job = find_recipe(recipe)
    job.check_can_run()
    _check_choice("sampler", sampler, SAMPLERS)
    if objective is not None:
        _check_choice("objective", objective, OBJECTIVES)
    goal = goal_of(job, objective, sampler == "nsga2", tokens, samples, deadline, budget, memory_margin)
    trackers = search_trackers(request.tracking)
    folder = study or Path("maya-search") / job.name
    plan = Plan(sampler=sampler, seed=seed, batch=batch, prune=prune)  # type: ignore[arg-type]
    found = Search(job, goal, plan, folder, lambda point: task_of(job, point, cache or folder, request))
    limit = job.size if sampler == "grid" else trials
    where = executor_of(executor, workers, ray_address)
    _announce(found, limit, where)
    _run_and_write(found, limit, where)
    _conclude(found)
    for tracker in trackers:
        tracker(found)
    if not found.best():
        raise typer.Exit(1)


def _run_and_write(search: Search, limit: int, executor: Executor) -> None:
    """Runs a search and writes its results, also if it is interrupted."""
    console = Console()
    try:
        with ended_by_signal():
            _run(search, limit, executor)
    except (KeyboardInterrupt, SystemExit):
        console.print(f"Interrupted. {len(search.trials):,} trials are stored; the same command resumes the search.")
        raise
    finally:
        executor.close()
        search.close()
        if search.trials:
            for path in result.write(search, search.folder):
                console.print(Text(f"Written: {path}", style="dim"))


def _conclude(search: Search) -> None:
    console = Console()
    console.print(result.summary(search))
    if best := search.best():
        console.print(Text("Launch the best configuration with:", style="bold"))
        console.print(f"  {search.job.program(best[0].point).typed}", soft_wrap=True, highlight=False, markup=False)


def _check_choice(what: str, chosen: str, choices: Sequence[str]) -> None:
    if chosen not in choices:
        raise MayaError(f"there is no {what} '{chosen}'.", f"The choices are {', '.join(choices)}.")


def _announce(search: Search, limit: int, where: Executor) -> None:
    console, job, plan = Console(), search.job, search.plan
    possible = f", of which {search.possible:,} are possible and different" if search.possible is not None else ""
    most = min(limit, search.possible or limit)
    console.print(
        f"{job.name}: {len(job.knobs)} knob{'s' * (len(job.knobs) != 1)}, {job.size:,} points{possible}. Sampler {plan.sampler}: at most {most:,} trials, {min(where.workers, plan.batch)} at a time."
        + (f" {search.stored:,} trials are already stored." if search.stored else ""),
        highlight=False,
    )
    if where.workers > plan.batch:
        hint = f"{where.workers} trials could run at a time: use --batch {where.workers}."
        console.print(Text(hint, style="dim"))


def goal_of(
    job: CheckedRecipe, objective: str | None, pareto: bool, tokens: str | None, samples: str | None, deadline: str | None,
    budget: str | None, margin: str | None,
) -> Goal:  # fmt: skip
    constraints = job.recipe.constraints
    chosen_margin = number(margin, read_share, "--memory-margin")
    goal = Goal(
        objective=objective or job.recipe.objective,  # type: ignore[arg-type]
        pareto=pareto,
        memory_margin=constraints.memory_margin if chosen_margin is None else chosen_margin,
        max_step_time_s=constraints.max_step_time_s,
        max_usd_per_1k_steps=constraints.max_usd_per_1k_steps,
        tokens=number(tokens, read_count, "--tokens"),
        samples=number(samples, read_count, "--samples"),
        deadline_s=number(deadline, read_duration, "--deadline"),
        budget_usd=number(budget, read_count, "--budget"),
    )
    if goal.tokens is not None and goal.samples is not None:
        raise MayaError("both --tokens and --samples were given.", "Give only one of them.")
    whole = goal.tokens is not None or goal.samples is not None
    if not whole and (goal.deadline_s is not None or goal.budget_usd is not None):
        raise MayaError(
            "a deadline or a budget was given, but neither --tokens nor --samples.",
            "Give the length of the training: --tokens 1e12, or --samples 115M.",
        )
    return goal


def _run(search: Search, limit: int, executor: Executor) -> None:
    """Runs the search. The last lines of the terminal show its progress."""
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
    figures = result.figures(best[0])
    return f"{result.counts_in_words(search)}; best so far {figures[0]}, trial {best[0].number}: {result.knobs_in_words(search.job, best[0].point)}"


@takes(PredictionOptions, but=("samples_per_step", "tokens_per_step"))
def size(
    recipe: RecipeArgument,
    request: Request,
    tokens: TokensOption = None,
    samples: SamplesOption = None,
    deadline: Annotated[str | None, typer.Option(help="The longest that the training may take: 72h, 30d.")] = None,
    budget: Annotated[str | None, typer.Option(help="US dollars that it may cost: 200k, 1.5M.")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A GPU to try. Give it several times to try several. Default: the recipe's."),
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="Numbers of nodes to try: 1,2,4,8. Default: the recipe's.")] = None,
    memory_margin: Annotated[
        str | None, typer.Option(help="Share of memory that must stay free. Default: the recipe's.")
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option(
            help="A folder to write a Slurm script, a PyTorchJob and a SkyPilot task for the chosen cluster to.",
            metavar="DIR",
        ),
    ] = None,
    study: Annotated[Path | None, typer.Option(help="The folder for the results. Default: maya-search/NAME.")] = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    ray_address: RayOption = None,
) -> None:
    """Finds the cheapest cluster that trains this many tokens in time, and ranks the others. The knobs of the recipe have their default values."""
    from maya_core.search import sizing

    job = find_recipe(recipe)
    job.check_can_run()
    if tokens is None and samples is None:
        raise MayaError("the length of the training is missing.", "Give --tokens 1e12, or --samples 115M.")
    goal = goal_of(job, "cost", False, tokens, samples, deadline, budget, memory_margin)
    gpus = [find_gpu(one).name for one in gpu or job.recipe.sizes.gpus or [job.recipe.cluster.gpu or ""] if one]
    counts = _counts(nodes) or job.recipe.sizes.nodes
    folder = study or Path("maya-search") / job.name
    where = executor_of(executor, workers, ray_address)
    try:
        with ended_by_signal(), Console(stderr=True).status(f"{len(gpus) * len(counts)} clusters") as shown:
            done: list[sizing.Size] = []

            def on_size(found: sizing.Size) -> None:
                done.append(found)
                shown.update(f"{len(done)} of {len(gpus) * len(counts)} clusters: {found.name}")

            sizes = sizing.walk(job, gpus, counts, goal, folder, where, given=request, on_size=on_size)
    finally:
        where.close()
    _report_sizes(job, sizes, goal, emit)


def _report_sizes(job: CheckedRecipe, sizes: list[Size], goal: Goal, emit: Path | None) -> None:
    """Prints the clusters and how to launch the best one; writes its launch files to `emit`."""
    from maya_core.search.launch_files import write_files
    from maya_core.search.sizing import sized

    console = Console()
    console.print(_sizes_table(job, sizes, goal))
    for one in sizes:
        if one.broken in ("failed", "hangs"):
            console.print(Text(f"{one.name} {one.broken}: {one.outcome.why}", style="dim"))
    best = sizes[0]
    if best.broken is not None:
        verdict = f"None of these {len(sizes)} clusters works. The closest is {best.name}: {best.broken}."
        console.print(Text(verdict, style="bold red"))
        raise typer.Exit(1)
    recipe = sized(job, best.gpu, best.nodes)
    launch = f"Launch it with:\n  {recipe.program(best.point).typed}"
    console.print(launch, soft_wrap=True, highlight=False, markup=False)
    if emit is not None:
        for path in write_files(recipe, best.point, emit):
            console.print(Text(f"Written: {path}", style="dim"))


def _counts(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError as error:
        raise MayaError(f"--nodes {text}: these are not numbers.", "Give numbers such as 1,2,4,8.") from error
    if min(found) < 1:
        raise MayaError(f"--nodes {text}: a cluster has at least one node.")
    return found


def _sizes_table(job: CheckedRecipe, sizes: list[Size], goal: Goal) -> Table:
    from maya_core.report import wording
    from maya_core.report.terminal import plain_table

    title = f"{job.name}, {wording.count(goal.tokens or goal.samples)} {'tokens' if goal.tokens else 'samples'}"
    table = plain_table(title, "cluster", ">time", ">cost", ">step time", ">MFU", "")
    for one in sizes:
        table.add_row(
            one.name, _duration(one.seconds), f"${one.usd:,.0f}" if one.usd else "-",
            wording.seconds(one.outcome.step_time_s),
            wording.share(one.outcome.mfu) if one.outcome.mfu is not None else "-", one.broken or "works",
        )  # fmt: skip
    return table


def _duration(seconds: float | None) -> str:
    """Hours, or days if there are more than two of them."""
    if not seconds:
        return "-"
    return f"{seconds / 86400:.1f} d" if seconds > 2 * 86400 else f"{seconds / 3600:.1f} h"


@takes(PredictionOptions, but=("samples_per_step", "tokens_per_step"))
def check(
    subjects: Annotated[
        list[str],
        typer.Argument(
            help="Recipes, whose default configuration is run, or runs of `maya run`: their folders, or a folder of runs, whose newest is meant.",
            metavar="RECIPE|RUN...",
        ),
    ],
    request: Request,
    max_memory: Annotated[str | None, typer.Option(help="The most memory that a GPU may need, like 76GiB.")] = None,
    max_step_time: Annotated[str | None, typer.Option(help="The longest step: seconds, or like 900ms.")] = None,
    max_cost_per_1k_steps: Annotated[str | None, typer.Option(help="The most US dollars per 1,000 steps.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Earlier figures to compare with: a file of --write-baseline, or a prediction.")
    ] = None,
    max_regression: Annotated[
        str | None, typer.Option(help="How much worse than the baseline a job may be, like 3%.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write the present figures to this file.", metavar="FILE")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.", metavar="FILE")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table to this file.", metavar="FILE")] = None,
    study: Annotated[
        Path | None, typer.Option(help="The folder for the runs of recipes. Default: maya-search/NAME.")
    ] = None,
) -> None:
    """Checks that jobs fit and keep their limits, as a gate in CI. The exit code is 1 if one does not."""
    from maya_core.search import gate

    limits = _limits(max_memory, max_step_time, max_cost_per_1k_steps, max_regression)
    if (max_regression is None) != (baseline is None):
        raise MayaError("--baseline and --max-regression only work together.", "Give both, or neither.")
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
    verdicts = []
    for one in _subjects(subjects):
        found = _prediction_of(one, study, request)
        verdicts.append(
            gate.failed(one.name, found) if isinstance(found, str) else gate.judge(one.name, found, limits, before)
        )
    for verdict in verdicts:
        Console().print(_verdict_table(verdict))
    for path, kind, text in written:
        if path is not None:
            write_file(path, text(verdicts), kind)
            Console().print(Text(f"Written: {path}", style="dim"))
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


def _limits(memory: str | None, step_time: str | None, cost: str | None, regression: str | None) -> Limits:
    """The limits that were typed."""
    return Limits(
        number(memory, read_size, "--max-memory"),
        number(step_time, read_duration, "--max-step-time"),
        number(cost, read_count, "--max-cost-per-1k-steps"),
        number(regression, read_share, "--max-regression"),
    )


@dataclass(frozen=True)
class _Subject:
    """What `maya check` checks: a recipe, or the folder of a run."""

    name: str
    recipe: CheckedRecipe | None = None
    folder: Path | None = None


def _subjects(given: list[str]) -> list[_Subject]:
    """All subjects. Their names must differ, because the baseline and the reports use them."""
    subjects = [_subject(one) for one in given]
    names = [one.name for one in subjects]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MayaError(f"two of these jobs have the name {twice[0]}.", "Rename one, or check them separately.")
    return subjects


def _subject(given: str) -> _Subject:
    path = Path(given)
    if path.is_dir():
        # Not the name of the run, which is another one each time: a baseline knows jobs by their names.
        return _Subject(path.absolute().name, folder=find_run(path))
    recipe = find_recipe(given)
    recipe.check_can_run()
    return _Subject(recipe.name, recipe)


def _prediction_of(subject: _Subject, study: Path | None, request: Request) -> Prediction | str:
    """The prediction of a run, or of a recipe's default configuration; if there is none, a text that explains why."""
    from maya_core.search.executors import guarded
    from maya_core.search.trial import close_worker, predicted

    if subject.folder is not None:
        return _recorded(subject.folder, request)
    recipe = subject.recipe
    assert recipe is not None
    task = task_of(recipe, recipe.default, study or Path("maya-search") / recipe.name, request)
    with ended_by_signal(), Console(stderr=True).status(f"emulating {recipe.name}"):
        try:
            outcome = guarded(task, Path.cwd())
        finally:
            close_worker()
    found = predicted(task) if outcome.status != "failed" else None
    return found or f"{outcome.why}\nIts command: {recipe.program(recipe.default).typed}"


def _recorded(folder: Path, request: Request) -> Prediction:
    """The prediction that `maya run` stored; a new one if `maya check` was given options."""
    if not request.model_fields_set - {"tracking"} and (folder / PREDICTION).exists():
        return read_prediction(folder / PREDICTION)
    return pipeline.predict(read_run(folder), request)


def _verdict_table(verdict: Verdict) -> Table:
    from maya_core.report.terminal import plain_table
    from maya_core.search import gate

    table = plain_table(verdict.job, "", "check", ">predicted", ">limit")
    for one in verdict.checks:
        mark = Text("ok", style="green") if one.ok else Text("failed", style="bold red")
        table.add_row(mark, one.name + (f" ({one.why})" if one.why else ""), one.found, one.limit)
    judged = " ".join(one.name for one in verdict.checks)
    for name, attribute, write, _ in gate.JUDGED[1:]:  # memory is always judged
        if name not in judged:
            table.add_row("", name, write(getattr(verdict.figures, attribute)), "")
    return table


def add(app: typer.Typer) -> None:
    app.add_typer(recipes, name="recipes")
    for command in (search, size, check):
        app.command()(command)
