"""The limit order book as arrays: what `kernel` changes and looks at, event by event.

Covers the layout and how it grows. Does not cover what events do (`kernel`), nor time.

Prices are integers in billionths (`UNITS` to one). A size is two integers, whole units and the
billionths beyond them: their sums are exact up to 2^63 units, and a level is empty when both are
zero.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tapeline.session import Int64Array

UNITS: Final = 1_000_000_000  # nine decimals: no tick has to be known before the first price

BID, ASK = 0, 1  # places of the sides in `Book`
SLOT = ("kind", "price", "whole", "billionths", "placed_ns", "born")
KIND, PRICE, WHOLE, BILLIONTHS, PLACED_NS, BORN = range(len(SLOT))
ID = len(SLOT)  # the first word of it
EMPTY, IS_BID, IS_ASK, EARLY_DELETE = range(4)  # kinds of a slot
_FIRST_LEVELS: Final = 256
_FIRST_SLOTS: Final = 1024


class Book(NamedTuple):
    """Two sides of price levels, each sorted so that its best level is the last.

    Attributes:
        keys: int64 `[2, capacity]`: the price of a bid, minus the price of an ask, rising.
        sizes: int64 `[2, capacity, 2]`: the total size at each.
        nums: int64 `[2]`: how many levels there are.
    """

    keys: Int64Array
    sizes: Int64Array
    nums: Int64Array

    @classmethod
    def empty(cls) -> Book:
        """A book without levels."""
        shape = (2, _FIRST_LEVELS)
        return cls(
            np.zeros(shape, np.int64), np.zeros((*shape, 2), np.int64), np.zeros(2, np.int64)
        )

    def grown(self) -> Book:
        """The same book with room for twice the levels."""
        return self._replace(
            keys=np.concatenate([self.keys, np.zeros_like(self.keys)], axis=1),
            sizes=np.concatenate([self.sizes, np.zeros_like(self.sizes)], axis=1),
        )


class Orders(NamedTuple):
    """Orders by id: a table with open addresses, each probe the next slot.

    Attributes:
        slots: int64 `[capacity, 6 + words]`: the fields of `SLOT`, then the id, together so that
            they come from memory at once; the capacity is a power of two. An order of size zero is
            known by its id but rests at no level. `born` counts ids in the order that they came.
        nums: int64 `[2]`: slots in use, and ids ever.
    """

    slots: Int64Array
    nums: Int64Array

    @classmethod
    def empty(cls, num_words: int, capacity: int = _FIRST_SLOTS) -> Orders:
        """A table without orders."""
        return cls(np.zeros((capacity, len(SLOT) + num_words), np.int64), np.zeros(2, np.int64))

    @property
    def num_words(self) -> int:
        """Words of an id."""
        return int(self.slots.shape[1]) - len(SLOT)

    def widened(self, num_words: int) -> Orders:
        """The same table for longer ids: the hash of one doesn't depend on zeros behind it."""
        more = num_words - self.num_words
        return self._replace(slots=np.pad(self.slots, ((0, 0), (0, more))))


def words_of(ids: npt.NDArray[Any]) -> Int64Array:
    """Ids, uint64 or bytes of a multiple of eight, as int64 `[n, words]`."""
    return np.ascontiguousarray(ids).view(np.int64).reshape(len(ids), -1)
