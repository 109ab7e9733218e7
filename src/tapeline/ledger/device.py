"""Time of the device beside time of the host, each moment counted once.

A host that waits for data while the device still works doesn't starve it. `Overlap` finds how
much of the waits that was; the device's times come from a `DeviceTimer`; that of a CUDA
stream is `tapeline.training.timer`, since torch has no place here. Nothing waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol


class DeviceTimer(Protocol):
    """When the device worked."""

    def step_begins(self) -> None:
        """Put an event before a step's work."""
        ...

    def step_ends(self) -> None:
        """Put an event after it."""
        ...

    def finished(self) -> Iterable[tuple[int, int]]:
        """Begin and end of the work that was seen to be done since the last call.

        In order, in nanoseconds of the host's monotonic clock, without waiting for any.
        """
        ...


class Overlap:
    """Host waits against device work, both in order of time.

    Attributes:
        busy_ns: time that the device worked.
        overlap_ns: time that the host waited for data and the device worked.
    """

    def __init__(self) -> None:
        self.busy_ns = 0
        self.overlap_ns = 0
        self._waits: deque[tuple[int, int]] = deque()
        self._worked_until_ns = 0

    def waited(self, begin_ns: int, end_ns: int) -> None:
        """The host waited for data."""
        self._waits.append((begin_ns, end_ns))

    def worked(self, begin_ns: int, end_ns: int) -> None:
        """The device worked; what an earlier call covered isn't counted again."""
        begin_ns = max(begin_ns, self._worked_until_ns)
        if end_ns <= begin_ns:
            return
        self._worked_until_ns = end_ns
        self.busy_ns += end_ns - begin_ns
        while self._waits and self._waits[0][0] < end_ns:
            wait_begin_ns, wait_end_ns = self._waits[0]
            self.overlap_ns += max(0, min(wait_end_ns, end_ns) - max(wait_begin_ns, begin_ns))
            if wait_end_ns > end_ns:
                break
            self._waits.popleft()
