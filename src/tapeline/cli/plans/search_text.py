"""What `tapeline plan search` prints: tables and sentences from its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapeline.cli.plans.frame import points
from tapeline.plan.search import (
    ASHA,
    GRID,
    RANDOM,
    RESTARTED,
    RESUMED,
    Budget,
    SearchPlan,
    Strategy,
    chance_of_best,
)
from tapeline.plan.seeds import Final, chance_next_inside

if TYPE_CHECKING:
    from tapeline.plan.search_play import Found, Played
    from tapeline.report import Table


@dataclass(frozen=True, slots=True)
class Costs:
    """What the final takes besides the search, and the price of a GPU-hour."""

    final_gpu_hours: float
    price: float


def arithmetic_tables(plan: SearchPlan, budget: Budget, costs: Costs) -> list[Table]:
    """What each way gets for the budget, and the rungs of those that have one ladder."""
    from tapeline.report import Table

    ladders = [one for one in plan.strategies if one.name in (RESTARTED, RESUMED, ASHA)]
    tables = [
        Table(
            [
                *("search", "configurations", "full runs", "values of each setting"),
                *("GPU-hours", "wall hours", "cost"),
            ],
            [
                [
                    one.name,
                    one.num_configs,
                    one.num_full,
                    one.num_distinct,
                    one.gpu_hours,
                    one.wall_hours,
                    one.gpu_hours * costs.price,
                ]
                for one in plan.strategies
            ],
            f"What the budget pays for, {budget.workers} runs at once (arithmetic). A Bayesian "
            "search waits for each run after its first draws; ASHA's wall hours are the least they "
            "can be; Hyperband's ladders run one after another",
        )
    ]
    if ladders:
        tables.append(
            Table(
                ["up to GPU-hours", *(one.name for one in ladders)],
                [
                    [rung.gpu_hours, *(one.ladders[0].rungs[number].num_configs for one in ladders)]
                    for number, rung in enumerate(ladders[0].ladders[0].rungs)
                ],
                f"Configurations on each rung, one in {budget.eta} goes on",
            )
        )
    return tables


def arithmetic_notes(plan: SearchPlan, budget: Budget) -> list[str]:
    """What the numbers say, and what the budget doesn't pay for."""
    ways = {one.name: one for one in plan.strategies}
    grid, draws = ways[GRID], ways[RANDOM].num_configs
    chance = chance_of_best(draws, plan.best_share)
    return [
        f"An even grid tries {grid.num_distinct} values of each of {budget.dimensions} settings "
        f"({grid.num_configs} configurations, the other {grid.num_full - grid.num_configs} runs "
        f"repeat them); random search tries {draws} values of the one that matters.",
        f"One of {draws} random draws is in the best {100 * plan.best_share:g} % with "
        f"{points(chance)}; {plan.draws_needed} draws are needed for 95 %.",
        *(f"Left out: {one.name}, {one.why}." for one in plan.left_out),
    ]


def seeds_table(final: Final) -> Table:
    """What so many seeds tell."""
    from tapeline.report import Table

    return Table(
        ["seeds", "mean ±", "next run ±", "difference of two ±", "next run within their range"],
        [
            [row.num_seeds, row.mean, row.next_run, row.difference, points(row.next_inside)]
            for row in final.rows
        ],
        "What seeds tell of one configuration, 95 % (model, normal scores, Student's t)",
    )


def final_notes(final: Final, costs: Costs) -> list[str]:
    """The seeds of the final, and why the scores of the search can't stand in for them."""
    from tapeline.report import format_number

    curse, num = final.curse, final.num_seeds
    return [
        f"The best of {final.num_runs} random scores overstates itself by "
        f"{format_number(curse.overstated)} (it is worth {format_number(curse.value)} above the "
        "mean; quality normal with standard deviation 1, model).",
        f"A final of the best two takes {num} fresh seeds each to tell a difference of "
        f"{format_number(final.difference)}: {format_number(costs.final_gpu_hours)} GPU-hours and "
        f"{format_number(costs.final_gpu_hours * costs.price)} more. The next run would fall "
        f"within the range of {num} seeds with only {points(chance_next_inside(num))}.",
    ]


def found_tables(plan: SearchPlan, played: Played, costs: Costs) -> list[Table]:
    """What each way found in simulation, and what a cut lets through."""
    from tapeline.report import Table

    ways = {one.name: one for one in plan.strategies}
    tables = [
        Table(
            [
                *("search", "early scores", "regret", "±", "overstated", "pick is good", "± "),
                "cost per useful conclusion",
            ],
            [
                [
                    one.name,
                    one.noise or "unused",
                    one.regret,
                    one.regret_error,
                    one.overstated,
                    points(one.good),
                    points(one.good_error),
                    conclusion_cost(ways[one.name], one, costs),
                ]
                for one in played.found
            ],
            f"Simulated, {played.found[0].num_searches} searches each, ± one standard error, on a "
            "bowl with one setting that matters most; quality has standard deviation 1. Good: in "
            f"the best {100 * plan.best_share:g} %. A conclusion is a search and its final",
        )
    ]
    if played.survivals:
        tables.append(
            Table(
                ["search", "on the first rung", "best survives the first cut", "±"],
                [
                    [name, one.num_configs, points(one.chance), points(one.error)]
                    for name, one in played.survivals.items()
                ],
                "The best configuration under early noise (Monte Carlo, normal quality)",
            )
        )
    return tables


def conclusion_cost(way: Strategy, found: Found, costs: Costs) -> float | None:
    """Search and final over the chance that the pick is good; None if it never was."""
    return (
        (way.gpu_hours + costs.final_gpu_hours) * costs.price / found.good if found.good else None
    )


def found_notes(plan: SearchPlan, played: Played, costs: Costs) -> list[str]:
    """Which way is the cheapest under the worst noise that was played, and if that is told."""
    from tapeline.report import format_number

    ways = {one.name: one for one in plan.strategies}
    worst = [one for one in played.found if one.noise in (None, played.worst)]

    def cost(found: Found) -> float:
        return conclusion_cost(ways[found.name], found, costs) or float("inf")

    best = min(worst, key=cost)
    notes = [
        f"Least cost per useful conclusion, {played.worst}: {best.name}, "
        f"{format_number(cost(best))} (simulated, pick good in {points(best.good)})."
    ]
    alike = _not_told_apart(best, worst)
    if alike:
        notes.append(
            f"Not told apart from it in {best.num_searches} searches (less than two standard "
            f"errors of the difference): {', '.join(alike)}."
        )
    if played.left_out:
        notes.append(f"Too many runs to simulate: {', '.join(played.left_out)}.")
    return notes


def _not_told_apart(best: Found, others: Sequence[Found]) -> list[str]:
    return [
        one.name
        for one in others
        if one is not best
        and abs(one.good - best.good) < 2 * (one.good_error**2 + best.good_error**2) ** 0.5
    ]
