"""The loader: batches in a sampler's order, gathered ahead of the training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from tapeline.errors import WindowError
from tapeline.session import Float32Array
from tapeline.windows.batch import BatchSource
from tapeline.windows.index import whole
from tapeline.windows.prefetch import Prefetcher
from tapeline.windows.sampler import WindowSampler

Batch = tuple[Float32Array, Float32Array]


class Loader:
    """Iterates batches x `[batch, T · columns]` and y `[batch]` without end.

    A batch's memory is written again after the next one is asked for: copy what must stay.
    The sampler counts delivered batches only, so its state is right whatever was read ahead.

    Args:
        source: gathers the batches.
        sampler: decides which; its position advances as batches are delivered.
        depth: batches gathered ahead in a background thread; 0 gathers when asked, same bits.

    Raises:
        WindowError: `depth` is negative, or the sampler's windows aren't the source's; while
            iterating: the sampler was moved by someone else.
    """

    def __init__(self, source: BatchSource, sampler: WindowSampler, depth: int = 2) -> None:
        source.check(sampler.index)
        self.source = source
        self.sampler = sampler
        self.depth = whole("prefetch depth", depth, 0)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the sampler's position on; the thread ends with the iterator."""
        start, step = self.sampler.position, self.sampler.batch

        def fill(number: int, slot: Batch) -> None:
            sessions, starts = self.sampler.batch_at(start + number * step)
            self.source.batch(sessions, starts, out=slot)

        slots = [self.source.empty(step) for _ in range(self.depth + 1)]
        if self.depth == 0:
            yield from self._deliver(_synchronous(fill, slots[0]), start)
            return
        prefetcher = Prefetcher(fill, slots)
        try:
            yield from self._deliver(iter(prefetcher), start)
        finally:
            prefetcher.close()

    def _deliver(self, batches: Iterator[Batch], position: int) -> Iterator[Batch]:
        seed = self.sampler.seed
        for batch in batches:
            if (self.sampler.position, self.sampler.seed) != (position, seed):
                raise WindowError(
                    "loader",
                    expected=f"its sampler at position {position:,} of seed {seed}",
                    found=f"position {self.sampler.position:,} of seed {self.sampler.seed}",
                    fix="Set the sampler's state before iterating, and give each loader its own",
                )
            position = self.sampler.advance()
            yield batch


def _synchronous(fill: Callable[[int, Batch], None], slot: Batch) -> Iterator[Batch]:
    for number in itertools.count():
        fill(number, slot)
        yield slot
