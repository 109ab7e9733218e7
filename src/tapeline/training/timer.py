"""When a CUDA device worked on steps, by events that are put into its stream and never waited for.

Covers one stream, on which work is done in the order it was put. How long a step took and how long
the device rested before it are the device's own times. They are placed on the host's clock where
the stream is empty as a step begins, so the two clocks can't drift apart; a copy that was put into
the stream just before places that step too early by as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tapeline.clock import Clock

_MOST_IN_FLIGHT = 1024  # steps; further ones are not timed, so that memory stays bounded


class Event(Protocol):
    """What is used of a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the stream has passed it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another, both passed."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """Where a step lies in the stream.

    Attributes:
        told_ns: when the host put its begin there.
        follows: whether the stream was still at work on the step before.
        begin, end: its events.
    """

    told_ns: int
    follows: bool
    begin: Event
    end: Event


class StreamTimer:
    """The `DeviceTimer` of one stream.

    Args:
        put: puts an event into the stream.
        clock: the ledger's.
    """

    def __init__(self, put: Callable[[], Event], clock: Clock) -> None:
        self._put, self._clock = put, clock
        self._begun: tuple[int, bool, Event] | None = None
        self._in_flight: deque[_Step] = deque()
        self._last: tuple[int, Event] | None = None  # end of the last step that was read

    def step_begins(self) -> None:
        """Put an event before a step's work."""
        if len(self._in_flight) < _MOST_IN_FLIGHT:
            follows = bool(self._in_flight) and not self._in_flight[-1].end.query()
            self._begun = self._clock.monotonic_ns(), follows, self._put()

    def step_ends(self) -> None:
        """Put an event after it."""
        if self._begun:
            self._in_flight.append(_Step(*self._begun, self._put()))
            self._begun = None

    def finished(self) -> Iterator[tuple[int, int]]:
        """Begin and end of the steps that the stream has passed since the last call, in order.

        In nanoseconds of the clock; no end lies later than now.
        """
        while self._in_flight and self._in_flight[0].end.query():
            step = self._in_flight.popleft()
            begin_ns = step.told_ns
            if self._last:
                end_ns, end = self._last
                rested_ns = _elapsed_ns(end, step.begin) if step.follows else 0
                begin_ns = max(begin_ns, end_ns + rested_ns)
            end_ns = begin_ns + _elapsed_ns(step.begin, step.end)
            end_ns = min(end_ns, self._clock.monotonic_ns())
            self._last = end_ns, step.end
            yield begin_ns, end_ns


def timer_of(device: torch.device, clock: Clock) -> StreamTimer | None:
    """The timer of a device's current stream; None where the host itself does the work."""
    if device.type != "cuda":
        return None

    def put() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return StreamTimer(put, clock)


def _elapsed_ns(begin: Event, end: Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)
