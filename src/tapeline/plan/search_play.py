"""Searches played out on a known surface: what each way finds, and how much its score overstates.

Covers: regret with its standard error under early noise and slow starters, for full runs, ladders
of halving and their asynchronous kind, and a Bayesian search. The surface is a bowl with its bottom
anywhere in the unit cube and one dimension that matters most: a model of searching, not of a model
that is trained. Does not cover a choice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapelineError
from tapeline.plan.halving import Ladder
from tapeline.plan.search import ASHA, BAYESIAN, GRID, Budget, SearchPlan, Strategy
from tapeline.plan.search_cut import Survival, chance_best_survives
from tapeline.plan.search_noise import Noise

Floats = npt.NDArray[np.float64]
_SEED = 0
_MOST_SCORES = 16_000_000  # of one way: configurations, times searches, times dimensions
_MOST_JOBS = 400_000  # of ASHA, which is played event by event
_MOST_BAYESIAN = 64  # runs: each fits a Gaussian process to all before it
_CANDIDATES = 128
_LENGTH = 0.5  # of the Gaussian process, in sides of the cube
_FOR_QUANTILE = 4000


@dataclass(frozen=True, slots=True)
class Found:
    """What one way of searching found, over simulated searches.

    Attributes:
        noise: under which; None where scores are of full runs only, which it doesn't touch.
        regret: quality of the best possible less that of the pick, mean; standard deviations of
            quality over configurations.
        overstated: score of the pick less its quality, mean.
        good: share of searches whose pick is in the best share.
    """

    name: str
    noise: str | None
    regret: float
    regret_error: float
    overstated: float
    good: float
    good_error: float
    num_searches: int


@dataclass(frozen=True, slots=True)
class Played:
    """What was simulated.

    Attributes:
        found: by each way under each kind of noise.
        worst: the last of these kinds.
        survivals: of the best configuration by way, under early noise.
        left_out: ways with too many runs to be simulated.
    """

    found: tuple[Found, ...]
    worst: str
    survivals: dict[str, Survival]
    left_out: tuple[str, ...]


class _Searches:
    """So many searches at once: a bowl for each, and draws of configurations.

    Args:
        minor_weight: of each but the first.
    """

    def __init__(
        self, num: int, dimensions: int, minor_weight: float, generator: np.random.Generator
    ) -> None:
        self.num = num
        self.generator = generator
        self.weights = np.full(dimensions, minor_weight)
        self.weights[0] = 1.0
        # (x − y)² of two uniform draws has variance 1/15 − 1/36.
        self.weights /= math.sqrt(7 / 180 * float((self.weights**2).sum()))
        self.bottoms = generator.random((num, 1, dimensions))

    def draw(self, num_configs: int) -> Floats:
        """Uniform configurations, [search, configuration, dimension]."""
        return self.generator.random((self.num, num_configs, len(self.weights)))

    def quality(self, configs: Floats) -> Floats:
        """[search, configuration], 0 at best, with standard deviation 1 over uniform draws."""
        distance = configs - self.bottoms
        quality: Floats = -np.einsum("rcd,rcd,d->rc", distance, distance, self.weights)
        return quality

    def quantile(self, best_share: float) -> Floats:
        """The quality that only the best share reaches, for each search."""
        drawn = [self.quality(self.draw(_FOR_QUANTILE // 10)) for _ in range(10)]
        threshold: Floats = np.quantile(np.concatenate(drawn, axis=1), 1 - best_share, axis=1)
        return threshold

    def found(
        self, name: str, noise: str | None, picked: tuple[Floats, Floats], threshold: Floats
    ) -> Found:
        """Statistics over the searches, from the score and the quality of each pick."""
        score, quality = picked
        good = quality >= threshold
        error = 1 / math.sqrt(self.num - 1)
        return Found(
            name,
            noise,
            float(-quality.mean()),
            float(quality.std()) * error,
            float((score - quality).mean()),
            float(good.mean()),
            float(good.std()) * error,
            self.num,
        )


def play(
    plan: SearchPlan,
    budget: Budget,
    noise: Noise,
    *,
    minor_weight: float,
    num_searches: int,
    progress: Callable[[int, int], None],
) -> Played:
    """Simulate each way that can be, under early noise or not, and with slow starters or not.

    Args:
        plan: its ways; those with more runs than can be played out are left out.
        noise: of seeds, always; early noise and slow starters where they are played.
        minor_weight: of the dimensions that matter less.
        progress: called with the parts done and in all.

    Raises:
        TapelineError: none of them can be played out.
    """
    kinds = _kinds(noise)
    parts: list[tuple[Strategy, str | None, Noise]] = []
    for way in plan.strategies:
        if _too_long(way, num_searches, budget.dimensions):
            continue
        if way.ladders:
            parts += [(way, name, kind) for name, kind in kinds.items()]
        else:
            parts.append((way, None, noise))
    if not parts:
        raise TapelineError(
            f"--simulate {num_searches}",
            expected="a search of few enough runs to play out",
            found=f"{budget.num_runs:,} full runs",
            fix="Simulate a smaller budget, or leave the simulation out",
        )
    found = []
    for number, (way, name, kind) in enumerate(parts):
        progress(number, len(parts))
        searches = _Searches(
            num_searches, budget.dimensions, minor_weight, np.random.default_rng(_SEED)
        )
        threshold = searches.quantile(plan.best_share)
        picked = _search(searches, way, budget, kind, plan.num_rungs - 1)
        found.append(searches.found(way.name, name, picked, threshold))
    simulated = {way.name: way for way, _, _ in parts if way.ladders}
    return Played(
        tuple(found),
        list(kinds)[-1],
        {
            name: chance_best_survives(way.ladders[0].rungs[0].num_configs, budget.eta, noise.early)
            for name, way in simulated.items()
            if noise.early and plan.num_rungs > 1
        },
        tuple(way.name for way in plan.strategies if way not in [part[0] for part in parts]),
    )


def _kinds(noise: Noise) -> dict[str, Noise]:
    """What is played of a noise, the mildest first."""
    kinds = {"no early noise": replace(noise, early=0.0, slow_share=0.0)}
    if noise.early:
        kinds["early noise"] = replace(noise, slow_share=0.0)
    if noise.slow_share and noise.slow_by:
        kinds["early noise, slow starters" if noise.early else "slow starters"] = noise
    return kinds


def _too_long(way: Strategy, num_searches: int, dimensions: int) -> bool:
    if way.name == BAYESIAN:
        return way.num_configs > _MOST_BAYESIAN
    if way.name == ASHA:
        return way.num_configs * num_searches > _MOST_JOBS
    return way.num_configs * num_searches * dimensions > _MOST_SCORES


def _search(
    searches: _Searches, way: Strategy, budget: Budget, noise: Noise, top: int
) -> tuple[Floats, Floats]:
    """Score and quality of each search's pick."""
    if way.name == GRID:
        return _grid(searches, way, noise)
    if way.name == BAYESIAN:
        return _bayesian(searches, way, budget, noise)
    if way.name == ASHA:
        return _asha(searches, way.ladders[0], budget, noise, top)
    if not way.ladders:
        return _best(*_full_scores(searches, searches.draw(way.num_configs), noise))
    picks = [_halving(searches, one, noise, top) for one in way.ladders * way.num_rounds]
    scores = np.stack([score for score, _ in picks], axis=1)
    return _best(scores, np.stack([quality for _, quality in picks], axis=1))


