"""Times in bins of equal ratio: a distribution in a few integers, whatever its range.

Eight bins an octave: a bin is between 6 and 12.5 % wide, so a quantile read from it is at most
that far off. Bins of different processes and attempts are the same, so counts can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


def bin_of(nanoseconds: int) -> int:
    """The bin that a time falls into."""
    bits = nanoseconds.bit_length()
    # The leading one bit says the octave, the three bits after it the bin in it.
    return nanoseconds if bits < 4 else ((bits - 3) << 3) | ((nanoseconds >> (bits - 4)) & 7)


def bin_edges_ns(number: int) -> tuple[int, int]:
    """Where a bin begins and ends, in nanoseconds: `[begin, end)`."""
    octave, part = divmod(number, 8)
    if octave == 0:
        return number, number + 1
    return (8 + part) << (octave - 1), (9 + part) << (octave - 1)


@dataclass(slots=True)
class Histogram:
    """Counts by bin; adds up over ranks, windows of time and attempts."""

    counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, times_ns: Iterable[int]) -> Histogram:
        """The histogram of some times."""
        histogram = cls()
        for time_ns in times_ns:
            number = bin_of(time_ns)
            histogram.counts[number] = histogram.counts.get(number, 0) + 1
        return histogram

    def add(self, counts: Mapping[int, int]) -> None:
        """Add counts by bin."""
        for number, count in counts.items():
            self.counts[number] = self.counts.get(number, 0) + count

    @property
    def total(self) -> int:
        """How many times it holds."""
        return sum(self.counts.values())

    def quantile_ns(self, share: float) -> float:
        """The time that `share` of all are below: the middle of its bin.

        Args:
            share: from 0 to 1.
        """
        assert self.counts, "an empty histogram has no quantiles"
        left = share * self.total
        for number in sorted(self.counts):
            left -= self.counts[number]
            if left <= 0:
                break
        return sum(bin_edges_ns(number)) / 2


class StepTally:
    """Counts the times of steps until they are taken: what a ledger keeps in memory."""

    def __init__(self) -> None:
        self._whole_ns = self._own_ns = 0  # of the attempt so far
        self._clear()

    def _clear(self) -> None:
        self._times: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._longest_ns, self._longest_step = -1, 0

    def add(self, step: int, whole_ns: int, own_ns: int) -> None:
        """Add a step, by the attempt's time in steps and in its own work up to its end."""
        time_ns, self._whole_ns = whole_ns - self._whole_ns, whole_ns
        number = bin_of(time_ns)
        self._times[number] = self._times.get(number, 0) + 1
        time_own_ns, self._own_ns = own_ns - self._own_ns, own_ns
        number = bin_of(time_own_ns)
        self._own[number] = self._own.get(number, 0) + 1
        if time_ns > self._longest_ns:
            self._longest_ns, self._longest_step = time_ns, step

    def taken(self, attempt: int, step: int, end: int) -> list[dict[str, Any]]:
        """One record of what was added, or none."""
        if not self._times:
            return []
        record = {
            "steps": attempt,
            "step": step,
            "end": end,
            "times": [n for pair in sorted(self._times.items()) for n in pair],
            "own": [n for pair in sorted(self._own.items()) for n in pair],
            "longest": [self._longest_step, self._longest_ns],
        }
        self._clear()
        return [record]
