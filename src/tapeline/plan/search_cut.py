"""The chance that a cut on a noisy score keeps the best configuration.

Covers: the first cut, by drawing. What a whole search finds is `search_play`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_SEED = 0
_MOST_DRAWS = 4_000_000
_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class Survival:
    """The chance that the best of so many survives the first cut, with its standard error."""

    num_configs: int
    chance: float
    error: float


def chance_best_survives(
    num_configs: int, eta: int, early_noise: float, *, num_searches: int = 40_000
) -> Survival:
    """The chance that the best of so many normal qualities survives the first cut, Monte Carlo.

    Args:
        num_configs: on the first rung.
        eta: one in so many goes on.
        early_noise: score = quality + s × standard normal, quality of variance 1.
        num_searches: at most; fewer of many configurations.
    """
    generator = np.random.default_rng(_SEED)
    num = max(1000, min(num_searches, _MOST_DRAWS // num_configs))
    kept, done = 0, 0
    while done < num:
        at_once = min(num - done, max(1, _AT_ONCE // num_configs))
        quality = generator.standard_normal((at_once, num_configs))
        score = quality + early_noise * generator.standard_normal(quality.shape)
        best = score[np.arange(at_once), quality.argmax(axis=1)]
        kept += int(((score > best[:, None]).sum(axis=1) < num_configs // eta).sum())
        done += at_once
    chance = kept / num
    return Survival(num_configs, chance, math.sqrt(chance * (1 - chance) / num))
