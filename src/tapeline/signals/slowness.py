"""The later questions of a triage: where a step's time goes, and how it is spread over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapeline.signals.evidence import Evidence, RankEvidence
from tapeline.signals.verdict import Limits, Verdict
from tapeline.words import percent


def shape(evidence: Evidence, limits: Limits) -> list[Verdict]:
    """Buckets that take too much on most ranks."""
    return [
        *_starvation(evidence, limits),
        *_checkpoints(evidence, limits),
        *_small_kernels(evidence, limits),
    ]


def _starvation(evidence: Evidence, limits: Limits) -> list[Verdict]:
    share = typical_share(evidence, "starved")
    if share is not None and share >= limits.starved:
        line = f"{percent(share)} of the time since startup goes by waiting for data"
        lines = (f"{line}, on at least half of the ranks", *_listed(evidence, "starved"))
    elif loaders_are_behind(evidence, limits):
        share = _starved_by_turns(evidence)
        made_ms = [1e3 * r.batch_s for r in evidence.ranks if r.batch_s is not None]
        lines = (
            f"{percent(share)} of the time since startup some rank waits for data, and the others "
            "for that rank",
            f"their loaders take {min(made_ms):.3g} to {max(made_ms):.3g} ms for a batch, about "
            f"as long as a step: they read on while they wait, and none would keep up by itself",
            *_listed(evidence, "starved"),
        )
    else:
        return []
    return [
        Verdict(
            "starvation",
            (),
            lines,
            "the same wait on one batch that is fed again and again: then it isn't the loader",
            "Feed faster: `tapeline bench` says whether reading, gathering or prefetching is slow",
            share,
        )
    ]


def loaders_are_behind(evidence: Evidence, limits: Limits) -> bool:
    """Whether the loaders of several ranks in step are all too slow, and not only the last one's.

    Only the last one's wait is seen, since the others read on while they wait for that rank. Each
    then makes a batch in about the time of a step.
    """
    made_s = [r.batch_s for r in evidence.ranks if r.batch_s is not None]
    windows = [w for r in evidence.ranks for w in r.windows if len(w.own_s)]
    steps_s = [float(np.mean(w.own_s)) + (w.wait_s or 0) for w in windows]
    if len(made_s) < max(2, evidence.num_ranks) or not steps_s:
        return False
    keeps_up_s = (1 - limits.starved) * _middle(steps_s)
    return min(made_s) >= keeps_up_s and _starved_by_turns(evidence) >= limits.starved


def _starved_by_turns(evidence: Evidence) -> float:
    """The share of time in which any rank waits for data, at most: they may do so at once."""
    return min(1.0, sum(r.shares.get("starved", 0.0) for r in evidence.ranks if r.shares))


def _checkpoints(evidence: Evidence, limits: Limits) -> list[Verdict]:
    share = typical_share(evidence, "checkpoint")
    if share is None or share < limits.checkpoint:
        return []
    return [
        Verdict(
            "checkpoint-bound",
            (),
            (f"{percent(share)} of the time since startup the loop stands still for checkpoints",),
            "the same share with checkpoints ten times as far apart",
            'Save in the background, shard, or save less often: `checkpoint.every = "auto"`',
            share,
        )
    ]


def _small_kernels(evidence: Evidence, limits: Limits) -> list[Verdict]:
    seen = [r for r in evidence.ranks if r.kernels]
    if not seen:
        return []
    size = _middle([r.kernels.median_us for r in seen if r.kernels])
    idle = 1 - _middle([r.kernels.busy for r in seen if r.kernels])
    number = _middle([r.kernels.per_step for r in seen if r.kernels])
    gaps_us = [
        1e6 * idle * w.own_s.mean() / number for r in seen for w in r.windows if len(w.own_s)
    ]
    if idle >= limits.idle and size < limits.small_kernel_us:
        seen_of_them, gone = f"the median runs {size:.1f} µs", idle
    elif idle >= limits.launching and gaps_us and _middle(gaps_us) < limits.launch_us:
        # A few large ones hide how small the many are; done as one, the many go as well.
        seen_of_them, gone = f"{_middle(gaps_us):.0f} µs from one to the next", 1.0
    else:
        return []
    useful = typical_share(evidence, "useful")
    return [
        Verdict(
            "small kernels",
            (),
            (
                f"{number:.0f} kernels a step, {seen_of_them}",
                f"{percent(idle)} of the computing time none runs",
            ),
            "a larger batch that takes longer in proportion",
            "Do in one operation what a Python loop does in many, take a larger batch, compile the "
            "model or capture it as a graph, fuse the optimiser",
            gone * (1.0 if useful is None else useful),
        )
    ]


def typical_share(evidence: Evidence, bucket: str) -> float | None:
    """What at least half of the ranks spend in a bucket; None if no ledger tells.

    One rank of two is not typical: what one does alone is judged by `distribution`.
    """
    shares = sorted(r.shares[bucket] for r in evidence.ranks if r.shares and bucket in r.shares)
    return shares[(len(shares) - 1) // 2] if shares else None


def _middle(values: list[float]) -> float:
    return float(np.median(values))


def _listed(evidence: Evidence, bucket: str) -> tuple[str, ...]:
    if len(evidence.ranks) < 2:
        return ()
    shares = [(r.shares[bucket], r.rank) for r in evidence.ranks if r.shares and bucket in r.shares]
    (low, at_low), (high, at_high) = min(shares), max(shares)
    return (f"from {percent(low)} on rank {at_low} to {percent(high)} on rank {at_high}",)


@dataclass(frozen=True, slots=True)
class _Window:
    """One window over all ranks, in seconds a step.

    Attributes:
        samples: each rank's own times.
        own: `[ranks]` their means.
        wait: `[ranks]` in collectives, on average.
        aligned: the same entry is the same step on each rank.
    """

    samples: Sequence[NDArray[np.float64]]
    own: NDArray[np.float64]
    wait: NDArray[np.float64]
    aligned: bool

    @classmethod
    def of(cls, ranks: Sequence[RankEvidence], at: int, *, aligned: bool) -> _Window:
        """Window number `at` of each rank."""
        samples = [r.windows[at].own_s for r in ranks]
        aligned &= len({len(sample) for sample in samples}) == 1
        return cls(
            samples if aligned else [np.sort(sample) for sample in samples],
            np.array([sample.mean() for sample in samples]),
            np.array([r.windows[at].wait_s for r in ranks], np.float64),
            aligned,
        )

    @property
    def slowest(self) -> int:
        return int(np.argmax(self.own))

    @property
    def step(self) -> float:
        return float(self.own.mean() + self.wait.mean())

    def imbalance(self, without: int | None = None) -> float:
        """The wait for the slowest, on average; never more than was waited at all."""
        own = self.own if without is None else np.delete(self.own, without)
        return float(min(self._latest(without) - own.mean(), self.wait.mean()))

    def cost_of(self, rank: int) -> float:
        """What steps take longer because this rank is slower than the others usually are."""
        later = self._latest() - self._latest(without=rank)
        slower = self.own[rank] - np.median(np.delete(self.own, rank))
        return float(min(later, slower, self.wait.max()))

    def _latest(self, without: int | None = None) -> float:
        """The time of the slowest rank of each step, on average.

        Where steps are not aligned, of ranks that are independent within the window: the maximum
        has the product of their distribution functions as its own.
        """
        if self.aligned:
            chosen = [s for rank, s in enumerate(self.samples) if rank != without]
            return float(np.max(chosen, axis=0).mean())
        times = np.unique(np.concatenate(self.samples))
        chance = np.ones(len(times))
        for rank, sample in enumerate(self.samples):
            if rank != without:
                chance *= np.searchsorted(sample, times, side="right") / len(sample)
        return float(times @ np.diff(chance, prepend=0.0))


def distribution(evidence: Evidence, limits: Limits) -> list[Verdict]:
    """Ranks that are waited for, and collectives that take long though nobody is late.

    A collective begins when the last rank arrives: what a rank waits beyond that is the
    collective's own time.
    """
    ranks = comparable(evidence)
    if len(ranks) < 2:
        return []
    windows = [
        _Window.of(ranks, at, aligned=evidence.aligned)
        for at in range(min(len(r.windows) for r in ranks))
    ]
    step = float(np.mean([w.step for w in windows]))
    found = []

    def share(seconds: list[float]) -> float:
        return float(np.mean(seconds)) / step

    imbalances = [w.imbalance() for w in windows]
    rest = imbalance = share(imbalances)
    rank, number = Counter(w.slowest for w in windows).most_common(1)[0]
    if loaders_are_behind(evidence, limits):
        rest = 0.0  # who waits for data is late, which is told of all of them
    elif len(windows) >= limits.num_windows and number >= limits.persistent * len(windows):
        gain = share([w.cost_of(rank) for w in windows])
        if gain >= limits.imbalance:
            found.append(_persistent(ranks, rank, windows, gain))
            rest = share([w.imbalance(without=rank) for w in windows])
    if rest >= limits.imbalance:
        found.append(_rotating(rest, f"rank {ranks[rank].rank}, in {number} of {len(windows)}"))
    waits = [float(w.wait.mean()) for w in windows]
    communication = share([w - i for w, i in zip(waits, imbalances, strict=True)])
    if communication >= limits.communication:
        found.append(_communication(communication, imbalance))
    return found


def comparable(evidence: Evidence) -> list[RankEvidence]:
    """The ranks whose own time is told apart from their waiting."""
    return [
        r
        for r in evidence.ranks
        if r.windows and all(w.wait_s is not None and len(w.own_s) for w in r.windows)
    ]


def _persistent(
    ranks: Sequence[RankEvidence], at: int, windows: Sequence[_Window], gain: float
) -> Verdict:
    slow = ranks[at]
    number = sum(w.slowest == at for w in windows)
    own = np.mean([w.own for w in windows], axis=0)
    others = float(np.median(np.delete(own, at)))
    lines = [
        f"rank {slow.rank} is the slowest in {number} of {len(windows)} windows",
        f"its own part of a step takes {1e3 * own[at]:.3g} ms, that of the others "
        f"{1e3 * others:.3g} ms",
    ]
    refuted_by = "the same rank no longer the slowest when it trades places with another machine"
    change = "Look at that rank's machine: clocks, heat, other processes, its link"
    starved = {r.rank: r.shares["starved"] for r in ranks if r.shares and "starved" in r.shares}
    here = starved.pop(slow.rank, 0.0)
    if starved and here - (there := float(np.median([*starved.values()]))) > gain / 2:
        lines.append(f"it waits for data {percent(here)} of the time, the others {percent(there)}")
        refuted_by = (
            "another rank that waits for data once this one doesn't: of loaders that are all slow, "
            "only the last one's wait is seen, since the others read on meanwhile"
        )
        change = "Look at that rank's loader: its disk, its cores, its share of the files"
    return Verdict(
        "persistent straggler",
        (slow.rank,),
        tuple(lines),
        refuted_by,
        change,
        gain,
    )


def _rotating(share: float, most_often: str) -> Verdict:
    return Verdict(
        "rotating straggler",
        (),
        (
            f"{percent(share)} of a step goes by waiting for whichever rank is the slowest",
            f"none is so all the time; the most often {most_often} windows",
        ),
        "one rank that is the slowest step after step",
        "Even out what varies: work per batch, other processes, garbage collection, pauses for "
        "input; or synchronise less often",
        share,
    )


def _communication(share: float, imbalance: float) -> Verdict:
    return Verdict(
        "communication-bound",
        (),
        (
            f"{percent(share)} of a step is spent in collectives although no rank is late",
            f"waiting for the slowest explains another {percent(imbalance)}",
        ),
        "the same share with one rank a machine less, or a collective of a few bytes as slow",
        "Overlap the collective with the backward pass, send bfloat16, accumulate over more "
        "micro-batches, or mend the link",
        share,
    )
