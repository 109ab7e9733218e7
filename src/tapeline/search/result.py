"""What a search came to: every trial, the picks on fresh seeds, planned against measured.

Read from the journal and the runs' own ledgers; writes nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeline.errors import TapelineError
from tapeline.files import finite_json
from tapeline.ledger import account_of
from tapeline.plan.search import ASHA, BAYESIAN, GRID, RANDOM, Budget, Strategy, plan_search
from tapeline.plan.seeds import winners_curse
from tapeline.runs.spread import Spread, spread_of
from tapeline.search.folder import SearchFolder
from tapeline.search.replay import Replay
from tapeline.search.schedule import Job
from tapeline.search.space import Values
from tapeline.search.trial import run_folder

Progress = Callable[[int, int], None]
_NAMES = {"grid": GRID, "random": RANDOM, "tpe": BAYESIAN, "gp": BAYESIAN}
_BEST_SHARE = 0.05
_LOST = ("redone", "restart", "reload")


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial.

    Attributes:
        number: from 0.
        values: of its settings; None if nobody came to choose them.
        results: the metric by step.
        state: "full run", "left at step …", "failed", "running" or "to be run".
    """

    number: int
    values: Values | None
    results: dict[int, float]
    state: str
    reason: str | None

    @property
    def value(self) -> float | None:
        """The metric where it came furthest."""
        return self.results[max(self.results)] if self.results else None


@dataclass(frozen=True, slots=True)
class Final:
    """A pick, on seeds that the search didn't see.

    Attributes:
        found: the metric that it was picked by.
        by_seed: on fresh seeds.
        spread: of them; None while fewer than two are done.
    """

    trial: int
    found: float
    by_seed: dict[int, float]
    spread: Spread | None


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent.

    Attributes:
        kept_steps: that count.
        redone_steps: done for nothing, since a kill threw them away.
        kept_s: seconds of processes for what counts.
        lost_s: and for steps that were done again and for starting again; a pause is in neither.
    """

    kept_steps: int
    redone_steps: int
    kept_s: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a search came to.

    Attributes:
        metric: the figure, and the direction that is better.
        is_over: whether nothing is left to do.
        finals: the best first, as the search ranked them.
        spent: on trials; and on finals.
        planned: what the plan says such a budget gets; None if it doesn't hold a whole ladder.
        rest: more figures, as JSON can hold them.
    """

    folder: str
    metric: tuple[str, str]
    is_over: bool
    trials: tuple[TrialRow, ...]
    finals: tuple[Final, ...]
    spent: tuple[Spent, Spent]
    planned: Strategy | None
    rest: dict[str, Any]

    def ranked(self) -> list[TrialRow]:
        """The trials: those that came furthest first, and the best of them."""

        def place(one: TrialRow) -> tuple[int, bool, float]:
            value = math.nan if one.value is None else one.value
            better = -value if self.metric[1] == "maximize" else value
            return -max(one.results, default=0), math.isnan(value), better

        return sorted(self.trials, key=place)

    @property
    def has_a_figure(self) -> bool:
        """Whether any trial came to one."""
        return any(one.value is not None and math.isfinite(one.value) for one in self.trials)

    def overstated(self) -> tuple[float, float] | None:
        """By how much the best pick's figure flatters it: measured on fresh seeds, and expected.

        Expected is the winner's curse of as many full runs as there were, with the seeds' noise
        as the finals show it: less than nothing is said of a search with fewer than three.
        """
        top = self.rest["rungs"][-1]
        full = [one.results[top] for one in self.trials if top in one.results]
        full = [value for value in full if math.isfinite(value)]
        spreads = [one.spread for one in self.finals if one.spread]
        if len(full) < 3 or not spreads or not self.finals[0].spread:
            return None
        seed_sd = math.sqrt(statistics.fmean(one.sd**2 for one in spreads))
        quality_sd = math.sqrt(max(statistics.variance(full) - seed_sd**2, 0.0))
        expected = seed_sd
        if quality_sd:
            curse = winners_curse(len(full), seed_sd / quality_sd)
            expected = curse.overstated * quality_sd
        better = 1 if self.metric[1] == "maximize" else -1
        return better * (self.finals[0].found - self.finals[0].spread.mean), expected

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it: what isn't finite is None."""
        measured = self.overstated()
        found = {
            **asdict(self),
            "metric": self.metric[0],
            "direction": self.metric[1],
            "spent": dict(zip(("trials", "finals"), map(asdict, self.spent), strict=True)),
            "overstated": measured and dict(zip(("measured", "expected"), measured, strict=True)),
            **self.rest,
        }
        del found["rest"]
        return finite_json(found)  # type: ignore[no-any-return]


