"""How a life ends, in the words of the record, and what a finished run comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.attempt.course import RolledBack
from tapeline.checkpoint import Skipped
from tapeline.checkpoint.preempt import Preempted
from tapeline.errors import LedgerError
from tapeline.files import sha256_json
from tapeline.ledger import Account, account_of

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


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run comes to.

    Attributes:
        folder: the run's folder.
        steps: steps done in all.
        from_step: where this life of the run began.
        part_sha256: over each part of the state after the last step; over rank 0's share of it
            where ranks hold shares.
        losses: of every step, the later one where a step was done twice.
        validation: at the end; None without a validation split.
        contract: what holds of its bits.
        skipped: checkpoints that were passed over on the way in, and why.
    """

    folder: Path
    steps: int
    from_step: int
    part_sha256: dict[str, str]
    losses: list[float]
    validation: dict[str, Any] | None
    contract: str
    skipped: tuple[Skipped, ...]

    @property
    def state_sha256(self) -> str:
        """Over all state after the last step, as `checkpoint.state_sha256` has it."""
        return sha256_json(self.part_sha256)

    def account(self) -> Account | None:
        """Where the time of all lives went; None where the ledgers don't tell.

        A run that came to its end is a success, whatever became of its ledgers.
        """
        try:
            return account_of(self.folder)
        except (LedgerError, OSError):
            return None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the losses as the mean of the last 50."""
        last, account = self.losses[-50:], self.account()
        return {
            "run": str(self.folder),
            "steps": self.steps,
            "from_step": self.from_step,
            "state_sha256": self.state_sha256,
            "part_sha256": self.part_sha256,
            "loss_last_50": sum(last) / len(last) if last else None,
            "validation": self.validation,
            "goodput": account.goodput if account else None,
            "ettr": account.ettr if account else None,
            "contract": self.contract,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
        }
