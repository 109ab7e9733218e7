"""Ranks that take longer for their own work than they should, second after second.

Own work is data, transfer and compute, as the ledger books it: without the wait for the others,
which makes every rank's whole step as long as the slowest one's. Where a collective runs inside
what the ledger calls compute, all ranks look alike and nobody is accused.

Covers judging windows of own work (`judge`, pure) and taking them from the ledgers of a run that
goes on (`Pace`). A rank is compared with those that have as much to do, and with itself. Does not
cover why it is slow, nor a rank that makes no progress at all: that is a hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tapeline.clock import Clock
from tapeline.ledger import ledger_path, step_times_after

_NS_PER_S = 1_000_000_000
_LOOK_NS = _NS_PER_S  # a ledger adds a window about once a second
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class SlowLimits:
    """From where on a rank is a straggler.

    Attributes:
        factor: times the best of the ranks with as much to do, and
        deviations: above the median of the others, in their median absolute deviations, scaled to
            be standard deviations; both in a window make it slow there.
        own_factor: times its own best stretch of `num_windows`.
        persistent, num_windows: slow in as many of the last so many windows, of about a second.
    """

    factor: float = 1.3
    deviations: float = 4.0
    own_factor: float = 1.5
    persistent: int = 48
    num_windows: int = 60


@dataclass(frozen=True, slots=True)
class Straggler:
    """One slow rank.

    Attributes:
        rank: which.
        behind: the others are faster; else it is only slower than it was itself.
        num_slow, num_windows: in how many of how many windows.
        times_best: its own work over that of the best rank with as much to do, in the middle of
            the windows; None if there is no such rank.
        times_own_best: over that of its own best stretch; None before there was one.
    """

    rank: int
    behind: bool
    num_slow: int
    num_windows: int
    times_best: float | None
    times_own_best: float | None

    @property
    def text(self) -> str:
        """In a sentence."""
        compared = []
        if self.times_best is not None:
            compared.append(f"{self.times_best:.1f} times the best rank's")
        if self.times_own_best is not None:
            compared.append(f"{self.times_own_best:.1f} times its own best")
        return (
            f"rank {self.rank} is slow in {self.num_slow} of {self.num_windows} windows: its own "
            f"part of a step takes {' and '.join(compared)}"
        )


def judge(
    windows: Sequence[Mapping[int, float]],
    loads: Mapping[int, float],
    best: Mapping[int, float],
    limits: SlowLimits,
) -> list[Straggler]:
    """The stragglers of some windows; none while these are fewer than the limits ask for.

    Args:
        windows: seconds of own work a step, by rank; each window has every rank.
        loads: how much each rank has to do; only ranks with the same are compared.
        best: seconds of each rank's own best stretch, of those that have had one.
        limits: from where on.
    """
    recent = windows[-limits.num_windows :]
    if len(recent) < limits.num_windows:
        return []
    found = []
    for rank, mine in loads.items():
        peers = [other for other, load in loads.items() if load == mine and other != rank]
        behind = sum(_behind(w[rank], [w[p] for p in peers], limits) for w in recent)
        own_best = best.get(rank)
        slowed = sum(w[rank] > limits.own_factor * own_best for w in recent) if own_best else 0
        if max(behind, slowed) < limits.persistent:
            continue
        is_behind = behind >= limits.persistent
        found.append(
            Straggler(
                rank,
                is_behind,
                behind if is_behind else slowed,
                len(recent),
                median(w[rank] / min(w[p] for p in peers) for w in recent) if peers else None,
                median(w[rank] for w in recent) / own_best if own_best else None,
            )
        )
    return found


def _behind(own_s: float, others_s: Sequence[float], limits: SlowLimits) -> bool:
    """Whether one window of a rank stands out; its own time is kept out of what is usual."""
    if not others_s:
        return False
    middle = median(others_s)
    spread = _MAD_TO_SIGMA * median(abs(other - middle) for other in others_s)
    return own_s > max(limits.factor * min(others_s), middle + limits.deviations * spread)


@dataclass(slots=True)
class Pace:
    """The own work of the ranks of one attempt, as their ledgers tell it.

    Args:
        run: folder of the run.
        loads: how much each rank has to do, by rank.
        limits: who is slow.
        clock: for how often to look.
    """

    run: Path
    loads: Sequence[float]
    limits: SlowLimits
    clock: Clock
    _read: list[int] = field(init=False)
    _last: list[deque[float]] = field(init=False)
    _best: dict[int, float] = field(init=False, default_factory=dict)
    _told: set[tuple[int, bool]] = field(init=False, default_factory=set)
    _looked_ns: int = field(init=False)

    def __post_init__(self) -> None:
        paths = [ledger_path(self.run, rank) for rank in range(len(self.loads))]
        self._read = [path.stat().st_size if path.exists() else 0 for path in paths]
        self._last = [deque(maxlen=self.limits.num_windows) for _ in paths]
        self._looked_ns = self.clock.monotonic_ns()

    def look(self) -> list[Straggler]:
        """Who has become a straggler; each is told once. To be called often."""
        now_ns = self.clock.monotonic_ns()
        if now_ns - self._looked_ns < _LOOK_NS:
            return []
        self._looked_ns = now_ns
        for rank, last in enumerate(self._last):
            path = ledger_path(self.run, rank)
            added, self._read[rank] = step_times_after(path, self._read[rank])
            last.extend(seconds.own.quantile_ns(0.5) / _NS_PER_S for seconds in added)
        # Paired from the end: all ranks do the same steps, so the same seconds of them.
        number = min(len(last) for last in self._last)
        windows = [
            {rank: last[at] for rank, last in enumerate(self._last)} for at in range(-number, 0)
        ]
        found = judge(windows, dict(enumerate(self.loads)), self._best, self.limits)
        self._remember()
        new = [slow for slow in found if (slow.rank, slow.behind) not in self._told]
        self._told |= {(slow.rank, slow.behind) for slow in new}
        return new

    def _remember(self) -> None:
        for rank, last in enumerate(self._last):
            if len(last) == self.limits.num_windows:
                middle_s = median(last)
                self._best[rank] = min(self._best.get(rank, middle_s), middle_s)
