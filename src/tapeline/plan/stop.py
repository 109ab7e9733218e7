"""When to stop a run early, decided before it starts: criteria, and the judge that holds them.

Covers: a loss to reach by a step, a band from reference runs that a run like them leaves only
rarely, and judging a run's losses by both. Does not cover reading losses, nor stopping a run.

The judge is a function of the losses up to a step alone, so that a resumed run is judged like one
that was never interrupted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Quantity
from tapeline.plan.job import Job
from tapeline.quantiles import student_below, student_quantile

STEPS = Quantity("steps", "Steps of the whole run", most=1e12, whole=True)
TARGET_LOSS = Quantity("target_loss", "A loss that the run must have reached", most=1e6, least=-1e6)
BY_STEP = Quantity("by_step", "The step by which it must", most=1e12, whole=True)
LOOKS = Quantity("looks", "How often the band is looked at before the end", 9, most=100, whole=True)
WINDOW = Quantity("window", "Steps whose losses are averaged for a look", 50, most=1e9, whole=True)
PATIENCE = Quantity(
    "patience", "Looks in a row above the band that stop a run", 2, most=10, whole=True
)
FALSE_STOPS = Quantity(
    "false_stops", "Share of runs like the references that the band may stop", 0.05, most=0.5
)
LEAST_REFERENCES = 3
_MOST_ALPHA = 0.5

Losses = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Look:
    """At a step, the most that the mean of the last losses may be."""

    step: int
    most: float


@dataclass(frozen=True, slots=True)
class Criteria:
    """What stops a run.

    Attributes:
        window: steps whose losses are averaged for a look.
        patience: looks in a row above the band that stop it.
        looks: the band, by step.
        target: one look that stops it alone; None for none.
    """

    window: int
    patience: int
    looks: tuple[Look, ...] = ()
    target: Look | None = None

    def is_due(self, step: int) -> bool:
        """Whether there is something to judge after a step."""
        return any(look.step == step for look in (*self.looks, self.target) if look)

    def section(self) -> str:
        """As a section of a configuration."""
        lines = ["[stop]", f"window = {self.window}", f"patience = {self.patience}"]
        if self.looks:
            pairs = ", ".join(f"[{look.step}, {look.most:.9g}]" for look in self.looks)
            lines.append(f"looks = [{pairs}]")
        if self.target:
            lines.append(f"target = [{self.target.step}, {self.target.most:.9g}]")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Stop:
    """A run that should end."""

    step: int
    why: str


def judge(criteria: Criteria, losses: Losses, step: int) -> Stop | None:
    """Whether a run should have been stopped by now; the first reason in time.

    A mean that isn't a number is above any band. A look whose losses aren't there says nothing
    and doesn't break a row.

    Args:
        losses: of each step, counted from 1; later ones are not looked at.
        step: the last one done.
    """
    row = 0
    target = [criteria.target] if criteria.target else []
    for look in sorted((*criteria.looks, *target), key=lambda one: one.step):
        if look.step > step:
            break
        mean = trailing_mean(losses, look.step, criteria.window)
        if mean is None:
            continue
        found = f"the mean loss of {criteria.window} steps is {mean:.6g}"
        if look is criteria.target:
            if not mean <= look.most:
                return Stop(
                    look.step, f"target missed: at step {look.step} {found}, not {look.most:.6g}"
                )
            continue
        row = 0 if mean <= look.most else row + 1
        if row == criteria.patience:
            return Stop(
                look.step,
                f"above the references' band at {row} looks in a row: at step {look.step} {found}, "
                f"over {look.most:.6g}",
            )
    return None


def trailing_mean(losses: Losses, step: int, window: int) -> float | None:
    """The mean of the losses that are there of the `window` steps up to one; None if none is."""
    there = [losses[one] for one in range(max(1, step - window + 1), step + 1) if one in losses]
    return sum(there) / len(there) if there else None


@dataclass(frozen=True, slots=True)
class BandRow:
    """The band at one look.

    Attributes:
        most: above it a run is outside.
        left: share of the run that is still to come.
        saved: what stopping here saves of the run's bill.
    """

    step: int
    mean: float
    sd: float
    most: float
    left: float
    saved: float


@dataclass(frozen=True, slots=True)
class TargetRow:
    """The target among the references.

    Attributes:
        left, saved: as in `BandRow`.
        num_missed: of them, those that it would have stopped.
        chance_missed: of one more run like them; None without references.
    """

    step: int
    most: float
    left: float
    saved: float
    num_references: int
    num_missed: int
    chance_missed: float | None


@dataclass(frozen=True, slots=True)
class StopPlan:
    """Criteria and what they are derived from.

    Attributes:
        band: by look; empty without references.
        target: None if none was asked for.
        chance_outside: of one look at a run like the references; None without them.
    """

    criteria: Criteria
    band: tuple[BandRow, ...]
    target: TargetRow | None
    chance_outside: float | None


@dataclass(frozen=True, slots=True)
class Rules:
    """How the band is made.

    Attributes:
        num_looks: evenly spaced before the end.
        window: steps averaged for a look.
        patience: looks in a row that stop a run.
        false_stops: share of runs like the references that may be stopped.
    """

    num_looks: int
    window: int
    patience: int
    false_stops: float


def plan_stop(
    references: Mapping[str, Losses], steps: int, rules: Rules, target: Look | None, job: Job
) -> StopPlan:
    """Criteria from reference runs, a target, or both.

    Args:
        references: losses of each step by name of the run; none, or three and more.
        steps: of the run that is planned.
        target: a loss to reach by a step.
        job: whose bill a stop saves a share of.

    Raises:
        TapelineError: the references are too few, too short, diverged or all the same; or the
            target lies beyond the run.

    Source: each look's bound is the upper end of Student's interval for one more run,
        `mean + t s sqrt(1 + 1/k)`. With a chance of `p f / n` for each of n looks, p of them in a
        row are above it in a share f of runs at most, however looks depend on each other (Markov).
    """
    whole = job.bill(1.0)
    assert whole is not None, "a goodput of 1 ends"
    if target and target.step >= steps:
        raise TapelineError(
            f"--by-step {target.step}",
            expected=f"a step before the last, {steps}",
            found="one that saves nothing",
            fix="Lower it, or raise --steps",
        )
    band, chance = _band(references, steps, rules, whole.cost) if references else ((), None)
    return StopPlan(
        Criteria(
            rules.window,
            rules.patience,
            tuple(Look(row.step, row.most) for row in band),
            target,
        ),
        band,
        _target(references, target, steps, rules.window, whole.cost) if target else None,
        chance,
    )


def _band(
    references: Mapping[str, Losses], steps: int, rules: Rules, cost: float
) -> tuple[tuple[BandRow, ...], float]:
    if len(references) < LEAST_REFERENCES:
        raise TapelineError(
            "--reference",
            expected=f"{LEAST_REFERENCES} runs or more",
            found=f"{len(references)}",
            fix="Train the reference with more seeds: fewer don't tell how far seeds stray",
        )
    looks = sorted({steps * n // (rules.num_looks + 1) for n in range(1, rules.num_looks + 1)})
    if looks[0] < rules.window:
        raise TapelineError(
            f"--window {rules.window}",
            expected=f"no more than the {looks[0]} steps up to the first look",
            found="more",
            fix="Lower it or --looks",
        )
    alpha = min(_MOST_ALPHA, rules.patience * rules.false_stops / len(looks))
    t = student_quantile(1 - alpha, len(references) - 1)
    rows = []
    for step in looks:
        means = _means(references, step, rules.window)
        mean, sd = statistics.fmean(means), statistics.stdev(means)
        if sd == 0:
            raise TapelineError(
                "--reference",
                expected="runs that differ, by their seeds",
                found=f"the same loss in all at step {step}",
                fix="Give runs of different seeds: these don't tell how far seeds stray",
            )
        most = mean + t * sd * math.sqrt(1 + 1 / len(means))
        left = 1 - step / steps
        rows.append(BandRow(step, mean, sd, most, left, left * cost))
    return tuple(rows), alpha


def _means(references: Mapping[str, Losses], step: int, window: int) -> list[float]:
    """Of each reference at a look.

    Raises:
        TapelineError: one has no loss there, or none that is a number.
    """
    means = []
    for name, losses in references.items():
        mean = trailing_mean(losses, step, window) if step <= max(losses) else None
        if mean is None or not math.isfinite(mean):
            raise TapelineError(
                f"{name}, step {step}",
                expected=f"losses that are numbers in the {window} steps up to it",
                found="none" if mean is None else f"{mean}",
                fix="Give references that ran so far and didn't diverge, or lower --steps",
            )
        means.append(mean)
    return means


def _target(
    references: Mapping[str, Losses], target: Look, steps: int, window: int, cost: float
) -> TargetRow:
    means = _means(references, target.step, window)
    left = 1 - target.step / steps
    missed = sum(mean > target.most for mean in means)
    return TargetRow(
        target.step,
        target.most,
        left,
        left * cost,
        len(means),
        missed,
        _chance_above(target.most, means) if means else None,
    )


def _chance_above(most: float, means: Sequence[float]) -> float:
    """Of one more run like these; they differ, as `_band` has seen to."""
    spread = statistics.stdev(means) * math.sqrt(1 + 1 / len(means))
    if spread == 0:
        return float(statistics.fmean(means) > most)
    return 1 - student_below((most - statistics.fmean(means)) / spread, len(means) - 1)
