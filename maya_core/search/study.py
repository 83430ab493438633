"""The search itself: which configuration is tried next, and what is known so far.

Optuna's samplers choose, in batches. What is chosen depends on nothing but the recipe, the seed and the outcomes of earlier batches, and an
outcome is written down once it and all before it are known. So a search that was killed goes on as if it had not been: it
chooses again what it chose, takes the outcomes that are written down, and runs the rest.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from maya_core.errors import MayaError
from maya_core.recording.files_read import stamp
from maya_core.search.executors import Executor
from maya_core.search.pruning import Pruner
from maya_core.search.recipe import CheckedRecipe, Point
from maya_core.search.trial import Outcome, Task
from maya_core.version import __version__

Sampler = Literal["tpe", "cmaes", "nsga2", "grid", "random"]
Objective = Literal["step_time", "cost", "tokens_per_dollar", "samples_per_dollar"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
SAMPLERS: tuple[str, ...] = get_args(Sampler)
DATABASE = "study.db"
ASKS = 8  # of a sampler for a configuration that is possible and new, before its nearest is taken
LISTED = 50_000  # points of a space that are listed to know which are left
FILES = "files"  # of the user's, that the program read: kept with the study
LEFT_OUT = "left out"  # how a trial came to its outcome that was concluded from another


class Goal(BaseModel):
    """What is searched for. `tokens` or `samples`, `deadline_s` and `budget_usd` are of the whole training."""

    model_config = ConfigDict(frozen=True)

    objective: Objective = "step_time"
    pareto: bool = False  # step time and cost both
    memory_margin: float = 0.0
    max_step_time_s: float | None = None
    max_usd_per_1k_steps: float | None = None
    tokens: float | None = None
    samples: float | None = None  # instead of tokens
    deadline_s: float | None = None
    budget_usd: float | None = None

    @property
    def names(self) -> list[str]:
        return ["step_time", "cost"] if self.pareto else [self.objective]

    @property
    def directions(self) -> list[str]:
        return ["maximize" if name.endswith("_per_dollar") else "minimize" for name in self.names]

    def values(self, outcome: Outcome) -> list[float] | None:
        """By objective; None if the outcome has no such figure."""
        bought = 3600 / outcome.usd_per_hour if outcome.usd_per_hour else None  # seconds that a dollar buys
        known = {
            "step_time": outcome.step_time_s,
            "cost": outcome.usd_per_1k_steps,
            "tokens_per_dollar": bought and outcome.tokens_per_s and bought * outcome.tokens_per_s,
            "samples_per_dollar": bought and outcome.samples_per_s and bought * outcome.samples_per_s,
        }
        found = [known[name] for name in self.names]
        return [value for value in found if value is not None] if None not in found else None

    def broken(self, outcome: Outcome) -> str | None:
        """What it does not keep to, in words; None if it may be chosen."""
        if outcome.status != "fits":
            return outcome.status
        if outcome.used_bytes and outcome.capacity_bytes:
            left = 1 - outcome.used_bytes / outcome.capacity_bytes
            if left < self.memory_margin:
                return f"leaves {left:.1%} of memory free, not {self.memory_margin:.1%}"
        if self.max_step_time_s is not None and (outcome.step_time_s or 0) > self.max_step_time_s:
            return f"a step takes longer than {self.max_step_time_s:g} s"
        if (unknown := self._unknown(outcome)) is not None:
            return unknown
        if self.max_usd_per_1k_steps is not None and (outcome.usd_per_1k_steps or 0) > self.max_usd_per_1k_steps:
            return f"1,000 steps cost more than ${self.max_usd_per_1k_steps:g}"
        if self.deadline_s is not None and (self.training_s(outcome) or 0) > self.deadline_s:
            return "is not done by the deadline"
        if self.budget_usd is not None and (self.training_usd(outcome) or 0) > self.budget_usd:
            return "costs more than the budget"
        return None

    def _unknown(self, outcome: Outcome) -> str | None:
        """A figure that it would have to be judged by and does not have."""
        counted = {"tokens": outcome.tokens_per_s, "samples": outcome.samples_per_s}
        for what, per_s in counted.items():
            if per_s is None and (getattr(self, what) is not None or self.objective == f"{what}_per_dollar"):
                return f"its {what} of a step are not known (give {what}_per_step in the recipe)"
        steps_priced = self.max_usd_per_1k_steps is not None or self.pareto or self.objective == "cost"
        hours_priced = self.budget_usd is not None or self.objective.endswith("_per_dollar")
        unknown = (steps_priced and outcome.usd_per_1k_steps is None) or (hours_priced and outcome.usd_per_hour is None)
        return "its price is not known" if unknown else None

    def training_s(self, outcome: Outcome) -> float | None:
        if self.tokens is not None:
            return self.tokens / outcome.tokens_per_s if outcome.tokens_per_s else None
        return self.samples / outcome.samples_per_s if self.samples and outcome.samples_per_s else None

    def training_usd(self, outcome: Outcome) -> float | None:
        seconds = self.training_s(outcome)
        return seconds / 3600 * outcome.usd_per_hour if seconds and outcome.usd_per_hour else None


class Plan(BaseModel):
    """How it is searched. A study goes on under the plan it was begun with."""

    model_config = ConfigDict(frozen=True)

    sampler: Sampler = "tpe"
    seed: int = 0
    batch: int = 4
    prune: bool = True


@dataclass(frozen=True)
class Trial:
    number: int
    point: Point
    outcome: Outcome
    broken: str | None  # why it may not be chosen

    @property
    def how(self) -> str:
        return LEFT_OUT if self.outcome.why.startswith(LEFT_OUT) else self.outcome.how


@dataclass
class Search:
    """A study of a recipe, in a folder."""

    job: CheckedRecipe
    goal: Goal
    plan: Plan
    folder: Path
    make_task: Callable[[Point], Task]
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        optuna = _optuna()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MayaError(
                f"another search is running in {self.folder}.", "Wait for it, or give another --study."
            ) from error
        self._pruner = Pruner(self.job)
        self._engine = optuna.create_study(directions=self.goal.directions)
        self._kept = optuna.create_study(
            storage=f"sqlite:///{self.folder / DATABASE}",
            study_name=self.job.name,
            directions=self.goal.directions,
            load_if_exists=True,
        )
        self._stored = [trial for trial in self._kept.get_trials(deepcopy=False) if trial.state.is_finished()]
        try:
            self._check_same()
        except MayaError:
            self.close()
            raise
        self._seen: set[str] = set()

    # ---- to the outside ----

    @property
    def possible(self) -> int | None:
        """How many different configurations there are; None where the space is too large to count them."""
        return len(self._every) if self._every is not None else None

    @property
    def stored(self) -> int:
        return len(self._stored)

    def counts(self) -> Counter[str]:
        return Counter(trial.how for trial in self.trials)

    def best(self) -> list[Trial]:
        """Those that may be chosen, best first; of two objectives, by the first."""
        fit = [trial for trial in self.trials if trial.broken is None and self.goal.values(trial.outcome) is not None]
        sign = -1 if self.goal.directions[0] == "maximize" else 1
        return sorted(fit, key=lambda trial: (sign * (self.goal.values(trial.outcome) or [0.0])[0], trial.number))

    def run(self, trials: int, executor: Executor, on_trial: Callable[[Trial], None] = lambda _: None) -> None:
        """Until there are so many trials, or no configuration is left."""
        while len(self.trials) < trials:
            proposed = []
            for number in range(len(self.trials), min(trials, len(self.trials) + self._batch_left())):
                asked = self._ask(number)
                if asked is None:
                    break
                proposed.append(asked)
            if not proposed:
                return
            for (number, point, engine_trial), outcome in zip(
                proposed, self._outcomes(proposed, executor), strict=True
            ):
                trial = Trial(number, point, outcome, self.goal.broken(outcome))
                self._tell(trial, engine_trial)
                on_trial(trial)
            self._note_files()

    def close(self) -> None:
        self._lock.close()

    # ---- choosing ----

    def _batch_left(self) -> int:
        """The first trial is one alone: if the recipe itself is wrong, that is enough to know."""
        done = len(self.trials)
        return 1 if done == 0 else self.plan.batch - (done - 1) % self.plan.batch

    def _ask(self, number: int) -> tuple[int, Point, Any] | None:
        """The configuration of that trial: a possible one, and new. None if none is left."""
        if number == 0:
            return self._taken(number, self.job.default, self._fixed(self.job.default))
        if self.plan.sampler == "grid":
            point = next((one for one in self._ordered() if self._key(one) not in self._seen), None)
            return None if point is None else self._taken(number, point, self._fixed(point))
        if self._every is not None and len(self._seen) >= len(self._every):
            return None
        for attempt in range(ASKS):
            self._engine.sampler = self._sampler(number, attempt)
            asked = self._engine.ask()
            wanted = self._suggested(asked)
            if self._new(wanted):
                return self._taken(number, wanted, asked)
            self._engine.tell(asked, state=_optuna().trial.TrialState.FAIL)
        near = self._nearest(number, wanted)
        return None if near is None else self._taken(number, near, self._fixed(near))

    def _new(self, point: Point) -> bool:
        return self.job.violated(point) is None and self._key(point) not in self._seen

    def _key(self, point: Point) -> str:
        return str(sorted(self.job.canonical(point).items()))

    def _taken(self, number: int, point: Point, engine_trial: Any) -> tuple[int, Point, Any]:
        self._seen.add(self._key(point))
        return number, self.job.canonical(point), engine_trial

    @property
    def _every(self) -> list[Point] | None:
        if not hasattr(self, "_listed"):
            self._listed: list[Point] | None = None
            if self.job.size <= LISTED:
                possible = (self.job.canonical(one) for one in self.job.points() if self.job.violated(one) is None)
                self._listed = list({self._key(one): one for one in possible}.values())
        return self._listed

    def _ordered(self) -> Iterator[Point]:
        """For the grid: in the order in which most need not be run."""
        if self._every is None:
            raise MayaError(
                f"a grid of {self.job.size:,} points is too large.",
                "Search it with --sampler tpe, or turn fewer knobs.",
            )
        if not hasattr(self, "_sorted"):
            self._sorted = sorted(self._every, key=self._pruner.order)
        return iter(self._sorted)

    def _nearest(self, number: int, point: Point) -> Point | None:
        """Of those that are left the one that differs least from what the sampler wants; of several, one by lot."""
        lot = random.Random(f"{self.plan.seed} {number}")
        if self._every is None:  # too many to look at
            for _ in range(10_000):
                drawn = {name: lot.choice(knob.choices) for name, knob in self.job.knobs.items()}
                if self._new(drawn):
                    return drawn
            return None
        left = [one for one in self._every if self._key(one) not in self._seen]
        least = min((self._distance(one, point) for one in left), default=0.0)
        return lot.choice([one for one in left if self._distance(one, point) == least]) if left else None

    def _distance(self, one: Point, other: Point) -> float:
        """By knob: how far along its scale, or 1 for another choice."""
        total = 0.0
        for name, knob in self.job.knobs.items():
            if one[name] != other[name]:
                apart = abs(knob.choices.index(one[name]) - knob.choices.index(other[name]))
                total += apart / (len(knob.choices) - 1) if _is_scale(knob.choices) else 1.0
        return total

    # ---- Optuna's side ----

    def _sampler(self, number: int, attempt: int) -> Any:
        """Made anew for every question, with a seed of its own: what it answers hangs on what it has been told, not on how often it was asked."""
        samplers = _optuna().samplers
        seed = int.from_bytes(hashlib.sha256(f"{self.plan.seed} {number} {attempt}".encode()).digest()[:4], "big")
        first = min(40, max(10, 3 * len(self.job.knobs)))
        match self.plan.sampler:
            case "tpe":
                return samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=first)
            case "cmaes":
                _needs("cmaes")
                return samplers.CmaEsSampler(seed=seed, n_startup_trials=first, warn_independent_sampling=False)
            case "nsga2":
                return samplers.NSGAIISampler(seed=seed, population_size=max(12, 2 * self.plan.batch))
        return samplers.RandomSampler(seed=seed)

    def _suggested(self, asked: Any) -> Point:
        """A knob whose values are numbers is a scale, any other a choice."""
        point: Point = {}
        for name, knob in self.job.knobs.items():
            if _is_scale(knob.choices):
                point[name] = knob.choices[asked.suggest_int(name, 0, len(knob.choices) - 1)]
            else:
                point[name] = knob.choices[asked.suggest_categorical(name, list(range(len(knob.choices))))]
        return point

    def _fixed(self, point: Point) -> Any:
        places = {name: knob.choices.index(point[name]) for name, knob in self.job.knobs.items()}
        self._engine.enqueue_trial(places)
        self._engine.sampler = _optuna().samplers.RandomSampler(seed=0)
        asked = self._engine.ask()
        self._suggested(asked)
        return asked

    def _tell(self, trial: Trial, engine_trial: Any) -> None:
        states = _optuna().trial.TrialState
        values = self.goal.values(trial.outcome)
        if trial.outcome.status == "out of memory":
            self._pruner.note_out_of_memory(trial.point)
        elif trial.broken is None:
            self._pruner.note_chosen(trial.point)
        if trial.broken is None and values is not None:
            self._engine.tell(engine_trial, values)
        elif self.goal.pareto:  # NSGA-II knows no pruned trials
            self._engine.tell(engine_trial, state=states.FAIL)
        else:
            self._engine.tell(engine_trial, state=states.PRUNED)
        self.trials.append(trial)

    # ---- outcomes ----

    def _outcomes(self, proposed: list[tuple[int, Point, Any]], executor: Executor) -> Iterator[Outcome]:
        """In the order of numbers. Whatever is new is written down before it is given."""
        known: dict[int, Outcome] = {}
        tasks: dict[int, Task] = {}
        for number, point, _ in proposed:
            if number < len(self._stored):
                known[number] = self._read(number, point)
            elif (concluded := self._concluded(point)) is not None:
                known[number] = concluded
            else:
                tasks[number] = self.make_task(point)
        coming = executor.outcomes(tasks) if tasks else iter(())
        for number, point, _ in proposed:
            while number not in known:
                got, outcome = next(coming)
                known[got] = outcome
            if number == 0 and known[number].status == "failed":  # not kept: it is to be mended, and tried again
                raise MayaError(
                    f"the default configuration of {self.job.name} fails: {known[number].why}",
                    f"Mend that first. Its command: {self.job.program(point).typed}",
                )
            if number >= len(self._stored):
                self._write(number, point, known[number])
            yield known[number]

    def _concluded(self, point: Point) -> Outcome | None:
        """What surely comes of a configuration, by others that were run in earlier batches."""
        if not self.plan.prune:
            return None
        if (like := self._pruner.out_of_memory(point)) is not None:
            why = f"{LEFT_OUT}: {self._difference(point, like)} does not fit either, and needs no more"
            return Outcome(status="out of memory", why=why)
        if self.goal.pareto:
            return None
        # What takes less time is cheaper only where an hour costs the same, and buys more only where a step does.
        alike = self.goal.objective != "step_time"
        if (like := self._pruner.slower(point, alike=alike)) is not None:
            return Outcome(
                status="slower", why=f"{LEFT_OUT}: {self._difference(point, like)} fits, and takes no longer"
            )
        return None

    def _difference(self, point: Point, like: Point) -> str:
        mine = self.job.canonical(point)
        return (
            "with " + ", ".join(f"{name} {like[name]}" for name in self.job.knobs if like[name] != mine[name]) + " it"
        )

    def _read(self, number: int, point: Point) -> Outcome:
        stored = self._stored[number]
        there = {name: stored.params.get(name) for name in self.job.knobs}
        if there != point:
            raise MayaError(
                f"the study in {self.folder} tried {there} where this search would try {point}: one of them is of another version.",
                "Give another --study for a new one.",
            )
        return Outcome.model_validate(stored.user_attrs["outcome"])

    def _write(self, number: int, point: Point, outcome: Outcome) -> None:
        optuna = _optuna()
        broken, values = self.goal.broken(outcome), self.goal.values(outcome)
        ok = broken is None and values is not None
        self._kept.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if ok else optuna.trial.TrialState.PRUNED,
                values=values if ok else None,
                params=point,
                distributions={
                    name: optuna.distributions.CategoricalDistribution(knob.choices)
                    for name, knob in self.job.knobs.items()
                },
                user_attrs={"outcome": outcome.model_dump(mode="json"), "broken": broken or "", "trial": number},
            )
        )

    def _check_same(self) -> None:
        """A study goes on only if it is the same search."""
        told = {
            "recipe": hashlib.sha256(self.job.recipe.model_dump_json().encode()).hexdigest()[:16],
            "goal": self.goal.model_dump(),
            "plan": self.plan.model_dump(),
            "version": f"Maya {__version__}, torch {version('torch')}",
            "hardware, price or calibration": self.make_task(self.job.default).pricing,
        }
        before = self._kept.user_attrs if self._stored else {}  # without a trial nothing of it counts yet
        for name, value in told.items():
            if name in before and before[name] != value:
                raise MayaError(
                    f"the study in {self.folder} was begun with another {name}.",
                    "Give the same options to go on with it, or another --study for a new one.",
                )
            if name not in before:
                self._kept.set_user_attr(name, value)
        changed = [path for path, was in before.get(FILES, {}).items() if stamp(path) != was]
        if changed:
            raise MayaError(
                f"{', '.join(changed)} changed since the study in {self.folder} was begun: its trials are of another program.",
                "Give another --study for the program as it is now.",
            )

    def _note_files(self) -> None:
        """The program's files as they are in this study, known once its default has been run."""
        if FILES not in self._kept.user_attrs and (files := self.make_task(self.job.default).files) is not None:
            self._kept.set_user_attr(FILES, files)


def _is_scale(choices: list[Any]) -> bool:
    """Numbers in order, up or down."""
    numbers = [one for one in choices if isinstance(one, int | float) and not isinstance(one, bool)]
    pairs = list(itertools.pairwise(numbers))
    in_order = all(a < b for a, b in pairs) or all(a > b for a, b in pairs)
    return len(numbers) == len(choices) and len(choices) > 1 and in_order


def _optuna() -> Any:
    _needs("optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _needs(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MayaError(f"{package} is not installed.", "pip install 'maya-emulator[search]'")
