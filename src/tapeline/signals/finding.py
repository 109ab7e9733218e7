"""What a watcher says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

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
