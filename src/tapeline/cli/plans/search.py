"""`tapeline plan search`: how to spend a budget of training runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from tapeline.cli.output import Json, progress_bar
from tapeline.cli.plans.frame import Answer, Plot, option, show
from tapeline.cli.plans.search_text import (
    Costs,
    arithmetic_notes,
    arithmetic_tables,
    final_notes,
    found_notes,
    found_tables,
    seeds_table,
)
from tapeline.plan import Inputs
from tapeline.plan.job import PRICE
from tapeline.plan.search import (
    BEST_SHARE,
    BUDGET,
    DIMENSIONS,
    ETA,
    FIRST_DRAWS,
    LEAST,
    PER_RUN,
    RANDOM,
    RUN,
    WORKERS,
    Budget,
    SearchPlan,
    chance_of_best,
    plan_search,
)
from tapeline.plan.search_noise import (
    DIFFERENCE,
    EARLY_NOISE,
    MINOR_WEIGHT,
    SEED_NOISE,
    SIMULATE,
    SIMULATE_IF_ASKED,
    SLOW_BY,
    SLOW_STARTERS,
    Noise,
)
from tapeline.plan.seeds import Final, plan_final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tapeline.plan.search_play import Played


def search(
    budget_gpu_hours: Annotated[float | None, option(BUDGET)] = None,
    run_gpu_hours: Annotated[float | None, option(RUN)] = None,
    least_gpu_hours: Annotated[float | None, option(LEAST)] = None,
    dimensions: Annotated[int | None, option(DIMENSIONS)] = None,
    eta: Annotated[int | None, option(ETA)] = None,
    workers: Annotated[int | None, option(WORKERS)] = None,
    accelerators_per_run: Annotated[int | None, option(PER_RUN)] = None,
    first_draws: Annotated[int | None, option(FIRST_DRAWS)] = None,
    best_share: Annotated[float | None, option(BEST_SHARE)] = None,
    price_per_hour: Annotated[float | None, option(PRICE)] = None,
    seed_noise: Annotated[float | None, option(SEED_NOISE)] = None,
    difference: Annotated[float | None, option(DIFFERENCE)] = None,
    simulate: Annotated[int | None, option(SIMULATE)] = None,
    early_noise: Annotated[float | None, option(EARLY_NOISE)] = None,
    slow_starters: Annotated[float | None, option(SLOW_STARTERS)] = None,
    slow_by: Annotated[float | None, option(SLOW_BY)] = None,
    minor_weight: Annotated[float | None, option(MINOR_WEIGHT)] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What each way of searching gets for a budget; with a noise, what each would find.

    Example: tapeline plan search --budget-gpu-hours 2048 --run-gpu-hours 64

    Example: tapeline plan search --early-noise 1 --slow-starters 0.25
    """
    inputs = Inputs()
    budget = Budget(
        inputs.take(BUDGET, budget_gpu_hours),
        inputs.take(RUN, run_gpu_hours),
        inputs.take(LEAST, least_gpu_hours),
        inputs.count(ETA, eta),
        inputs.count(DIMENSIONS, dimensions),
        inputs.count(FIRST_DRAWS, first_draws),
        inputs.count(WORKERS, workers),
        inputs.count(PER_RUN, accelerators_per_run),
    )
    plan = plan_search(budget, inputs.take(BEST_SHARE, best_share))
    price = inputs.take(PRICE, price_per_hour)
    seed = inputs.take(SEED_NOISE, seed_noise)
    final = plan_final(budget.num_runs, seed, inputs.take(DIFFERENCE, difference))
    noises = (early_noise, slow_starters, slow_by, minor_weight)
    played = _play(inputs, plan, budget, seed, simulate, noises)
    costs = Costs(2 * final.num_seeds * budget.run_gpu_hours, price)
    show(
        _answer(inputs, plan, budget, costs, final, played),
        as_json=as_json,
        plot=plot,
        figure=lambda: _found_figure(played) if played else _draws_figure(plan),
    )


def _answer(
    inputs: Inputs,
    plan: SearchPlan,
    budget: Budget,
    costs: Costs,
    final: Final,
    played: Played | None,
) -> Answer:
    tables = [*arithmetic_tables(plan, budget, costs), seeds_table(final)]
    notes = [*arithmetic_notes(plan, budget), *final_notes(final, costs)]
    model = {**asdict(plan), "final": asdict(final), "final_gpu_hours": costs.final_gpu_hours}
    if played is None:
        notes.append("Add --early-noise 1, or another noise, to simulate what each would find.")
        return Answer("search", inputs, model, tables, notes)
    model["simulated"] = asdict(played)
    return Answer(
        "search",
        inputs,
        model,
        [*tables, *found_tables(plan, played, costs)],
        [*found_notes(plan, played, costs), *notes],
    )


def _play(
    inputs: Inputs,
    plan: SearchPlan,
    budget: Budget,
    seed_noise: float,
    simulate: int | None,
    noises: tuple[float | None, float | None, float | None, float | None],
) -> Played | None:
    """What is simulated, if that was asked for, be it by a noise."""
    asked = any(one is not None for one in noises)
    num = inputs.count(
        replace(SIMULATE, default=SIMULATE_IF_ASKED) if asked else SIMULATE, simulate
    )
    if not num:
        return None
    from tapeline.plan.search_play import play

    early, slow_share, slow_by, minor = (
        inputs.take(quantity, given)
        for quantity, given in zip(
            (EARLY_NOISE, SLOW_STARTERS, SLOW_BY, MINOR_WEIGHT), noises, strict=True
        )
    )
    noise = Noise(seed_noise, early, slow_share, slow_by)
    with progress_bar("searches") as progress:
        return play(plan, budget, noise, minor_weight=minor, num_searches=num, progress=progress)


def _found_figure(played: Played) -> Figure:
    from tapeline.report.plan_figures import estimate_figure

    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for one in played.found:
        group = groups.setdefault(one.noise or "full runs only", {})
        group[one.name] = (one.regret, one.regret_error)
    return estimate_figure(
        groups,
        x_label="regret (standard deviations of quality over configurations)",
        note=f"Simulated, {played.found[0].num_searches} searches each, on a bowl with one setting "
        "that matters most; bars are two standard errors.",
    )


def _draws_figure(plan: SearchPlan) -> Figure:
    from tapeline.report.plan_figures import sweep_figure

    num = next(one.num_configs for one in plan.strategies if one.name == RANDOM)
    most = 4 * max(num, plan.draws_needed)
    draws = sorted({max(1, round(most ** (step / 60))) for step in range(61)})
    name = f"a random draw in the best {100 * plan.best_share:g} %"
    return sweep_figure(
        {name: (draws, [100 * chance_of_best(one, plan.best_share) for one in draws])},
        {name: (num, 100 * chance_of_best(num, plan.best_share))},
        x_label="configurations drawn",
        y_label="chance that one is (%)",
        note="Model: independent draws (Bergstra and Bengio 2012). Point: the full runs that the "
        "budget pays for.",
    )
