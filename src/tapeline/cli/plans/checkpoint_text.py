"""What `tapeline plan checkpoint` prints: tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tapeline.cli.plans.frame import bill_cells, points

if TYPE_CHECKING:
    from tapeline.plan.checkpoint import CheckpointPlan, MtbfRange, Strategy
    from tapeline.plan.confirm import Confirmed
    from tapeline.plan.tiers import FailureClass, TierPlan
    from tapeline.report import Table

_S_PER_HOUR = 3600.0
_FIRST_ORDER = "first order (Young 1974)"


def strategy_tables(plan: CheckpointPlan) -> list[Table]:
    """The ways of saving, the three models, how flat the optimum is, and jobs beside each other."""
    tables = [
        _strategies(plan.strategies),
        _models(plan.strategies),
        _sensitivity(plan.strategies),
    ]
    return [*tables, _contention(plan)] if plan.contention else tables


def _strategies(ways: Sequence[Strategy]) -> Table:
    from tapeline.report import Table, format_percent

    return Table(
        [
            *("strategy", "loop blocked s", "interval s", "checkpoint", "lost", "restart"),
            *("overhead", "write in flight", "wall hours", "cost"),
        ],
        [
            [
                one.name,
                one.blocking_s,
                one.interval_s,
                format_percent(one.shares.checkpoint),
                format_percent(one.shares.lost),
                format_percent(one.shares.restart),
                format_percent(one.overhead),
                format_percent(one.shares.in_flight),
                *bill_cells(one.bill),
            ]
            for one in ways
        ],
        f"Model, {_FIRST_ORDER}: overhead C/T + (T/2 + R)/M; a write in flight adds p/M",
    )


def _models(ways: Sequence[Strategy]) -> Table:
    from tapeline.report import Table

    return Table(
        [
            *("strategy", "first order s", "Daly s", "exact s", "first order says", "ETTR"),
            *("efficiency at first order", "at Daly", "at exact"),
        ],
        [
            [
                one.name,
                one.intervals.young_s,
                one.intervals.daly_s,
                one.intervals.exact_s,
                points(one.shares.goodput),
                points(one.ettr),
                points(one.intervals.young_efficiency),
                points(one.intervals.daly_efficiency),
                points(one.intervals.exact_efficiency),
            ]
            for one in ways
        ],
        "Model: the best interval of first order, of Daly 2006 and exact for exponential failures, "
        "and the exact share of useful time at each; ETTR by arXiv 2410.21680",
    )


def _sensitivity(ways: Sequence[Strategy]) -> Table:
    from tapeline.report import Table, format_percent

    return Table(
        ["strategy", "interval", "s", "time lost", "wall hours", "cost"],
        [
            [
                one.name,
                f"×{row.factor:g}",
                row.interval_s,
                format_percent(row.overhead) if row.bill else None,
                *bill_cells(row.bill),
            ]
            for one in ways
            for row in one.sensitivity
        ],
        f"How flat the optimum is. Model, {_FIRST_ORDER}; a dash: the write would not end before "
        "the next save, or no work would get done",
    )


def _contention(plan: CheckpointPlan) -> Table:
    from tapeline.report import Table, format_percent

    return Table(
        ["strategy", "at once: s", "at once: lost", "in turn: s", "in turn: lost"],
        [
            [
                one.name,
                one.aligned_interval_s,
                format_percent(one.aligned_overhead),
                one.staggered_interval_s,
                format_percent(one.staggered_overhead),
            ]
            for one in plan.contention
        ],
        f"{plan.contention[0].jobs} jobs on a file system that one write fills, saving at once or "
        f"in turn: the best intervals. Model, {_FIRST_ORDER}",
    )


def confirmed_table(found: Sequence[Confirmed]) -> Table:
    """Simulated shares of useful time beside those of the model."""
    from tapeline.report import Table

    return Table(
        ["plan", "useful, model", "useful, simulated", "standard error", "failures"],
        [
            [
                one.name,
                points(one.model),
                points(one.simulated.mean),
                points(one.simulated.standard_error),
                one.simulated.num_failures,
            ]
            for one in found
        ],
        "The intervals above, played through simulated failures; the model is exact for "
        "exponential ones (first order for tiers)",
    )


def strategy_notes(plan: CheckpointPlan) -> list[str]:
    """The decision, then what to know about each way."""
    from tapeline.report import format_number, format_percent

    best = next(one for one in plan.strategies if one.name == plan.best)
    lost = format_percent(best.overhead + best.shares.in_flight)
    notes = []
    if best.num_saves:
        notes.append(
            f"{best.name}: save every {format_number(best.interval_s)} s of work; the model "
            f"expects {lost} of the time to be lost."
        )
    once = [one for one in plan.strategies if one.num_saves == 0]
    if once:
        shortest = min(one.interval_s for one in once)
        notes.append(
            f"{', '.join(one.name for one in once)}: the best interval, "
            f"{format_number(shortest)} s or more, is longer than the run: checkpoint once, at "
            "its end."
        )
    notes += [
        f"{one.name}: the background write takes {format_number(one.write_s)} s and must end "
        "before the next save, so it sets the interval; a faster write would help."
        for one in plan.strategies
        if one.bound_by_write
    ]
    notes += [f"{one.name} can't carry this job. {one.why}" for one in plan.refused]
    if plan.contention:
        notes.append(_contention_note(plan))
    if plan.mtbf_range:
        notes += _range_notes(plan.mtbf_range)
    return notes


def _contention_note(plan: CheckpointPlan) -> str:
    from tapeline.report import format_number, format_percent

    one = next(row for row in plan.contention if row.name == plan.best)
    return (
        f"That holds for a job alone: {one.jobs} jobs that save at once, every "
        f"{format_number(one.aligned_interval_s)} s, lose {format_percent(one.aligned_overhead)} "
        f"of their time; in turn, every {format_number(one.staggered_interval_s)} s, "
        f"{format_percent(one.staggered_overhead)} ({one.name})."
    )


def _range_notes(known: MtbfRange) -> list[str]:
    from tapeline.report import format_number

    if known.mtbf_s[0] == known.mtbf_s[2]:
        return []
    low, _, high = (
        f"{format_number(end)} s" if math.isfinite(end) else "any" for end in known.interval_s
    )
    return [
        f"The MTBF was counted: {format_number(known.mtbf_s[1] / _S_PER_HOUR)} h, with 95 % "
        f"confidence above {format_number(known.mtbf_s[0] / _S_PER_HOUR)} h. Over its range the "
        f"interval is {low} to {high}."
    ]


def tier_tables(plan: TierPlan, classes: Sequence[FailureClass]) -> list[Table]:
    """The classes as given, the tiers, and tiers against one interval."""
    from tapeline.report import Table

    return [
        Table(
            ["class", "MTBF hours", "loop blocked s"],
            [[one.name, one.mtbf_s / _S_PER_HOUR, one.save_s] for one in classes],
            "Failure classes, given",
        ),
        Table(
            ["tier for", "loop blocked s", "best alone s", "interval s", "of the saves"],
            [
                [
                    ", ".join(tier.classes),
                    tier.save_s,
                    tier.ideal_s,
                    tier.interval_s,
                    "all" if tier.every == 1 else f"every {tier.every}.",
                ]
                for tier in plan.tiers
            ],
            f"Model, {_FIRST_ORDER}, a term for each class; intervals in whole multiples",
        ),
        Table(
            ["plan", "overhead", "restart", "wall hours", "cost"],
            [
                [name, points(overhead), points(plan.restart), *bill_cells(bill)]
                for name, overhead, bill in (
                    (f"{len(plan.tiers)} tiers", plan.overhead, plan.bill),
                    ("one interval for all", plan.single_overhead, plan.single_bill),
                )
            ],
            f"Model, {_FIRST_ORDER}",
        ),
    ]


def tier_notes(plan: TierPlan) -> list[str]:
    """The decision."""
    from tapeline.report import format_number

    single = (
        f"one checkpoint for all, every {format_number(plan.single_interval_s)} s, loses "
        f"{points(plan.single_overhead)}"
    )
    if len(plan.tiers) == 1:
        return [f"Tiers don't pay here: {single}, and a cheaper one would be due less often."]
    return [
        f"{len(plan.tiers)} tiers lose {points(plan.overhead)} of the time besides restarts; "
        f"{single}."
    ]
