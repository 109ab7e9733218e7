"""Reading metrics journals: each step once, as the last life of the run did it.

A life that resumes at a step gives up whatever earlier ones did after it, done again or not.
What was given up is kept apart.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.files import read_journal
from tapeline.runs.metrics import with_nan
from tapeline.signals import Series, Snapshot

# In a record, in a snapshot, and the factor between the two.
_LISTS = {
    "losses": ("loss", 1.0),
    "grad_norms": ("grad_norm", 1.0),
    "step_ns": ("step_s", 1e-9),
    "collective_wait_ns": ("collective_wait_s", 1e-9),
}
_NUMBERS = ("learning_rate", "samples_per_s", "rss_bytes", "device_bytes", "utilisation", "batch_s")
_LEARNT = ("loss", "grad_norm", "learning_rate")
_OF_MACHINE = ("step_s", "collective_wait_s", *_NUMBERS[1:])


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a rank's journal holds.

    Attributes:
        snapshot: each metric with each step once, and the steps that lives began at.
        given_up: by metric, what a later life did again or would have to; in the order of
            writing, so that a step can stand there more than once.
        profile: the last one: `per_step`, `median_us`, `busy`.
        failures: for each attempt in which the journal couldn't be written, the last note about
            it: `failed_writes`, `lost_records`, `error`.
        thinned: what was left out to keep to the budget: `records`, `up_to_step`.
    """

    snapshot: Snapshot
    given_up: Mapping[str, Series]
    profile: dict[str, float] | None
    failures: Mapping[int, dict[str, Any]]
    thinned: dict[str, int] | None


def read_metrics(path: Path | str) -> Metrics:
    """Read the journal of one rank; a missing file is empty, a torn last line is left out.

    Raises:
        RunError: a whole line is not JSON.
    """
    lines = _Lines()
    profile, thinned = None, None
    failures: dict[int, dict[str, Any]] = {}
    for record in read_journal(Path(path)):
        if "thinned" in record:
            thinned = record["thinned"]
        elif "failed_writes" in record:
            failures[record["attempt"]] = record
        elif "profile" in record:
            profile = {name: float(value) for name, value in record["profile"].items()}
        elif "validation" in record:
            lines.add_validation(record)
        else:
            lines.add(record)
    return Metrics(lines.snapshot(), lines.given_up(), profile, failures, thinned)


class _Column:
    """One metric, as three columns; and what of it was given up, cut by cut."""

    def __init__(self) -> None:
        self.steps, self.values, self.attempts = array("q"), array("d"), array("q")
        self.cuts: list[Series] = []

    @property
    def last(self) -> int:
        """Its last step; 0 if it is empty."""
        return self.steps[-1] if self.steps else 0

    def add(self, step: int, value: str | float, attempt: int) -> None:
        """Append a value; "nan" and "inf" are numbers too."""
        self.steps.append(step)
        self.values.append(float(value))
        self.attempts.append(attempt)

    def cut(self, after: int) -> None:
        """Give up the steps after that one."""
        start = bisect_right(self.steps, after)
        if start == len(self.steps):
            return
        self.cuts.append(self.standing()[start:])
        del self.steps[start:], self.values[start:], self.attempts[start:]

    def standing(self) -> Series:
        """What stands."""
        return Series(
            np.array(self.steps, np.int64),
            np.array(self.values, np.float64),
            np.array(self.attempts, np.int64),
        )

    def given_up(self) -> Series:
        """What doesn't."""
        parts = zip(*((cut.steps, cut.values, cut.attempts) for cut in self.cuts), strict=True)
        return Series(*map(np.concatenate, parts))


class _Lines:
    """Joins records, in the order of writing, to one line of steps."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = defaultdict(_Column)
        self._resumes: list[int] = []
        self._attempt = 0

    def add(self, record: dict[str, Any]) -> None:
        """A record of measurements."""
        step, attempt = record["step"], record["attempt"]
        lists = {key: record[key] for key in _LISTS if key in record}
        before = step - max((len(values) for values in lists.values()), default=1)
        self._begin(attempt, before)
        group = [self._columns[n] for n in (_LEARNT if "losses" in record else _OF_MACHINE)]
        if any(column.last > before for column in group):
            self._mark(before)  # the run went back within one life
            for column in group:
                column.cut(before)
        for key, values in lists.items():
            name, factor = _LISTS[key]
            for number, value in enumerate(values, step - len(values) + 1):
                self._columns[name].add(number, factor * float(value), attempt)
        for name in _NUMBERS:
            if name in record:
                self._columns[name].add(step, record[name], attempt)

    def add_validation(self, record: dict[str, Any]) -> None:
        """A record of an evaluation."""
        step, attempt = record["step"], record["attempt"]
        self._begin(attempt, step)  # one that an earlier life was stopped in may open a life
        for key, value in with_nan(record["validation"]).items():
            if isinstance(value, int | float):
                column = self._columns[f"validation/{key}"]
                column.cut(step - 1)
                column.add(step, value, attempt)

    def _begin(self, attempt: int, step: int) -> None:
        """A record of that attempt, which had then done so many steps or more."""
        if attempt == self._attempt:
            return
        if self._attempt:  # before the first there is nothing to compare with
            self._mark(step)
        self._attempt = attempt
        for column in self._columns.values():
            column.cut(step)

    def _mark(self, step: int) -> None:
        self._resumes = [*(s for s in self._resumes if s < step), step]

    def snapshot(self) -> Snapshot:
        """What stands."""
        series = {name: c.standing() for name, c in self._columns.items() if c.steps}
        return Snapshot(series, tuple(self._resumes))

    def given_up(self) -> dict[str, Series]:
        """What doesn't."""
        return {name: c.given_up() for name, c in self._columns.items() if c.cuts}