def result_of(search: SearchFolder, progress: Progress = lambda _done, _all: None) -> Result:
    """Read what a search came to, finished or not.

    Args:
        progress: called with the runs read and in all.

    Raises:
        RunError: its storage can't be reached.
    """
    replay = Replay(search.config, search.rules)
    num_entries = 0
    for place, entry in search.journal().new_entries():
        replay.apply(place, entry)
        num_entries = place + 1
    schedule, rungs = replay.schedule, search.rules.rungs
    places = [search.path / "trials" / str(number) for number in replay.trials]
    finals = [
        run_folder(search.path, Job(trial, 0, seed), search.base.seed)
        for trial, scores in schedule.finals.items()
        for seed in scores
    ]
    total = len(places) + len(finals)
    spent = (
        _spent(places, lambda done: progress(done, total)),
        _spent(finals, lambda done: progress(len(places) + done, total)),
    )
    return Result(
        str(search.path),
        (search.config.metric, search.config.direction),
        schedule.is_over,
        tuple(_row(replay, number) for number in sorted(replay.trials)),
        _finals(search, replay),
        spent,
        _planned(search),
        {
            "rungs": list(rungs),
            "reached": [sum(map(math.isfinite, one.values())) for one in schedule.scores],
            "budget_steps": search.rules.budget_steps,
            "budget_spent_steps": schedule.spent_steps,
            "given_back": replay.num_given_back,
            "entries": num_entries,
        },
    )


def _row(replay: Replay, number: int) -> TrialRow:
    trial, schedule = replay.trials[number], replay.schedule
    last = max(trial.results, default=0)
    if any(job.trial == number and job.seed is None for job in schedule.running.values()):
        state = "running"
    elif not trial.results:
        state = "to be run"
    elif math.isnan(trial.results[last]):
        state = "failed"
    else:
        state = "full run" if last == replay.rules.rungs[-1] else f"left at step {last:,}"
    return TrialRow(number, trial.values, dict(trial.results), state, trial.reason)


def _finals(search: SearchFolder, replay: Replay) -> tuple[Final, ...]:
    sign = -1 if search.config.direction == "maximize" else 1
    found = []
    for trial, _, score in replay.schedule.best(search.rules.picks):
        scores = replay.schedule.finals.get(trial, {})
        by_seed = {search.base.seed + 1 + s: sign * value for s, value in sorted(scores.items())}
        finite = [value for value in by_seed.values() if math.isfinite(value)]
        spread = spread_of(list(by_seed.values())) if len(finite) >= 2 else None
        found.append(Final(trial, sign * score, by_seed, spread))
    return tuple(found)


def _spent(runs: list[Path], progress: Callable[[int], None]) -> Spent:
    kept_steps, redone_steps, kept_ns, lost_ns = 0, 0, 0, 0
    for number, run in enumerate(runs):
        progress(number)
        try:
            job = account_of(run).job
        except (TapelineError, OSError):
            continue  # a run that never began has no ledger
        kept_steps, redone_steps = kept_steps + job.kept_steps, redone_steps + job.redone_steps
        lost_ns += sum(job.lost_ns[kind] for kind in _LOST)
        kept_ns += job.wall_ns - job.buckets_ns["lost"]
    return Spent(kept_steps, redone_steps, kept_ns / 1e9, lost_ns / 1e9)


def _planned(search: SearchFolder) -> Strategy | None:
    """The plan's arithmetic, with steps in place of hours."""
    rungs, config = search.rules.rungs, search.config
    budget = Budget(
        float(search.rules.budget_steps),
        float(rungs[-1]),
        float(rungs[0]),
        search.rules.eta,
        len(config.space),
        min(config.workers, 10),
        config.workers,
        1,
    )
    name = ASHA if len(rungs) > 1 else _NAMES[config.sampler]
    found = plan_search(budget, _BEST_SHARE).strategies
    return next((one for one in found if one.name == name), None)
