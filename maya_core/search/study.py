"""The search itself: which configuration is tried next, and what is known so far.

Optuna's samplers choose the configurations, in batches; executors run them; `result.py` presents them. What is chosen depends
only on the recipe, the seed and the outcomes of earlier batches, and an outcome is stored as soon as it and all earlier ones are
known. A search that was killed can therefore resume: it makes the same choices again, uses the stored outcomes, and runs the
rest.
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
from maya_core.installation import how_to_install, missing
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
ATTEMPTS = 8  # suggestions of a sampler; if none is possible and new, the nearest configuration that is gets used
LISTED = 50_000  # larger spaces are not enumerated
FILES = "files"  # attribute of a study: the user's files that the program read
SKIPPED = "skipped"  # a trial that was not run, because its outcome is certain from another one


class Goal(BaseModel):
    """The objective and the conditions. `tokens` or `samples`, `deadline_s` and `budget_usd` apply to the whole training."""

    model_config = ConfigDict(frozen=True)

    objective: Objective = "step_time"
    pareto: bool = False  # minimize both step time and cost
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
        """The value of each objective; None if the outcome lacks one of them."""
        bought = 3600 / outcome.usd_per_hour if outcome.usd_per_hour else None  # seconds per dollar
        known = {
            "step_time": outcome.step_time_s,
            "cost": outcome.usd_per_1k_steps,
            "tokens_per_dollar": bought and outcome.tokens_per_s and bought * outcome.tokens_per_s,
            "samples_per_dollar": bought and outcome.samples_per_s and bought * outcome.samples_per_s,
        }
        found = [known[name] for name in self.names]
        return [value for value in found if value is not None] if None not in found else None

    def broken(self, outcome: Outcome) -> str | None:
        """The condition that the outcome does not meet, in words; None if it meets all of them."""
        if outcome.status != "fits":
            return outcome.status
        if outcome.used_bytes and outcome.capacity_bytes:
            left = 1 - outcome.used_bytes / outcome.capacity_bytes
            if left < self.memory_margin:
                return f"leaves only {left:.1%} of memory free instead of {self.memory_margin:.1%}"
        if self.max_step_time_s is not None and (outcome.step_time_s or 0) > self.max_step_time_s:
            return f"a step takes longer than {self.max_step_time_s:g} s"
        if (unknown := self._unknown(outcome)) is not None:
            return unknown
        if self.max_usd_per_1k_steps is not None and (outcome.usd_per_1k_steps or 0) > self.max_usd_per_1k_steps:
            return f"1,000 steps cost more than ${self.max_usd_per_1k_steps:g}"
        if self.deadline_s is not None and (self.training_s(outcome) or 0) > self.deadline_s:
            return "does not finish by the deadline"
        if self.budget_usd is not None and (self.training_usd(outcome) or 0) > self.budget_usd:
            return "costs more than the budget"
        return None

    def _unknown(self, outcome: Outcome) -> str | None:
        """Which figure is missing that a condition needs, in words."""
        counted = {"tokens": outcome.tokens_per_s, "samples": outcome.samples_per_s}
        for what, per_s in counted.items():
            if per_s is None and (getattr(self, what) is not None or self.objective == f"{what}_per_dollar"):
                return f"the number of {what} per step is not known (give {what}_per_step in the recipe)"
        steps_priced = self.max_usd_per_1k_steps is not None or self.pareto or self.objective == "cost"
        hours_priced = self.budget_usd is not None or self.objective.endswith("_per_dollar")
        unknown = (steps_priced and outcome.usd_per_1k_steps is None) or (hours_priced and outcome.usd_per_hour is None)
        return "the price is not known" if unknown else None

    def training_s(self, outcome: Outcome) -> float | None:
        if self.tokens is not None:
            return self.tokens / outcome.tokens_per_s if outcome.tokens_per_s else None
        return self.samples / outcome.samples_per_s if self.samples and outcome.samples_per_s else None

    def training_usd(self, outcome: Outcome) -> float | None:
        seconds = self.training_s(outcome)
        return seconds / 3600 * outcome.usd_per_hour if seconds and outcome.usd_per_hour else None


class Plan(BaseModel):
    """How the search chooses configurations. A study can only resume with the plan it was started with."""

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
    broken: str | None  # the condition that it does not meet

    @property
    def how(self) -> str:
        # Earlier versions stored "left out".
        return SKIPPED if self.outcome.why.startswith((SKIPPED, "left out")) else self.outcome.how


@dataclass
class Search:
    """The study of a recipe, stored in a folder."""

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

    # ---- the public interface ----

    @property
    def possible(self) -> int | None:
        """The number of different possible configurations; None if the space is too large to enumerate."""
        return len(self._every) if self._every is not None else None

    @property
    def stored(self) -> int:
        return len(self._stored)

    def counts(self) -> Counter[str]:
        return Counter(trial.how for trial in self.trials)

    def best(self) -> list[Trial]:
        """The trials that meet all conditions, best first. With two objectives, the first one decides the order."""
        fit = [trial for trial in self.trials if trial.broken is None and self.goal.values(trial.outcome) is not None]
        sign = -1 if self.goal.directions[0] == "maximize" else 1
        return sorted(fit, key=lambda trial: (sign * (self.goal.values(trial.outcome) or [0.0])[0], trial.number))

    def run(self, trials: int, executor: Executor, on_trial: Callable[[Trial], None] = lambda _: None) -> None:
        """Runs until the search has this many trials, or until no configuration is left."""
        while len(self.trials) < trials:
            proposed = []
            for number in range(len(self.trials), min(trials, len(self.trials) + self._batch_left())):
                proposal = self._propose(number)
                if proposal is None:
                    break
                proposed.append(proposal)
            if not proposed:
                return
            for (number, point, engine_trial), outcome in zip(
                proposed, self._outcomes(proposed, executor), strict=True
            ):
                trial = Trial(number, point, outcome, self.goal.broken(outcome))
                self._record(trial, engine_trial)
                on_trial(trial)
            self._note_files()

    def close(self) -> None:
        self._lock.close()

    # ---- choosing ----

    def _batch_left(self) -> int:
        """The number of trials until the batch is full. The first trial is a batch of its own: if the recipe itself is wrong, one failure is enough."""
        done = len(self.trials)
        return 1 if done == 0 else self.plan.batch - (done - 1) % self.plan.batch

    def _propose(self, number: int) -> tuple[int, Point, Any] | None:
        """A possible configuration that was not tried yet; None if none is left."""
        if number == 0:
            return self._proposal(number, self.job.default, self._fixed(self.job.default))
        if self.plan.sampler == "grid":
            point = next((one for one in self._ordered() if self._key(one) not in self._seen), None)
            return None if point is None else self._proposal(number, point, self._fixed(point))
        if self._every is not None and len(self._seen) >= len(self._every):
            return None
        for attempt in range(ATTEMPTS):
            self._engine.sampler = self._sampler(number, attempt)
            engine_trial = self._engine.ask()
            wanted = self._suggested(engine_trial)
            if self._new(wanted):
                return self._proposal(number, wanted, engine_trial)
            self._engine.tell(engine_trial, state=_optuna().trial.TrialState.FAIL)
        near = self._nearest(number, wanted)
        return None if near is None else self._proposal(number, near, self._fixed(near))

    def _new(self, point: Point) -> bool:
        return self.job.violated(point) is None and self._key(point) not in self._seen

    def _key(self, point: Point) -> str:
        return str(sorted(self.job.canonical(point).items()))

    def _proposal(self, number: int, point: Point, engine_trial: Any) -> tuple[int, Point, Any]:
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
        """All configurations in the order of a grid search, chosen so that as many as possible can be skipped."""
        if self._every is None:
            raise MayaError(
                f"a grid of {self.job.size:,} points is too large.",
                "Use --sampler tpe, or reduce the number of knobs.",
            )
        if not hasattr(self, "_sorted"):
            self._sorted = sorted(self._every, key=self._pruner.order)
        return iter(self._sorted)

    def _nearest(self, number: int, point: Point) -> Point | None:
        """The untried configuration that differs least from the sampler's suggestion; a random one of several."""
        chance = random.Random(f"{self.plan.seed} {number}")
        if self._every is None:  # too many to enumerate
            for _ in range(10_000):
                drawn = {name: chance.choice(knob.choices) for name, knob in self.job.knobs.items()}
                if self._new(drawn):
                    return drawn
            return None
        left = [one for one in self._every if self._key(one) not in self._seen]
        least = min((self._distance(one, point) for one in left), default=0.0)
        return chance.choice([one for one in left if self._distance(one, point) == least]) if left else None

    def _distance(self, one: Point, other: Point) -> float:
        """The sum over all knobs: the distance on a scale from 0 to 1, or 1 for a different choice."""
        total = 0.0
        for name, knob in self.job.knobs.items():
            if one[name] != other[name]:
                apart = abs(knob.choices.index(one[name]) - knob.choices.index(other[name]))
                total += apart / (len(knob.choices) - 1) if _is_scale(knob.choices) else 1.0
        return total

    # ---- the connection to Optuna ----

    def _sampler(self, number: int, attempt: int) -> Any:
        """A new sampler with its own seed for every suggestion, so that a suggestion depends only on the known outcomes."""
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

    def _suggested(self, engine_trial: Any) -> Point:
        """The sampler's configuration. A knob whose values are ordered numbers is a scale, any other knob is a choice."""
        point: Point = {}
        for name, knob in self.job.knobs.items():
            if _is_scale(knob.choices):
                point[name] = knob.choices[engine_trial.suggest_int(name, 0, len(knob.choices) - 1)]
            else:
                point[name] = knob.choices[engine_trial.suggest_categorical(name, list(range(len(knob.choices))))]
        return point

    def _fixed(self, point: Point) -> Any:
        """Makes Optuna suggest this configuration."""
        places = {name: knob.choices.index(point[name]) for name, knob in self.job.knobs.items()}
        self._engine.enqueue_trial(places)
        self._engine.sampler = _optuna().samplers.RandomSampler(seed=0)
        engine_trial = self._engine.ask()
        self._suggested(engine_trial)
        return engine_trial

    def _record(self, trial: Trial, engine_trial: Any) -> None:
        """Passes a trial on to the pruner and to Optuna."""
        states = _optuna().trial.TrialState
        values = self.goal.values(trial.outcome)
        if trial.outcome.status == "out of memory":
            self._pruner.note_out_of_memory(trial.point)
        elif trial.broken is None:
            self._pruner.note_usable(trial.point)
        if trial.broken is None and values is not None:
            self._engine.tell(engine_trial, values)
        elif self.goal.pareto:  # NSGA-II does not support pruned trials
            self._engine.tell(engine_trial, state=states.FAIL)
        else:
            self._engine.tell(engine_trial, state=states.PRUNED)
        self.trials.append(trial)

    # ---- outcomes ----

    def _outcomes(self, proposed: list[tuple[int, Point, Any]], executor: Executor) -> Iterator[Outcome]:
        """The outcomes in the order of the trials. A new outcome is stored before it is yielded."""
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
            if (
                number == 0 and known[number].status == "failed"
            ):  # not stored, so that it is tried again once it is corrected
                raise MayaError(
                    f"the default configuration of {self.job.name} fails: {known[number].why}",
                    f"Correct that first. Its command: {self.job.program(point).typed}",
                )
            if number >= len(self._stored):
                self._write(number, point, known[number])
            yield known[number]

    def _concluded(self, point: Point) -> Outcome | None:
        """The outcome of a configuration that is certain from earlier batches, so that it need not run."""
        if not self.plan.prune:
            return None
        if (like := self._pruner.out_of_memory(point)) is not None:
            why = f"{SKIPPED}: {self._difference(point, like)} needs no more memory and does not fit either"
            return Outcome(status="out of memory", why=why)
        if self.goal.pareto:
            return None
        # Less time is cheaper only if an hour costs the same, and gives more per dollar only if a step does the same work.
        alike = self.goal.objective != "step_time"
        if (like := self._pruner.slower(point, alike=alike)) is not None:
            return Outcome(status="slower", why=f"{SKIPPED}: {self._difference(point, like)} fits and takes no longer")
        return None

    def _difference(self, point: Point, like: Point) -> str:
        mine = self.job.canonical(point)
        return (
            "with " + ", ".join(f"{name} {like[name]}" for name in self.job.knobs if like[name] != mine[name]) + " it"
        )

    def _read(self, number: int, point: Point) -> Outcome:
        stored = self._stored[number]
        before = {name: stored.params.get(name) for name in self.job.knobs}
        if before != point:
            raise MayaError(
                f"trial {number} of the study in {self.folder} tried {before}, but this search would try {point}: the study was made by another version.",
                "Start a new study with another --study.",
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
        """Raises an error if the folder contains the study of a different search."""
        identity = {
            "recipe": hashlib.sha256(self.job.recipe.model_dump_json().encode()).hexdigest()[:16],
            "goal": self.goal.model_dump(),
            "plan": self.plan.model_dump(),
            "version": f"Maya {__version__}, torch {version('torch')}",
            "hardware, price or calibration": self.make_task(self.job.default).pricing,
        }
        before = self._kept.user_attrs if self._stored else {}  # a study without trials may be replaced
        for name, value in identity.items():
            if name in before and before[name] != value:
                raise MayaError(
                    f"the study in {self.folder} was started with another {name}.",
                    "Give the same options to resume it, or start a new study with another --study.",
                )
            if name not in before:
                self._kept.set_user_attr(name, value)
        changed = [path for path, was in before.get(FILES, {}).items() if stamp(path) != was]
        if changed:
            raise MayaError(
                f"{', '.join(changed)} changed since the study in {self.folder} was started, so its trials describe another program.",
                "Start a new study with another --study.",
            )

    def _note_files(self) -> None:
        """Stores the state of the program's files. They are known once the default configuration has run."""
        if FILES not in self._kept.user_attrs and (files := self.make_task(self.job.default).files) is not None:
            self._kept.set_user_attr(FILES, files)


def _is_scale(choices: list[Any]) -> bool:
    """Whether the choices are numbers in rising or falling order."""
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
    if missing([package]):
        raise MayaError(f"{package} is not installed.", f"Run: {how_to_install('search')}")
