"""The windows at positions of an order, drawn and gathered by the kernel.

Covers what is the same from batch to batch, so that it isn't made for each. Does not know what a
batch is, or whose part of it is wanted: positions count on through all epochs.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from tapeline.session import Float32Array
from tapeline.windows.batch import BatchSource
from tapeline.windows.index import WindowIndex
from tapeline.windows.order import Draw, Order


class Drawn:
    """Gathers windows by their positions; for one thread, which best asks for them in order.

    Args:
        source: gathers.
        index: the windows.
        order: of the windows.
    """

    def __init__(self, source: BatchSource, index: WindowIndex, order: Order) -> None:
        self._source, self._order = source, order
        self._blocks, self._num = source.blocks(index), index.num_windows
        self._begin = self._end = 0  # the positions that `_draw` is of
        self._draw: Draw | None = None

    def __call__(self, start: int, stop: int, x: npt.NDArray[Any], y: Float32Array) -> None:
        """Gather the windows at positions `start` to `stop` into the front of `x` and `y`."""
        done = start
        while done < stop:
            begin, first, *rest = self._around(done)
            until = min(stop, self._end)
            draw = Draw(until - done, first + done - begin, *rest)
            part = slice(done - start, until - start)
            self._source.draw(draw, self._blocks, x[part], y[part])
            done = until

    def _around(self, position: int) -> tuple[Any, ...]:
        """Where the draw that holds a position begins, and all of the draw but its length."""
        if self._draw is None or not self._begin <= position < self._end:
            epoch, within = divmod(position, self._num)
            self._draw = next(self._order.draws(self._num, epoch, within, self._num))
            self._begin, self._end = position, position + self._draw.positions
        return self._begin, *self._draw[1:]
