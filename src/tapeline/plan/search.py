"""How to spend a budget of training runs: what each way of searching gets to see.

Covers: grid, random, Bayesian, successive halving, Hyperband and ASHA by arithmetic:
configurations, full runs, distinct values of the dimension that matters, wall time on so many
workers, and the chance that a random draw is among the best. What they find is `search_play`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.plan.halving import Ladder, hyperband, ladder, num_rungs
from tapeline.plan.inputs import Quantity

BUDGET = Quantity(
    "budget_gpu_hours", "What the whole search may take, in GPU-hours", 2048.0, most=1e9
)
RUN = Quantity("run_gpu_hours", "What one full run takes, in GPU-hours", 64.0, most=1e9)
DIMENSIONS = Quantity("dimensions", "Settings that are searched", 4, most=30, whole=True)
ETA = Quantity("eta", "One in so many goes on to the next rung", 3, least=2, most=100, whole=True)
LEAST = Quantity(
    "least_gpu_hours", "The shortest run whose score says anything, in GPU-hours", 2.0, most=1e9
)
WORKERS = Quantity("workers", "Runs at once", 8, most=1e6, whole=True)
PER_RUN = Quantity(
    "accelerators_per_run", "Accelerators that share one run", 1, most=1e6, whole=True
)
FIRST_DRAWS = Quantity(
    "first_draws", "Random runs before a Bayesian search learns from them", 8, most=1e6, whole=True
)
BEST_SHARE = Quantity(
    "best_share", "Share of all configurations that would be good enough", 0.05, most=0.5
)
CONFIDENCE = 0.95
_MOST_CONFIGS = 1e9

GRID, RANDOM, BAYESIAN = "grid", "random", "Bayesian, one by one"
RESTARTED, RESUMED = "successive halving", "successive halving, resumed"
HYPERBAND, ASHA = "Hyperband", "ASHA, resumed"


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be spent, and on what.

    Attributes:
        least_gpu_hours: of the shortest run whose score says anything.
        eta: one in so many goes on.
        first_draws: of a Bayesian search.
        workers: runs at once.
        per_run: accelerators of one run.
    """

    gpu_hours: float
    run_gpu_hours: float
    least_gpu_hours: float
    eta: int
    dimensions: int
    first_draws: int
    workers: int
    per_run: int

    @property
    def num_runs(self) -> int:
        """Full runs that the budget pays for."""
        return int(self.gpu_hours / self.run_gpu_hours * (1 + 1e-12))

    @property
    def num_rungs(self) -> int:
        """Rungs of a ladder over the whole range."""
        return num_rungs(self.least_gpu_hours, self.run_gpu_hours, self.eta)

    def wall_hours(self, num_runs: int, gpu_hours: float) -> float:
        """Hours of so many equal runs on all workers."""
        return math.ceil(num_runs / self.workers) * gpu_hours / self.per_run


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one way of searching gets for the budget.

    Attributes:
        num_configs: configurations that are tried at all.
        num_full: of them, run to the end.
        num_distinct: values tried of each single dimension.
        wall_hours: on all workers; of ASHA, whose rungs don't wait, the least it can be.
        ladders: by which it cuts, of one round; empty if every run is a full one.
        num_rounds: of all ladders, one after another.
    """

    name: str
    num_configs: int
    num_full: int
    num_distinct: int
    gpu_hours: float
    wall_hours: float
    ladders: tuple[Ladder, ...] = ()
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A way that the budget doesn't pay for, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The ways of searching that a budget pays for.

    Attributes:
        left_out: those that it doesn't pay for.
        best_share: that would be good enough.
        draws_needed: random draws that hold one of it with 95 %.
    """

    num_rungs: int
    strategies: tuple[Strategy, ...]
    left_out: tuple[LeftOut, ...]
    best_share: float
    draws_needed: int


def plan_search(budget: Budget, best_share: float) -> SearchPlan:
    """What each way of searching gets to see for a budget.

    Raises:
        TapelineError: the budget is less than one full run, or more than anyone could list.
    """
    where = f"--budget-gpu-hours {budget.gpu_hours:g}, --run-gpu-hours {budget.run_gpu_hours:g}"
    if budget.num_runs < 1:
        raise TapelineError(
            where,
            expected="a budget of one full run or more",
            found=f"{budget.gpu_hours / budget.run_gpu_hours:.3g} of one",
            fix="Raise the budget, or make the runs shorter",
        )
    if budget.least_gpu_hours > budget.run_gpu_hours:
        raise TapelineError(
            f"--least-gpu-hours {budget.least_gpu_hours:g}",
            expected=f"no more than a full run's {budget.run_gpu_hours:g}",
            found="more",
            fix="Lower it, or raise --run-gpu-hours",
        )
    if budget.num_runs * budget.eta ** (budget.num_rungs - 1) > _MOST_CONFIGS:
        raise TapelineError(
            where,
            expected=f"a search of {_MOST_CONFIGS:g} configurations at most",
            found="more",
            fix="Lower the budget, or raise --run-gpu-hours or --least-gpu-hours",
        )
    made = [way(budget) for way in _WAYS]
    return SearchPlan(
        budget.num_rungs,
        tuple(one for one in made if isinstance(one, Strategy)),
        tuple(one for one in made if isinstance(one, LeftOut)),
        best_share,
        draws_needed(best_share, CONFIDENCE),
    )


