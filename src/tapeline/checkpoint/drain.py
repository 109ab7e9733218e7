"""Copies to the durable tier behind the training loop.

Covers: a queue and the one thread that works through it. Does not cover what a copy is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from tapeline.checkpoint.durable import DurableTier
from tapeline.clock import Clock, SystemClock


class Drain:
    """Copies in a thread, one after the other, in the order of `submit`; the loop never waits.

    After each copy those that the tier's rule doesn't keep are deleted, and what copies that were
    cut short have left. A copy that fails is not tried again by itself: the next checkpoint comes
    soon. The thread ends with the process, `close` aside: what is half copied then has no marker.

    Args:
        tier: where to.
        on_copied: called in the thread after each copy, with its folder and the seconds it took.
        clock: to measure copies by.
    """

    def __init__(
        self,
        tier: DurableTier,
        on_copied: Callable[[Path, float], None],
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._tier = tier
        self._on_copied = on_copied
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: list[Path] = []
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="durable copies", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> tuple[Path, ...]:
        """Folders not yet copied, the one in progress included: retention must leave them."""
        with self._lock:
            return tuple(self._pending)

    def submit(self, folder: Path) -> None:
        """Have a committed checkpoint copied; returns at once."""
        with self._lock:
            self._pending.append(folder)
        self._queue.put(folder)

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not raised yet; asked at step boundaries."""
        with self._lock:
            failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for what was submitted; raise the oldest failure that was not raised yet."""
        self._queue.put(None)
        self._thread.join()
        self.raise_failure()

    def _run(self) -> None:
        while (folder := self._queue.get()) is not None:
            try:
                began_ns = self._clock.monotonic_ns()
                self._tier.copy(folder)
                self._on_copied(folder, (self._clock.monotonic_ns() - began_ns) / 1e9)
                self._tier.retire()
                self._tier.sweep(folder.parent)
            except BaseException as error:
                with self._lock:
                    self._failures.append(error)
            finally:
                with self._lock:
                    self._pending.remove(folder)
