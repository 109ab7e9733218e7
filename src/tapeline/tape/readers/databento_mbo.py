"""Databento's market by order: from records to what happens to orders.

The rules, each counted:

- A record adds an order (A), cancels some or all of it (C), modifies it (M) or clears the book (R).
  Trades (T), fills (F) and none (N) don't change the book: a cancel follows where they should.
- An event ends with the record flagged `F_LAST`, or with a clear. All of it is known at the time of
  its end; nothing in between is a state of the book. An event without its end, at the end of the
  tape, is left out.
- Records of a snapshot (`F_SNAPSHOT`) replace the book, and aren't trading: whatever their times
  say, they are part of the first event after them.
- From a record flagged `F_MAYBE_BAD_BOOK`, after a gap in the channel, the book is unknown until it
  is cleared or a snapshot follows. What comes between is left out.
- A top-of-book record (`F_TOB`) is the whole of its side, which is empty at an undefined price.
- An order of unknown action, side or size is left out.

Does not cover: files, sessions, or what a book of orders does (`replay`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tapeline.errors import TapeError
from tapeline.session import BoolArray, Int64Array
from tapeline.tape.blocks import CHANGED, CLEARED, CREATED, REDUCED, OrderEvents
from tapeline.tape.readers.databento_records import (
    MBO,
    UNDEFINED_PRICE,
    UNDEFINED_SIZE,
    Clock,
    Records,
)
from tapeline.tape.report import Counts

UInt8Array = npt.NDArray[np.uint8]

F_LAST: Final = 0x80
F_TOB: Final = 0x40
F_SNAPSHOT: Final = 0x20
F_MAYBE_BAD_BOOK: Final = 0x04

_NOTHING, _UNKNOWN = -1, -2
_CLEAR, _BID, _ASK = ord("R"), ord("B"), ord("A")
_KINDS: Final = {b"A": CREATED, b"M": CHANGED, b"C": REDUCED, b"R": CLEARED}
_NO_CHANGE: Final = {b"T": "trades", b"F": "fills", b"N": "records without an action"}
_MAX_EVENT: Final = 1_000_000
_TOP_OF_BIDS, _TOP_OF_ASKS = np.uint64(2**64 - 1), np.uint64(2**64 - 2)  # ids of no order


class OrderFlow:
    """Turns the records of one book into events of its orders, a block at a time."""

    def __init__(self, path: Path, clock: Clock, counts: Counts) -> None:
        self._path = path
        self._clock = clock
        self._counts = counts
        self._pending = np.empty(0, MBO)
        self._is_unknown = False
        self._kinds = np.full(256, _UNKNOWN)
        for action, kind in {**_KINDS, **dict.fromkeys(_NO_CHANGE, _NOTHING)}.items():
            self._kinds[action[0]] = kind

    def add(self, records: Records) -> OrderEvents:
        """The events that are whole with these records.

        Raises:
            TapeError: an event doesn't end within a million records.
        """
        if len(self._pending):
            records = np.concatenate([self._pending, records])
        are_live = records["flags"] & F_SNAPSHOT == 0
        are_ends = (records["flags"] & F_LAST > 0) | (_letters(records, "action") == _CLEAR)
        are_ends &= are_live
        ends = np.flatnonzero(are_ends)
        num_whole = int(ends[-1]) + 1 if len(ends) else 0
        self._pending = records[num_whole:]
        if np.count_nonzero(are_live[num_whole:]) > _MAX_EVENT:
            raise TapeError(
                self._path,
                expected="events that end with a record flagged F_LAST",
                found=f"{_MAX_EVENT:,} records without one",
                fix="Give a file with the flags that Databento writes",
            )
        return self._events(records[:num_whole], are_ends[:num_whole])

    def finish(self) -> None:
        """Nothing follows: an event that hasn't ended never will."""
        self._counts.count("records of an event without its end, left out", len(self._pending))

    def _events(self, records: Records, are_ends: BoolArray) -> OrderEvents:
        end_times_ns = records[self._clock][are_ends].astype(np.int64)
        events: Int64Array = np.cumsum(are_ends) - are_ends  # which one a record is part of
        kinds = self._kinds[_letters(records, "action")]
        in_snapshot = records["flags"] & F_SNAPSHOT > 0
        if in_snapshot.any():
            num = int(np.count_nonzero(in_snapshot))
            self._counts.count("records of a snapshot, part of the event after it", num)
            rows, kinds = _with_clears(in_snapshot, kinds)
            records, events = records[rows], events[rows]
        kinds, kept = self._known(records["flags"], kinds)
        kept &= self._can_be_followed(records, kinds)
        if not kept.all():
            records, events, kinds = records[kept], events[kept], kinds[kept]
        are_bids = _letters(records, "side") == _BID
        are_tops = (records["flags"] & F_TOB > 0) & (kinds == CREATED)
        tops = np.where(are_bids, _TOP_OF_BIDS, _TOP_OF_ASKS)
        sizes = records["size"].astype(np.int64)
        return OrderEvents(
            end_times_ns[events],
            np.where(are_tops, tops, records["order_id"]),
            np.where(are_tops, CHANGED, kinds),
            are_bids,
            records["price"].astype(np.int64),
            np.stack([sizes, np.zeros_like(sizes)], axis=1),
            records["price"] != UNDEFINED_PRICE,
            np.append(np.diff(events) > 0, True)[: len(events)],
        )

    def _known(self, flags: UInt8Array, kinds: Int64Array) -> tuple[Int64Array, BoolArray]:
        """The kinds, with a clear where a book becomes unknown, and which records are of a book."""
        are_doubtful = (flags & F_MAYBE_BAD_BOOK > 0) & (kinds != CLEARED)
        if not self._is_unknown and not are_doubtful.any():
            return kinds, np.ones(len(kinds), bool)
        turns = np.where(kinds == CLEARED, 0, np.where(are_doubtful, 1, -1))
        last_turn = np.maximum.accumulate(np.where(turns >= 0, np.arange(len(turns)), -1))
        unknown = np.where(last_turn >= 0, turns[last_turn] == 1, self._is_unknown)
        before = np.concatenate([[self._is_unknown], unknown])[: len(unknown)]
        if len(unknown):
            self._is_unknown = bool(unknown[-1])
        lost = unknown & ~before
        self._counts.count("gaps in the channel, after which the book is unknown", int(lost.sum()))
        self._counts.count("records of an unknown book, left out", int(unknown.sum()))
        return np.where(lost, CLEARED, kinds), ~unknown | lost

    def _can_be_followed(self, records: Records, kinds: Int64Array) -> BoolArray:
        """Which records do something to an order; what the others are is counted."""
        found = np.bincount(_letters(records, "action"), minlength=256).tolist()
        for action, words in _NO_CHANGE.items():
            self._counts.count(f"{words}, which don't change the book", found[ord(action)])
        sides = _letters(records, "side")
        has_side = (sides == _BID) | (sides == _ASK)
        needs_side = (kinds == CREATED) | (kinds == CHANGED)
        has_size = (records["size"] != UNDEFINED_SIZE) | (kinds == CLEARED)
        is_odd = (kinds == _UNKNOWN) | (needs_side & ~has_side) | ~has_size
        number = int(np.count_nonzero(is_odd & (kinds != _NOTHING)))
        self._counts.count("records of unknown action, side or size, left out", number)
        followed: BoolArray = ~is_odd & (kinds != _NOTHING)
        return followed


def _with_clears(in_snapshot: BoolArray, kinds: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Rows and their kinds, with a clear before each snapshot that doesn't begin with one."""
    begins = in_snapshot & ~np.append(False, in_snapshot)[:-1] & (kinds != CLEARED)
    at = np.flatnonzero(begins)
    return np.insert(np.arange(len(kinds)), at, at), np.insert(kinds, at, CLEARED)


def _letters(records: Records, field: str) -> UInt8Array:
    """A field of one letter as its code: ten times faster to compare than bytes."""
    return records[field].view(np.uint8)
