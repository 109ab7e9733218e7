"""What the saves of a run cost, counted by the loop and by the writing thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What the saves of one `Checkpointer` came to.

    Attributes:
        saves: checkpoints committed.
        background_saves: how many of them were written in the background.
        waits: saves that found one in flight and waited for it.
        skips: saves that found one in flight and were left out.
        blocked_s: time the caller spent in `save`, `wait` and `close`.
        background_s: time the writing thread spent.
        bytes_written: size of the data files committed.
    """

    saves: int = 0
    background_saves: int = 0
    waits: int = 0
    skips: int = 0
    blocked_s: float = 0.0
    background_s: float = 0.0
    bytes_written: int = 0


class Counters:
    """`SaveStats` that two threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = SaveStats()

    def add(self, **amounts: float) -> None:
        """Add to the fields of these names."""
        with self._lock:
            sums = {name: getattr(self._stats, name) + more for name, more in amounts.items()}
            self._stats = replace(self._stats, **sums)

    def stats(self) -> SaveStats:
        """The sums so far."""
        return self._stats