def chance_of_best(num_draws: int, best_share: float) -> float:
    """The chance that one of so many random draws is in the best share, `1 − (1 − q)^n`.

    Source: Bergstra and Bengio 2012, JMLR 13, section 2.
    """
    return -math.expm1(num_draws * math.log1p(-best_share))


def draws_needed(best_share: float, chance: float) -> int:
    """The fewest random draws whose `chance_of_best` is a chance or more."""
    return math.ceil(math.log1p(-chance) / math.log1p(-best_share))


def grid_values(num_runs: int, dimensions: int) -> int:
    """Values of each dimension in the largest even grid, by whole numbers."""
    values: int = max(1, round(num_runs ** (1 / dimensions)) - 1)  # a root in floats may be one off
    while (values + 1) ** dimensions <= num_runs:
        values += 1
    return values


def _grid(budget: Budget) -> Strategy:
    values = grid_values(budget.num_runs, budget.dimensions)
    return _full_runs(GRID, budget, values**budget.dimensions, values)


def _random(budget: Budget) -> Strategy:
    return _full_runs(RANDOM, budget, budget.num_runs, budget.num_runs)


def _full_runs(name: str, budget: Budget, num_configs: int, num_distinct: int) -> Strategy:
    """The runs that the budget leaves besides are run too: a grid repeats some of its points."""
    runs, hours = budget.num_runs, budget.run_gpu_hours
    return Strategy(
        name, num_configs, runs, num_distinct, runs * hours, budget.wall_hours(runs, hours)
    )


def _bayesian(budget: Budget) -> Strategy:
    """The first draws fill the workers; each later run waits for all that were before it."""
    runs, hours = budget.num_runs, budget.run_gpu_hours
    first = min(budget.first_draws, runs)
    wall = budget.wall_hours(first, hours) + (runs - first) * hours / budget.per_run
    return Strategy(BAYESIAN, runs, runs, runs, runs * hours, wall)


def _halving(budget: Budget, *, resumed: bool) -> Strategy | LeftOut:
    name = RESUMED if resumed else RESTARTED
    cuts = budget.num_rungs - 1
    one = ladder(budget.eta**cuts, cuts + 1, budget.run_gpu_hours, budget.eta)
    num_top = int(budget.gpu_hours / (one.resumed if resumed else one.restarted) * (1 + 1e-12))
    if not num_top:
        return _too_dear(name, budget, one.resumed if resumed else one.restarted)
    whole = ladder(num_top * budget.eta**cuts, cuts + 1, budget.run_gpu_hours, budget.eta)
    return _by_ladders(name, budget, (whole,), resumed=resumed)


def _hyperband(budget: Budget) -> Strategy | LeftOut:
    """Whole rounds, as many as the budget pays for, restarted as in the paper."""
    brackets = hyperband(budget.num_rungs, budget.run_gpu_hours, budget.eta)
    round_hours = sum(one.restarted for one in brackets)
    num_rounds = int(budget.gpu_hours / round_hours * (1 + 1e-12))
    if not num_rounds:
        return _too_dear(HYPERBAND, budget, round_hours)
    return _by_ladders(HYPERBAND, budget, brackets, resumed=False, num_rounds=num_rounds)


def _asha(budget: Budget) -> Strategy | LeftOut:
    """Configurations until the budget is spent, each rung an eta-th of the one below."""
    cuts = budget.num_rungs - 1
    one = ladder(budget.eta**cuts, cuts + 1, budget.run_gpu_hours, budget.eta)
    num_first = int(budget.gpu_hours / one.resumed * budget.eta**cuts * (1 + 1e-12))
    whole = ladder(num_first, cuts + 1, budget.run_gpu_hours, budget.eta)
    if not whole.rungs[-1].num_configs:
        return _too_dear(ASHA, budget, one.resumed)
    spread = whole.resumed / (budget.workers * budget.per_run)
    wall = max(spread, budget.run_gpu_hours / budget.per_run)
    full = whole.rungs[-1].num_configs
    return Strategy(ASHA, num_first, full, num_first, whole.resumed, wall, (whole,))


def _by_ladders(
    name: str, budget: Budget, ladders: Sequence[Ladder], *, resumed: bool, num_rounds: int = 1
) -> Strategy:
    wall = sum(
        budget.wall_hours(rung.num_configs, added if resumed else rung.gpu_hours)
        for one in ladders
        for rung, added in zip(one.rungs, one.added, strict=True)
    )
    spent = sum(one.resumed if resumed else one.restarted for one in ladders)
    num_configs = num_rounds * sum(one.rungs[0].num_configs for one in ladders)
    num_full = num_rounds * sum(one.rungs[-1].num_configs for one in ladders)
    return Strategy(
        name,
        num_configs,
        num_full,
        num_configs,
        num_rounds * spent,
        num_rounds * wall,
        tuple(ladders),
        num_rounds,
    )


def _too_dear(name: str, budget: Budget, hours: float) -> LeftOut:
    return LeftOut(
        name,
        f"its smallest round takes {hours:.4g} GPU-hours, more than the {budget.gpu_hours:.4g} "
        "there are",
    )


_WAYS: tuple[Callable[[Budget], Strategy | LeftOut], ...] = (
    _grid,
    _random,
    _bayesian,
    lambda budget: _halving(budget, resumed=False),
    lambda budget: _halving(budget, resumed=True),
    _hyperband,
    _asha,
)
