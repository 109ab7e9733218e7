"""The two clocks.

Monotonic time measures within one attempt; wall time relates attempts to each other and is
never subtracted inside one. Everything is an integer number of nanoseconds.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary point; never goes back."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC; may be set back or forward at any time."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary point; never goes back."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""
        return time.time_ns()


class FakeClock:
    """A clock that moves only when told to, for tests."""

    def __init__(self, monotonic_ns: int = 0, wall_ns: int = 0) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds advanced so far."""
        return self._monotonic_ns

    def wall_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC, as advanced and set."""
        return self._wall_ns

    def advance(self, nanoseconds: int) -> None:
        """Let time pass on both clocks."""
        assert nanoseconds >= 0, "monotonic time doesn't go back"
        self._monotonic_ns += nanoseconds
        self._wall_ns += nanoseconds

    def set_wall(self, wall_ns: int) -> None:
        """Set the wall clock alone, as an administrator or NTP would."""
        self._wall_ns = wall_ns


def utc(nanoseconds: int) -> str:
    """Nanoseconds since 1970 as ISO 8601 UTC with all nine digits."""
    seconds, fraction = divmod(nanoseconds, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"
