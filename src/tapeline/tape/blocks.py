"""What readers yield: a piece of a tape, in one of four shapes.

Covers the shapes alone. Where a block may be cut, what time does in it, and what becomes of it are
`replay`'s and `states`'.

Common to all: `times_ns` is int64 `[n]`, nanoseconds UTC, in the order of the file (a step back is
settled later, and counted). Prices are integers in billionths (`book.UNITS` to one). A block may
be empty, and a file may be cut into blocks anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tapeline.session import BoolArray, Int64Array

Float64Array = npt.NDArray[np.float64]
Level = tuple[bool, bool, int, int]  # one event of `LevelEvents`: clear, bid, price, size

CREATED: Final = 0
CHANGED: Final = 1
DELETED: Final = 2
REDUCED: Final = 3  # by the size given; one reduced to nothing is gone
CLEARED: Final = 4  # the whole book is unknown until orders follow


@dataclass(frozen=True, slots=True)
class BookStates:
    """The whole book after each update.

    Attributes:
        times_ns: int64 `[n]`.
        prices: int64 `[n, levels, 2]`, bid then ask, the best level first; of any value where the
            size is zero.
        sizes: float64 `[n, levels, 2]` in units, zero where there is no level. A sentinel never
            gets here: map it to a size of zero.
    """

    times_ns: Int64Array
    prices: Int64Array
    sizes: Float64Array

    def __post_init__(self) -> None:
        assert self.prices.shape == self.sizes.shape, "a price and a size for each level"
        assert self.prices.shape[::2] == (len(self.times_ns), 2), "[n, levels, 2]"

    def __len__(self) -> int:
        return len(self.times_ns)

    def take(self, rows: Int64Array | slice) -> Self:
        """The block of these rows."""
        return replace(
            self,
            times_ns=self.times_ns[rows],
            prices=self.prices[rows],
            sizes=self.sizes[rows],
        )

    def after(self, earlier: Self) -> Self:
        """Both blocks as one."""
        return replace(
            self,
            times_ns=np.concatenate([earlier.times_ns, self.times_ns]),
            prices=np.concatenate([earlier.prices, self.prices]),
            sizes=np.concatenate([earlier.sizes, self.sizes]),
        )


@dataclass(frozen=True, slots=True)
class TableRows:
    """Named columns of numbers, each row known from its time on.

    Attributes:
        times_ns: int64 `[n]`: when the row is known. A bar is known at its end.
        values: float64 `[n, columns]`; NaN where a cell is missing.
        columns: a name for each column, the same in every block.
        are_prices: for each column, whether the session's origin is taken off it.
        bar_ns: how long before it is known what a row tells of begins; zero for instants. A bar
            belongs to the session that it opens in.
    """

    times_ns: Int64Array
    values: Float64Array
    columns: tuple[str, ...]
    are_prices: tuple[bool, ...]
    bar_ns: int = 0

    def __post_init__(self) -> None:
        assert self.values.shape == (len(self.times_ns), len(self.columns)), "[n, columns]"
        assert len(self.columns) == len(self.are_prices), "one flag for each column"

    def __len__(self) -> int:
        return len(self.times_ns)

    def take(self, rows: Int64Array | slice) -> Self:
        """The block of these rows."""
        return replace(self, times_ns=self.times_ns[rows], values=self.values[rows])

    def after(self, earlier: Self) -> Self:
        """Both blocks as one."""
        return replace(
            self,
            times_ns=np.concatenate([earlier.times_ns, self.times_ns]),
            values=np.concatenate([earlier.values, self.values]),
        )


class OrderEvents(NamedTuple):
    """What happens to single orders.

    Each event leaves a book that was really there, unless `are_last` says which ones do: the events
    up to one that is last are one update, and have one time.

    Attributes:
        times_ns: int64 `[n]`.
        ids: `[n]`, uint64 or bytes of a multiple of eight; compared and never computed with.
        actions: int64 `[n]`: `CREATED`, `CHANGED`, `DELETED`, `REDUCED` or `CLEARED`.
        are_bids: bool `[n]`, the order's side; read for `CREATED` and `CHANGED`.
        prices: int64 `[n]`, in billionths; read for `CREATED` and `CHANGED`.
        sizes: int64 `[n, 2]`, whole units and the billionths beyond them: what remains of the
            order, or for `REDUCED` what is taken off it.
        have_price: bool `[n]`, False where the price stands for none: such an order rests at no
            level.
        are_last: bool `[n]`, whether an update is whole after the event; None if each is one of
            its own.
    """

    times_ns: Int64Array
    ids: npt.NDArray[Any]
    actions: Int64Array
    are_bids: BoolArray
    prices: Int64Array
    sizes: Int64Array
    have_price: BoolArray
    are_last: BoolArray | None = None

    def take(self, rows: slice) -> OrderEvents:
        """The block of these events."""
        return OrderEvents._make(None if column is None else column[rows] for column in self)


class LevelEvents(NamedTuple):
    """What happens to single price levels. Events of one time are one update of the book.

    Attributes:
        times_ns: int64 `[n]`.
        are_clears: whether the book is unknown from here until levels follow, as at the start of
            a snapshot, or after a gap in the sequence numbers. The rest of the event isn't read.
        are_bids: the side.
        prices: in billionths.
        sizes: in billionths: the new total at this price, zero if the level is gone.
    """

    times_ns: Int64Array
    are_clears: list[bool]
    are_bids: list[bool]
    prices: list[int]
    sizes: list[int]

    @classmethod
    def of(cls, times_ns: list[int], levels: list[Level]) -> LevelEvents:
        """From a time and a tuple for each event."""
        columns = zip(*levels, strict=True) if levels else ((),) * 4
        return cls(np.array(times_ns, np.int64), *map(list, columns))

    def take(self, rows: slice) -> LevelEvents:
        """The block of these events."""
        return LevelEvents._make(column[rows] for column in self)


Block = BookStates | TableRows | OrderEvents | LevelEvents