def _best(scores: Floats, qualities: Floats) -> tuple[Floats, Floats]:
    at = scores.argmax(axis=1)[:, None]
    return (
        np.take_along_axis(scores, at, axis=1)[:, 0],
        np.take_along_axis(qualities, at, axis=1)[:, 0],
    )


def _full_scores(searches: _Searches, configs: Floats, noise: Noise) -> tuple[Floats, Floats]:
    quality = searches.quality(configs)
    return quality + noise.seed * searches.generator.standard_normal(quality.shape), quality


def _grid(searches: _Searches, way: Strategy, noise: Noise) -> tuple[Floats, Floats]:
    """Points in the middle of equal cells; a mean over the runs of a point that is repeated."""
    dimensions = len(searches.weights)
    num = way.num_configs
    cells = np.arange(num)[:, None] // way.num_distinct ** np.arange(dimensions) % way.num_distinct
    configs = (cells[None] + 0.5) / way.num_distinct
    repeats = np.full(num, way.num_full // num) + (np.arange(num) < way.num_full % num)
    quality = searches.quality(np.broadcast_to(configs, (searches.num, num, dimensions)))
    strays = searches.generator.standard_normal(quality.shape)
    return _best(quality + noise.seed * strays / np.sqrt(repeats), quality)


class _Scores:
    """What configurations show on each rung: [search, configuration] at a time.

    Args:
        top: the number of the last rung of the whole range.
    """

    def __init__(self, searches: _Searches, num_configs: int, noise: Noise, top: int) -> None:
        self._generator, self._noise, self._top = searches.generator, noise, top
        full, self.quality = _full_scores(searches, searches.draw(num_configs), noise)
        self._full = full
        slow = self._generator.random(full.shape) < noise.slow_share
        self._slowness = noise.slow_by * slow

    def on(self, rung: int) -> Floats:
        """The scores of all on a rung: of a full run, and what of early noise is left there."""
        left = 1 - rung / self._top if self._top else 0.0
        strays = self._noise.early * self._generator.standard_normal(self._full.shape)
        return self._full + left * (strays - self._slowness)


def _halving(searches: _Searches, one: Ladder, noise: Noise, top: int) -> tuple[Floats, Floats]:
    counts = [rung.num_configs for rung in one.rungs]
    shown = _Scores(searches, counts[0], noise, top)
    alive = np.broadcast_to(np.arange(counts[0]), (searches.num, counts[0]))
    for number, keep in enumerate(counts[1:]):
        scores = np.take_along_axis(shown.on(one.skipped + number), alive, axis=1)
        best = np.argpartition(-scores, keep - 1, axis=1)[:, :keep]
        alive = np.take_along_axis(alive, best, axis=1)
    scores = np.take_along_axis(shown.on(top), alive, axis=1)
    return _best(scores, np.take_along_axis(shown.quality, alive, axis=1))


def _asha(
    searches: _Searches, one: Ladder, budget: Budget, noise: Noise, top: int
) -> tuple[Floats, Floats]:
    shown = _Scores(searches, one.rungs[0].num_configs, noise, top)
    by_rung = np.stack([shown.on(number) for number in range(len(one.rungs))], axis=2)
    picks = [_one_asha(by_rung[number], one.added, budget) for number in range(searches.num)]
    scores = np.array([score for _, score in picks])
    return scores, shown.quality[np.arange(searches.num), [config for config, _ in picks]]


def _one_asha(scores: Floats, added: Sequence[float], budget: Budget) -> tuple[int, float]:
    """One asynchronous search, event by event; the pick and its score on the last rung it reached.

    Source: Li et al. 2020, arXiv 1810.05934, algorithm 2: a free worker takes the highest rung
        with one in the best eta-th that was not promoted, else a new configuration.
    """
    last = len(added) - 1
    ranked: list[list[tuple[float, int]]] = [[] for _ in added]  # minus the score, smallest first
    done = [0] * len(added)
    running: list[tuple[float, int, int]] = []
    best = [(math.inf, -1)] * len(added)
    now, left, fresh = 0.0, budget.gpu_hours * (1 + 1e-12), 0

    def next_job() -> tuple[int, int] | None:
        for rung in range(last - 1, -1, -1):
            promoted = done[rung] - len(ranked[rung])
            if ranked[rung] and promoted < done[rung] // budget.eta and left >= added[rung + 1]:
                return heapq.heappop(ranked[rung])[1], rung + 1
        return (fresh, 0) if fresh < len(scores) and left >= added[0] else None

    while True:
        while len(running) < budget.workers and (job := next_job()):
            config, rung = job
            fresh += rung == 0
            left -= added[rung]
            heapq.heappush(running, (now + added[rung], config, rung))
        if not running:
            break
        now, config, rung = heapq.heappop(running)
        done[rung] += 1
        shown = (-float(scores[config, rung]), config)
        heapq.heappush(ranked[rung], shown)
        best[rung] = min(best[rung], shown)
    minus, config = next(one for one in reversed(best) if one[1] >= 0)
    return config, -minus


def _bayesian(
    searches: _Searches, way: Strategy, budget: Budget, noise: Noise
) -> tuple[Floats, Floats]:
    """Each next run where a Gaussian process puts mean + 2 sd highest, one after another.

    Source: Srinivas et al. 2010, arXiv 0912.3995 (GP-UCB); squared-exponential kernel of a fixed
        length.
    """
    first = min(budget.first_draws, way.num_full)
    configs = searches.draw(first)
    scores, quality = _full_scores(searches, configs, noise)
    for _ in range(way.num_full - first):
        candidates = searches.draw(_CANDIDATES)
        gain = _upper_bound(configs, scores, candidates, noise.seed)
        chosen = np.take_along_axis(candidates, gain.argmax(axis=1)[:, None, None], axis=1)
        score, value = _full_scores(searches, chosen, noise)
        configs = np.concatenate([configs, chosen], axis=1)
        scores = np.concatenate([scores, score], axis=1)
        quality = np.concatenate([quality, value], axis=1)
    return _best(scores, quality)


def _upper_bound(configs: Floats, scores: Floats, candidates: Floats, noise: float) -> Floats:
    """Of the quality of each candidate, from the scores so far; [search, candidate]."""
    centred = scores - scores.mean(axis=1, keepdims=True)
    spread = np.maximum(centred.std(axis=1), 1e-9)[:, None, None]
    stray = 1e-6 + (noise / spread) ** 2
    across = _kernel(candidates, configs)
    weighted = across @ np.linalg.inv(_kernel(configs, configs) + stray * np.eye(scores.shape[1]))
    mean = (weighted @ (centred[:, :, None] / spread))[:, :, 0]
    bound: Floats = mean + 2 * np.sqrt(
        np.maximum(1 - np.einsum("rcn,rcn->rc", weighted, across), 0.0)
    )
    return bound


def _kernel(a: Floats, b: Floats) -> Floats:
    squares = (a**2).sum(axis=2)[:, :, None] + (b**2).sum(axis=2)[:, None, :]
    kernel: Floats = np.exp((a @ b.transpose(0, 2, 1) - squares / 2) / _LENGTH**2)
    return kernel
