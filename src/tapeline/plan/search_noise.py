"""How scores mislead a search, as numbers: what `search_play` is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tapeline.plan.inputs import Quantity

SIMULATE = Quantity(
    "simulate",
    "Searches to simulate of each kind",
    0,
    positive=False,
    whole=True,
    least=50,
    most=2000,
)
SIMULATE_IF_ASKED = 200  # where only a noise is given
SEED_NOISE = Quantity(
    "seed_noise",
    "Standard deviation of a full run's score over seeds, with that of quality over "
    "configurations as 1",
    0.25,
    positive=False,
    least=1e-3,
    most=10.0,
)
EARLY_NOISE = Quantity(
    "early_noise",
    "What a score on the first rung strays besides, in the same unit; none is left in a full run",
    1.0,
    positive=False,
    least=1e-3,
    most=100.0,
)
SLOW_STARTERS = Quantity(
    "slow_starters",
    "Share of configurations, such as long warm-ups, that look worse early than they are",
    0.25,
    positive=False,
    most=1.0,
)
SLOW_BY = Quantity(
    "slow_by",
    "How much worse, on the first rung, in the same unit",
    2.0,
    positive=False,
    most=100.0,
)
MINOR_WEIGHT = Quantity(
    "minor_weight",
    "How much each other dimension matters beside the one that matters most, which is 1",
    0.1,
    positive=False,
    most=1.0,
)
DIFFERENCE = Quantity(
    "difference", "The difference that the final should tell, in the same unit", 0.5, least=1e-3
)


@dataclass(frozen=True, slots=True)
class Noise:
    """What stands between a score and the quality; in standard deviations of quality.

    Attributes:
        seed: of a full run's score over seeds.
        early: besides, on the first rung; it falls in equal steps to none in a full run.
        slow_share: of configurations that look worse early.
        slow_by: how much on the first rung; it falls like `early`.
    """

    seed: float
    early: float = 0.0
    slow_share: float = 0.0
    slow_by: float = 0.0
