"""What trackers share: what they are, what of a run they still lack, and following it to its end.

A tracker holds each step once. Where a later life of the run did steps again that were sent, files
get the later values in their place; a server keeps what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tapeline.clock import Clock
from tapeline.errors import ExportError
from tapeline.runs import RunFolder
from tapeline.runs.live import LiveRun, LiveView
from tapeline.runs.view import RunView, view_of
from tapeline.signals import Series

Progress = Callable[[int, int], None]
_SHARE = 0.1  # of the time, at most, goes into reading and sending a run that is followed


class Tracker(Protocol):
    """Takes a run."""

    where: str

    def send(self, view: RunView, state: str, progress: Progress) -> int:
        """Send what it lacks.

        Args:
            view: the run now.
            state: what it does, as `LiveRun.state` has it.
            progress: called with the values sent so far and all there are to send.

        Returns:
            How many values were sent.

        Raises:
            ExportError: they can't be.
        """
        ...

    def close(self) -> None:
        """Nothing more is to come."""
        ...


@dataclass(slots=True)
class Sent:
    """How far each metric was sent: its last step, and the life that did it."""

    last: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take_back(self, view: RunView) -> int | None:
        """The first step that a later life did again after it was sent; None if there is none.

        From that step on, everything counts as unsent.
        """
        again = [
            int(series.steps[redone].min())
            for name, (step, attempt) in self.last.items()
            if (series := view.metrics.get(name))
            and (redone := (series.attempts > attempt) & (series.steps <= step)).any()
        ]
        if not again:
            return None
        first = min(again)
        self.last = {
            name: (min(step, first - 1), attempt) for name, (step, attempt) in self.last.items()
        }
        return first

    def news(self, view: RunView) -> dict[str, Series]:
        """What lies beyond; from now on it counts as sent."""
        found = {}
        for name, series in view.metrics.items():
            new = series[series.steps > self.last.get(name, (0, 0))[0]]
            if len(new):
                found[name] = new
                self.last[name] = int(new.steps[-1]), int(new.attempts[-1])
        return found


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of an export.

    Attributes:
        seen: the run, before it was read for the last time.
        num_values: of metrics, that were sent.
    """

    seen: LiveRun
    num_values: int


def send(
    run: Path,
    tracker: Tracker,
    clock: Clock,
    *,
    follow_every_s: float | None,
    progress: Progress,
    say: Callable[[str], None],
) -> Exported:
    """Send a run to a tracker, once or until it has ended or Ctrl-C.

    A failure later than the first is told, and made up for at the next look.

    Args:
        clock: for the ages of heartbeats.
        follow_every_s: between two looks; longer where a look takes long. None looks once.
        progress: of the values of each look.
        say: takes a sentence about a failure.

    Raises:
        ExportError: the first look, or the last, can't be sent.
        RunError: the folder isn't a run's.
    """
    live, folder, total = LiveView(run, clock), RunFolder(run, clock), 0
    told = False
    try:
        while True:
            began = time.monotonic()
            seen = live.look()  # first, so that what is read after the end is everything
            last = follow_every_s is None or seen.ended
            try:
                total += tracker.send(view_of(folder), seen.state, progress)
                told = True
            except ExportError as error:
                if last or not told:
                    raise
                say(f"{error} It is tried again.")
            if last or follow_every_s is None:
                return Exported(seen, total)
            time.sleep(max(follow_every_s, (time.monotonic() - began) / _SHARE))
    except KeyboardInterrupt:
        return Exported(seen, total)
    finally:
        tracker.close()
