"""How a life ends, in the words of the record. Does not cover what is done about it."""

from __future__ import annotations

from tapeline.attempt.course import RolledBack
from tapeline.checkpoint.preempt import Preempted

_EXIT_FINDING = 1


class Stopped(SystemExit):
    """A run has met its criteria to stop, and was saved; uncaught, the exit code is 1."""

    def __init__(self, why: str) -> None:
        super().__init__(_EXIT_FINDING)
        self.why = why

    def __str__(self) -> str:
        return self.why


ORDERLY = (Preempted, Stopped)  # on all ranks, with the state saved


def how_of(error: BaseException) -> str:
    """The end of a life by an error, in a word."""
    for kind, how in (
        (Preempted, "preempted"),
        (Stopped, "stopped"),
        (RolledBack, "rolled back"),
        (KeyboardInterrupt, "interrupted"),
    ):
        if isinstance(error, kind):
            return how
    return "failed"


def evidence_of(error: BaseException) -> str:
    """What the record says of it."""
    return error.why if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
