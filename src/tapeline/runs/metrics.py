"""The metrics journal of one rank: what was measured, by attempt and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapeline.files import Journal


class MetricsJournal:
    """Appends metrics of one attempt; a step done again in a later attempt stands there again.

    Args:
        path: the journal.
        attempt: which life of the run writes.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._journal = Journal(path)
        self._attempt = attempt

    def losses(self, step: int, losses: Sequence[float]) -> None:
        """The losses of the steps up to and including `step`, counted from 1."""
        self._append({"step": step, "losses": list(losses)})

    def validation(self, step: int, figures: Mapping[str, Any]) -> None:
        """What an evaluation after `step` found."""
        self._append({"step": step, "validation": dict(figures)})

    def _append(self, record: dict[str, Any]) -> None:
        self._journal.append({"attempt": self._attempt, **record})
        self._journal.flush()

    def sync(self) -> None:
        """Put what was written on the disk."""
        self._journal.sync()

    def __enter__(self) -> MetricsJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
