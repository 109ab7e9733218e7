"""What watchers look at, each metric as arrays over steps, and what they say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Series:
    """One metric.

    Attributes:
        steps: int64 `[n]`, increasing; a step is counted from 1.
        values: float64 `[n]`; nan and infinities are values, what is missing has no entry.
        attempts: int64 `[n]`, the life of the run that measured it.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    attempts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, part: slice | NDArray[np.bool_]) -> Series:
        return Series(self.steps[part], self.values[part], self.attempts[part])

    def finite(self) -> Series:
        """The entries whose value is finite."""
        good = np.isfinite(self.values)
        return self if good.all() else self[good]


EMPTY = Series(np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's metrics at one moment, each step once.

    Attributes:
        series: by name; one that was never measured is absent. Of each step are `loss`,
            `grad_norm`, `step_s` and `collective_wait_s`; of the last step of each logging interval
            `learning_rate`, `samples_per_s`, `rss_bytes`, `device_bytes`, `utilisation`, `batch_s`;
            of evaluations `validation/…`.
        resumes: for each later life of the run, the steps done when it began.
    """

    series: Mapping[str, Series] = field(default_factory=dict)
    resumes: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> Series:
        return self.series.get(name, EMPTY)


Severity = Literal["note", "warning", "error"]


class Action(StrEnum):
    """What the run is asked to do about a finding; doing it is the run's job."""

    LOG = "log"
    HALT = "halt"
    ROLLBACK = "rollback"  # to the last checkpoint before `step`, and pass over the batches to it


@dataclass(frozen=True, slots=True)
class Finding:
    """Something seen in a run's metrics.

    Attributes:
        watcher: who saw it, a key of `WATCHERS`.
        step: the first step that shows it, counted from 1. A rollback goes to before it.
        last_step: the last one; a rollback passes over the batches up to it.
        seen: what was seen, with its numbers.
        means: what it usually comes from.
        severity: "note", "warning", or "error": the steps after it are worth nothing.
        action: as chosen for this watcher.
    """

    watcher: str
    step: int
    last_step: int
    seen: str
    means: str
    severity: Severity
    action: Action = Action.LOG

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {**asdict(self), "action": self.action.value}
