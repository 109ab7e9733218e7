"""Which positions a batch holds: global batches, their ranks' slices, and an epoch's end.

A position counts windows from the start of epoch 0, and is all the state there is. Pure
functions of it; no knowledge of windows or orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tapeline.errors import WindowError
from tapeline.windows.index import whole
from tapeline.world import World

Tail = Literal["seamless", "drop", "short", "pad"]

MAX_VALUES: Final = 2**31 - 1  # of a batch: what its pieces are counted with on a device


def checked_batch(batch: int, values: int = 1) -> int:
    """`batch` as an int, if so many windows of `values` numbers each are a batch.

    Raises:
        WindowError: it isn't a whole number of 1 or more, or they are more than `MAX_VALUES`.
    """
    most = max(1, MAX_VALUES // values)
    if whole("batch", batch) > most:
        raise WindowError(
            "batch",
            expected=f"at most {most:,} windows, {MAX_VALUES:,} values",
            found=f"{batch:,}",
            fix="Take a smaller batch",
        )
    return int(batch)


@dataclass(frozen=True, slots=True)
class Plan:
    """How positions are cut into batches.

    Attributes:
        num: windows in an epoch.
        batch: windows in a global batch.
        tail: what becomes of an epoch's end. "seamless": the batch goes on into the next epoch.
            "drop": what doesn't fill a batch is left out. "short": the last batch is shorter.
            "pad": it is filled up with zeros, and a mask says what is real.

    Raises:
        WindowError: `batch` below 1 or above `MAX_VALUES`, an unknown `tail`, or "drop" would
            drop everything.
    """

    num: int
    batch: int
    tail: Tail = "seamless"

    def __post_init__(self) -> None:
        checked_batch(self.batch)
        if self.tail not in get_args(Tail):
            raise WindowError(
                "tail",
                expected=f"one of {', '.join(get_args(Tail))}",
                found=repr(self.tail),
                fix="Take seamless to train on, short to evaluate",
            )
        if self.batches == 0:
            raise WindowError(
                "batch",
                expected=f"at most {self.num:,}, the windows of an epoch, with tail drop",
                found=f"{self.batch:,}",
                fix="Take a smaller batch, or another tail",
            )

    @property
    def batches(self) -> int:
        """Batches in an epoch; with tail "seamless" those that begin in the first."""
        return self.num // self.batch if self.tail == "drop" else -(-self.num // self.batch)

    def after(self, position: int) -> int:
        """The position behind the batch that begins at `position`."""
        if self.tail == "seamless":
            return position + self.batch
        epoch, within = divmod(position, self.num)
        rest = self.num - within - self.batch
        ended = rest < self.batch if self.tail == "drop" else rest <= 0
        return (epoch + 1) * self.num if ended else position + self.batch

    def start_of(self, number: int) -> int:
        """The position at which batch `number` begins, counted from the start of epoch 0."""
        if self.tail == "seamless":
            return number * self.batch
        epoch, within = divmod(number, self.batches)
        return epoch * self.num + within * self.batch

    def left(self, position: int) -> int:
        """Batches from `position` to its epoch's end."""
        within = position % self.num
        left = self.num - within
        return left // self.batch if self.tail == "drop" else -(-left // self.batch)

    def part(self, position: int, world: World) -> tuple[int, int]:
        """The positions [start, stop) of a rank's slice of the batch at `position`.

        With tail "short" or "pad" a slice of the last batch may be shorter, or empty.
        """
        start = position + self.batch * world.rank // world.size
        stop = position + self.batch * (world.rank + 1) // world.size
        if self.tail == "seamless":
            return start, stop
        end = (position // self.num + 1) * self.num
        return min(start, end), min(stop, end)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Positions cut at the epochs' ends: (epoch, start, stop) within each."""
        for epoch in range(start // self.num, -(-stop // self.num)):
            base = epoch * self.num
            yield epoch, max(start - base, 0), min(stop - base, self.num)
