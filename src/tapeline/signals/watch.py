"""Watching a run while it goes on: all watchers, over a bounded window, each finding told once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tapeline.clock import Clock, SystemClock
from tapeline.errors import ConfigError
from tapeline.signals import drift, learning
from tapeline.signals.snapshot import Action, Finding, Series, Snapshot

Schedule = Callable[[int], float]
Watcher = Callable[[Snapshot, int], Iterator[Finding]]

WATCHERS: Mapping[str, Watcher] = {
    "non_finite": learning.non_finite,
    "resume_spike": learning.resume_spike,
    "loss_spike": learning.loss_spike,
    "gradient_spike": learning.gradient_spike,
    "gradient_collapse": learning.gradient_collapse,
    "flat": learning.flat,
    "throughput": drift.throughput,
    "memory_growth": drift.memory_growth,
    "utilisation_sawtooth": drift.utilisation_sawtooth,
}
_OFF_SCHEDULE = "off_schedule"  # needs a schedule, hence not one of the others
_WINDOW = 512  # values of each metric: more than any watcher looks back
_QUIET_STEPS = 50  # the same thing seen again within so many steps was told already


def examine(
    snapshot: Snapshot,
    *,
    since: int = 0,
    schedule: Schedule | None = None,
    actions: Mapping[str, Action] | None = None,
) -> list[Finding]:
    """What all watchers see in a snapshot, by step.

    Args:
        snapshot: the metrics, of a whole run or of its last steps.
        since: only what later steps show is told.
        schedule: the planned learning rate of a step counted from 1; without it that watcher
            doesn't run.
        actions: by watcher; `Action.LOG` for those left out.

    Raises:
        ConfigError: an action for a watcher that there is not.
    """
    chosen = _checked(actions or {})
    found = [finding for watcher in WATCHERS.values() for finding in watcher(snapshot, since)]
    if schedule is not None:
        found += learning.off_schedule(snapshot, since, schedule)
    told = [_with_action(finding, chosen) for finding in found]
    return sorted(told, key=lambda finding: finding.step)


class Watch:
    """Watches one life of a run, at each logging interval.

    It keeps a bounded window of each metric, so that a look costs the same however long the run
    is. A look takes about as long as a step of a small model, so there is at most one in
    `every_s`; values that aren't finite are found at once. What lasts is told once, and again
    only after it was away.

    Args:
        history: the metrics of earlier lives, for the baselines across a resume.
        from_step: the steps done when this life began.
        schedule: as in `examine`.
        actions: as in `examine`.
        every_s: seconds between two looks.

    Raises:
        ConfigError: an action for a watcher that there is not.
    """

    def __init__(
        self,
        history: Snapshot | None = None,
        *,
        from_step: int = 0,
        schedule: Schedule | None = None,
        actions: Mapping[str, Action] | None = None,
        every_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self._schedule = schedule
        self._actions = dict(_checked(actions or {}))
        self._every_ns = round(1e9 * every_s)
        self._clock = clock or SystemClock()
        self._looked_ns = self._clock.monotonic_ns()
        self._taken = self._judged = from_step
        self._told: dict[str, int] = {}
        self._windows: dict[str, _Window] = {}
        self._resumes: tuple[int, ...] = ()
        history = history or Snapshot()
        for name, series in history.series.items():
            part = series[series.steps <= from_step]
            self._window(name).extend(part.steps[-_WINDOW:], part.values[-_WINDOW:])
        if from_step:
            self._resumes = (from_step,)

    def observe(self, step: int, metrics: Mapping[str, float | Sequence[float]]) -> list[Finding]:
        """Take in what was measured up to `step`; returns what is new in it.

        Args:
            step: the last step measured, counted from 1. One that isn't above the last says that
                the run went back: what was measured from its first step on is forgotten.
            metrics: by the names in `snapshot`; a sequence holds the values of the steps up to
                and including `step`, a number is `step`'s.
        """
        rows = {name: np.atleast_1d(np.asarray(v, np.float64)) for name, v in metrics.items()}
        longest = max((len(row) for row in rows.values()), default=0)
        if step - longest < self._taken:
            self._went_back(step - longest)
        for name, row in rows.items():
            self._window(name).extend(np.arange(step - len(row) + 1, step + 1), row)
        self._taken = step
        if self._clock.monotonic_ns() - self._looked_ns >= self._every_ns:
            return self.look()
        if all(np.isfinite(row).all() for row in rows.values()):
            return []
        found = learning.non_finite(self._snapshot(), self._judged)
        return self._new(_with_action(finding, self._actions) for finding in found)

    def look(self) -> list[Finding]:
        """What is new since the last look; for the end of a life, and before a checkpoint."""
        found = examine(
            self._snapshot(), since=self._judged, schedule=self._schedule, actions=self._actions
        )
        self._judged, self._looked_ns = self._taken, self._clock.monotonic_ns()
        return self._new(found)

    def _snapshot(self) -> Snapshot:
        series = {name: window.series() for name, window in self._windows.items()}
        return Snapshot(series, self._resumes)

    def _went_back(self, step: int) -> None:
        self._judged = min(self._judged, step)
        self._resumes = (*(r for r in self._resumes if r < step), step)[-2:]
        self._told = {name: told for name, told in self._told.items() if told <= step}
        for window in self._windows.values():
            window.cut(step)

    def _new(self, found: Iterable[Finding]) -> list[Finding]:
        return [finding for finding in found if self._is_new(finding)]

    def _is_new(self, finding: Finding) -> bool:
        told = self._told.get(finding.watcher)
        self._told[finding.watcher] = max(told or 0, finding.last_step)
        return told is None or finding.step > told + _QUIET_STEPS

    def _window(self, name: str) -> _Window:
        return self._windows.setdefault(name, _Window())


class _Window:
    """The last values of one metric, in arrays that are moved only once every `_WINDOW` values."""

    def __init__(self) -> None:
        self._steps = np.empty(2 * _WINDOW, np.int64)
        self._values = np.empty(2 * _WINDOW, np.float64)
        self._start = self._end = 0

    def extend(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Append; of more than a window, the last ones."""
        steps, values = steps[-_WINDOW:], values[-_WINDOW:]
        if self._end + len(steps) > 2 * _WINDOW:
            keep = slice(max(self._start, self._end - _WINDOW + len(steps)), self._end)
            num_kept = keep.stop - keep.start
            for array in (self._steps, self._values):
                array[:num_kept] = array[keep].copy()
            self._start, self._end = 0, num_kept
        new = slice(self._end, self._end + len(steps))
        self._steps[new], self._values[new] = steps, values
        self._end = new.stop
        self._start = max(self._start, self._end - _WINDOW)

    def cut(self, step: int) -> None:
        """Forget what is after `step`."""
        kept = np.searchsorted(self._steps[self._start : self._end], step, side="right")
        self._end = self._start + int(kept)

    def series(self) -> Series:
        """A view of the values, good until the next `extend`."""
        part = slice(self._start, self._end)
        steps = self._steps[part]
        return Series(steps, self._values[part], np.zeros(len(steps), np.int64))


def _checked(actions: Mapping[str, Action]) -> Mapping[str, Action]:
    known = [*WATCHERS, _OFF_SCHEDULE]
    for name in actions:
        if name not in known:
            raise ConfigError(
                "watcher", expected=f"one of {', '.join(known)}", found=repr(name), fix="Name one"
            )
    return actions


def _with_action(finding: Finding, actions: Mapping[str, Action]) -> Finding:
    return replace(finding, action=actions.get(finding.watcher, Action.LOG))
