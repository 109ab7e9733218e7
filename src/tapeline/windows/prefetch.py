"""Reading ahead: one thread fills a ring of slots while the consumer works on others.

Covers hand-over, errors, liveness and shutdown. Does not know what a slot holds. A thread and
not a process: a hand-off costs 0.02 to 0.07 ms, a worker process 1.5 to 4.3 ms.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Slot = TypeVar("Slot")
HELD = 2  # slots the consumer has: the last, and the one before it
_CHECK_S = 1.0  # how long to wait for a slot before asking whether the thread still lives


class Prefetcher(Generic[Slot]):
    """Yields slots filled in order by `fill(number, slot)` in a background thread.

    A slot belongs to the consumer until the second next one is asked for: Lightning and
    Accelerate ask for one batch more before they use the one they have. An exception in `fill`
    is raised in the consumer at the place of the slot it belongs to.

    Args:
        fill: fills the slot for the batch of that number, counted from 0.
        slots: the ring; `HELD` are with the consumer, the others are filled ahead.
        count: how many batches there are; None for no end.
    """

    def __init__(
        self, fill: Callable[[int, Slot], None], slots: list[Slot], count: int | None = None
    ) -> None:
        assert len(slots) > HELD, "what the consumer has can't be filled meanwhile"
        self._fill = fill
        self._count = count
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Slot | BaseException] = queue.SimpleQueue()
        self._stop = False
        for slot in slots:
            self._free.put(slot)
        self._thread = threading.Thread(target=self._work, name="tapeline-prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for number in _numbers(self._count):
            slot = self._free.get()
            if slot is None or self._stop:
                return
            try:
                self._fill(number, slot)
            except BaseException as error:
                self._ready.put(error)
                return
            self._ready.put(slot)

    def __iter__(self) -> Iterator[Slot]:
        """Yield slots until the last, or until closed; one consumer only."""
        held: deque[Slot] = deque()
        for _ in _numbers(self._count):
            if len(held) == HELD:
                self._free.put(held.popleft())
            if self._stop:
                return
            held.append(self._wait())
            yield held[-1]

    def _wait(self) -> Slot:
        while True:
            # Asked before waiting: what a thread puts down just before it ends is found first.
            alive = self._thread.is_alive()
            try:
                slot = self._ready.get(timeout=_CHECK_S)
            except queue.Empty:
                if not alive:
                    raise RuntimeError(
                        "the prefetch thread ended without a word; set prefetch depth 0 to see why"
                    ) from None
                continue
            if isinstance(slot, BaseException):
                self._stop = True
                # Wrapped, since a StopIteration raised in a generator would look like its end.
                if isinstance(slot, StopIteration):
                    raise RuntimeError("StopIteration while filling a batch") from slot
                raise slot
            return slot

    def close(self) -> None:
        """Stop the thread and wait for it; may be called again."""
        self._stop = True
        self._free.put(None)
        self._thread.join()


def in_turn(
    fill: Callable[[int, Slot], None], slots: list[Slot], count: int | None = None
) -> Iterator[Slot]:
    """The same slots without a thread: each is filled when it is asked for."""
    for number in _numbers(count):
        slot = slots[number % len(slots)]
        fill(number, slot)
        yield slot


def _numbers(count: int | None) -> Iterator[int]:
    return itertools.count() if count is None else iter(range(count))
