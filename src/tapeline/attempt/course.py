"""Which batches a run takes: its loader's, without those that a rollback passed over.

Covers the journal of what was passed over, and how the batches of a life follow from it. A batch
is named by its position in the order, not by a step: what was passed over stays so, whichever
step would come to it after another rollback. The position is part of every checkpoint, so a life
that begins anywhere goes on with the same batches.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeline.files import Journal, read_journal
from tapeline.runs import RunFolder
from tapeline.windows import Loader
from tapeline.windows.slot import Batch


class RolledBack(Exception):  # noqa: N818 - no fault: a life ends so that the next does better
    """This life has ended; the next begins before the batches that are now passed over."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Batches that a run doesn't train on.

    Attributes:
        attempt: the life that was ended for it.
        step: the first that was done with one of them; later lives begin before it.
        begin, end: positions in the order, in windows.
        why: what a watcher saw.
    """

    attempt: int
    step: int
    begin: int
    end: int
    why: str


def passed_over_path(run: RunFolder) -> Path:
    """The journal of what a run passed over."""
    return run.path / "passed_over.jsonl"


def read_passed_over(run: RunFolder, saved: Iterable[Mapping[str, Any]] = ()) -> list[PassedOver]:
    """What a run passed over: by its journal, and by a checkpoint, where the journal is lost."""
    lines = [*read_journal(passed_over_path(run)), *saved]
    return sorted({PassedOver(**line) for line in lines}, key=lambda one: (one.attempt, one.step))


def begins_before(run: RunFolder) -> int | None:
    """The step that the next life must begin before; None if the last one wasn't rolled back."""
    last = max((life["attempt"] for life in run.attempts()), default=0)
    return min((one.step for one in read_passed_over(run) if one.attempt == last), default=None)


class Course:
    """The batches of one life.

    Args:
        loader: where this life begins.
        first: steps done before it.
        passed_over: by the lives before.
    """

    def __init__(self, loader: Loader, first: int, passed_over: Sequence[PassedOver]) -> None:
        self._loader = loader
        self._batch = loader.plan.batch
        self._first = first
        self._begin = loader.position
        self.passed_over = passed_over

    def as_metadata(self) -> list[dict[str, Any]]:
        """What checkpoints say was passed over."""
        return [asdict(one) for one in self.passed_over]

    def batches(self) -> Generator[Batch, None, None]:
        """The batches; the loader is where they are."""
        position = self._loader.position
        for batch in self._loader:
            if not self._is_passed_over(position):
                yield batch
            position = self._loader.position

    def pass_over(
        self, run: RunFolder, attempt: int, steps: tuple[int, int], why: str
    ) -> PassedOver:
        """Record that the batches of some steps of this life are to be passed over.

        Args:
            run: whose journal.
            attempt: this life.
            steps: the first and the last, counted from 1.
            why: what was seen in them.
        """
        begin, end = (self.position_of(step) for step in steps)
        found = PassedOver(attempt, steps[0], begin, end + self._batch, why)
        with Journal(passed_over_path(run)) as journal:
            journal.append(asdict(found))
        return found

    def position_of(self, step: int) -> int:
        """Where the batch of a step of this life begins."""
        position = self._next(self._begin)
        for _ in range(self._first, step - 1):
            position = self._next(position + self._batch)
        return position

    def _next(self, position: int) -> int:
        while self._is_passed_over(position):
            position += self._batch
        return position

    def _is_passed_over(self, position: int) -> bool:
        return any(one.begin <= position < one.end for one in self.passed_over)
