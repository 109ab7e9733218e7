"""The order of times on a tape: no time before one already reached, and none that can't be.

- A time that is more than a minute ahead of the times on both sides of it is stray: its events, up
  to 10,000 of one time, are left out and counted. To see the other side, events that are so far
  ahead wait for the next time, and for nothing else.
- A time earlier than one already reached is lifted to it, and counted: what stands later in a file
  was not known earlier.
- If more than `Source.max_lifted_share` of the events are stray, or lifted by more than five
  seconds, the order of the file isn't one. (Less is usual: a snapshot is written before the updates
  that came while it was being fetched.)

Does not cover which times are possible at all (`readers.times`), nor events lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np

from tapeline.clock import utc
from tapeline.errors import TapeError
from tapeline.session import Int64Array
from tapeline.tape.blocks import Block, LevelEvents, OrderEvents
from tapeline.tape.readers.base import Source, joined
from tapeline.words import percent

_FAR_NS: Final = 60 * 10**9
_USUAL_NS: Final = 5 * 10**9
_MAX_STRAY: Final = 10_000


class _StepBack(NamedTuple):
    """An event whose time was lifted, and the first event of the time it was lifted to.

    Events are numbered from 1; times are in nanoseconds UTC.
    """

    by_ns: int
    number: int
    time_ns: int
    reached_by: int
    reached_ns: int


class Timeline:
    """Puts the times of one tape in order, block by block.

    Attributes:
        first_ns, last_ns: the earliest and the latest time so far, in order; 0 before the first.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._counts = source.counts
        self._num_events = 0  # yielded or left out
        self._before_ns: int | None = None  # the time before the next block, as it stands there
        self._waiting: list[Block] = []  # events of one time that may be stray
        self._last_raw_ns = 0
        self._reached_by = 0
        self._num_late = 0
        self._farthest: _StepBack | None = None
        self._first_stray: str | None = None
        self.first_ns = self.last_ns = 0

    def settle(self, blocks: Iterable[Block]) -> Iterator[Block]:
        """The blocks with their times in order, none of them empty.

        Raises:
            TapeError: after the last, if too many were out of order.
        """
        for block in blocks:
            if len(block.times_ns):
                for part in self._without_stray(block):
                    yield self._lifted(part)
        for part in self._waiting:
            yield self._lifted(part)
        self._check()

    def _without_stray(self, block: Block) -> Iterator[Block]:
        """The block, or slices of it, and what waited for it."""
        times_ns = block.times_ns
        starts = np.concatenate([[0], np.flatnonzero(np.diff(times_ns)) + 1])
        values = times_ns[starts]
        lengths = np.diff(starts, append=len(times_ns))
        before = values[0] if self._before_ns is None else self._before_ns
        is_ahead = np.diff(values, prepend=before) > _FAR_NS
        is_ahead &= lengths <= _MAX_STRAY
        first = 0
        if self._waiting:
            first = int(values[0] == before)  # the time that waits goes on
            if first:
                self._waiting.append(block.take(slice(0, int(lengths[0]))))
            yield from self._judge(int(values[first]) if first < len(values) else None)
        self._before_ns = int(values[-1])
        is_stray = is_ahead[:-1] & (values[:-1] - values[1:] > _FAR_NS)
        is_last_waiting = bool(is_ahead[-1]) and first < len(values)
        # The rows to go on with, between those that are stray.
        stop = int(starts[-1]) if is_last_waiting else len(times_ns)
        done = int(lengths[0]) if first else 0
        for number in np.flatnonzero(is_stray).tolist():
            if done < starts[number]:
                yield _slice(block, done, int(starts[number]))
            self._leave_out(int(lengths[number]), int(values[number]))
            done = int(starts[number] + lengths[number])
        if done < stop:
            yield _slice(block, done, stop)
        if is_last_waiting:
            self._waiting.append(block.take(slice(stop, len(times_ns))))

    def _judge(self, next_ns: int | None) -> Iterator[Block]:
        """What waited, unless it is stray; nothing yet if the next time isn't known."""
        num = sum(len(block.times_ns) for block in self._waiting)
        if next_ns is None and num <= _MAX_STRAY:
            return
        waited, self._waiting = self._waiting, []
        time_ns = int(waited[0].times_ns[0])
        if next_ns is not None and num <= _MAX_STRAY and time_ns - next_ns > _FAR_NS:
            self._leave_out(num, time_ns)
        else:
            yield from waited

    def _leave_out(self, num: int, time_ns: int) -> None:
        if self._first_stray is None:
            self._first_stray = f"event {self._num_events + 1:,} at {utc(time_ns)}"
        self._num_events += num
        self._counts.events_stray += num

    def _lifted(self, block: Block) -> Block:
        times_ns = block.times_ns
        before = np.concatenate([[self._last_raw_ns], times_ns[:-1]])
        lifted = np.maximum.accumulate(np.maximum(times_ns, self.last_ns))
        self._counts.times_stepped_back += int(np.count_nonzero(times_ns < before))
        self._note(times_ns, lifted)
        self._num_events += len(times_ns)
        self.first_ns = self.first_ns or int(lifted[0])
        self._last_raw_ns, self.last_ns = int(times_ns[-1]), int(lifted[-1])
        if isinstance(block, OrderEvents | LevelEvents):
            return block._replace(times_ns=lifted)
        return dataclasses.replace(block, times_ns=lifted)

    def _note(self, times_ns: Int64Array, lifted: Int64Array) -> None:
        """Count the lifted times and remember the one lifted by the most."""

        def reached_by(time_ns: int) -> int:
            if time_ns == self.last_ns:
                return self._reached_by
            return self._num_events + 1 + int(np.searchsorted(lifted, time_ns))

        by_ns = lifted - times_ns
        self._counts.times_lifted += int(np.count_nonzero(by_ns))
        self._num_late += int(np.count_nonzero(by_ns > _USUAL_NS))
        row = int(np.argmax(by_ns))
        if by_ns[row] > (self._farthest.by_ns if self._farthest else 0):
            reached_ns = int(lifted[row])
            self._farthest = _StepBack(
                int(by_ns[row]),
                self._num_events + 1 + row,
                int(times_ns[row]),
                reached_by(reached_ns),
                reached_ns,
            )
        self._reached_by = reached_by(int(lifted[-1]))

    def _check(self) -> None:
        num_stray, share = self._counts.events_stray, self._source.max_lifted_share
        if self._num_late + num_stray <= share * self._num_events:
            return
        found = [f"{self._num_late:,} of {self._num_events:,} seconds behind one before them"]
        if num_stray:
            found.append(
                f"{num_stray:,} far ahead of both their neighbours, the first {self._first_stray}"
            )
        if self._farthest is not None:
            _, number, time_ns, reached_by, reached_ns = self._farthest
            found.append(
                f"the farthest: event {reached_by:,} is at {utc(reached_ns)}, and event "
                f"{number:,}, after it, at {utc(time_ns)}"
            )
        raise TapeError(
            joined([str(path) for path in self._source.paths], "and"),
            expected=f"at most {percent(share, '.4f')} of the events to be out of the order of "
            "time",
            found="; ".join(found),
            fix="Look there for a wrong time, an unsorted or reversed file, or one that holds the "
            "same events twice, and repair it; or raise max_lifted_share "
            "(`--set max_lifted_share=…`) if such events may be taken as of the latest time",
        )


def _slice(block: Block, start: int, stop: int) -> Block:
    is_whole = stop - start == len(block.times_ns)
    return block if is_whole else block.take(slice(start, stop))
