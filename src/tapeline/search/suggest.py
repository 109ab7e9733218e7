"""Which configuration a new trial gets: a point of a grid, or what one of Optuna's samplers says.

A pure function of the space, the trials so far and the new one's number: the sampler is built anew
for each, with a seed mixed from the search's and that number, on a study in memory. So a search
that goes on after a restart, on another machine, is the same search. Optuna's samplers see a paused
or cut trial as pruned at its last rung, and one that diverged as the worst of its step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from tapeline.search.space import Dimension, SearchConfig, Values

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(slots=True)
class Trial:
    """What is known of one configuration.

    Attributes:
        number: from 0, in the order of their making.
        values: of the settings; None until whoever makes it has chosen them.
        results: the metric by step; nan where it diverged or failed.
        reason: why it diverged or failed.
    """

    number: int
    values: Values | None = None
    results: dict[int, float] = field(default_factory=dict)
    reason: str | None = None


def suggest(config: SearchConfig, trials: Iterable[Trial], number: int, full_steps: int) -> Values:
    """The configuration of a new trial.

    Args:
        trials: made before, those that still run included.
    """
    if config.sampler == "grid":
        return _grid_point(config, number)
    study = optuna.create_study(direction=config.direction, sampler=_sampler(config, number))
    study.add_trials(
        [_frozen(one, config, full_steps) for one in trials if one.values and one.number != number]
    )
    return dict(study.ask(distributions(config)).params)


def distributions(config: SearchConfig) -> dict[str, BaseDistribution]:
    """The space in Optuna's words."""
    return {key: _distribution(one) for key, one in sorted(config.space.items())}


def _distribution(one: Dimension) -> BaseDistribution:
    if one.integer:
        return IntDistribution(*one.integer)
    if one.log:
        return FloatDistribution(*one.log, log=True)
    if one.uniform:
        return FloatDistribution(*one.uniform)
    return CategoricalDistribution(one.choice or ())


def _sampler(config: SearchConfig, number: int) -> BaseSampler:
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    if config.sampler == "random":
        return RandomSampler(seed=seed)
    if config.sampler == "gp":
        return GPSampler(seed=seed)
    # What still runs counts as bad: workers at once would all try the same place else.
    return TPESampler(seed=seed, constant_liar=True)


def _frozen(trial: Trial, config: SearchConfig, full_steps: int) -> FrozenTrial:
    full = trial.results.get(full_steps, math.nan)
    if math.isfinite(full):
        state, value = TrialState.COMPLETE, full
    else:
        state, value = TrialState.PRUNED if trial.results else TrialState.RUNNING, None
    return create_trial(
        state=state,
        value=value,
        params=dict(trial.values or {}),
        distributions=distributions(config),
        intermediate_values=dict(trial.results),
    )


def _grid_point(config: SearchConfig, number: int) -> Values:
    """Points in an order that is mixed by the seed, so that a part of a grid is no corner of it."""
    axes = {key: one.grid() for key, one in sorted(config.space.items())}
    order = np.random.default_rng(config.seed).permutation(math.prod(map(len, axes.values())))
    place = int(order[number])
    values: Values = {}
    for key, points in axes.items():
        place, at = divmod(place, len(points))
        values[key] = points[at]
    return values
