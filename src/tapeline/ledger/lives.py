"""From the spans of one rank to its lives: what was kept of each attempt, and what was done again.

An attempt keeps the steps up to the one that any later attempt began from; whatever it spent
after that was for nothing. Lines end at checkpoints, so a rollback parts lines, not the inside of
one. Where a ledger was kept without checkpoints in it, a line is split in proportion to its
steps, and its time is counted as `estimated_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tapeline.ledger.lines import DEVICE, INFERRED, OVERLAP, WRITING
from tapeline.ledger.phases import INDEX, PHASES
from tapeline.ledger.reading import Begin, Close, RankLedger, Spans
from tapeline.session import BoolArray, Int64Array

_IN_STEPS = [INDEX[name] for name in ("data", "transfer", "compute", "communication", "other")]


def _none() -> Int64Array:
    return np.zeros(len(PHASES), np.int64)


@dataclass(slots=True)
class Life:
    """One attempt of one rank.

    Attributes:
        begin, close: its first and last line; a killed or living one has no last.
        kept_through: the step up to which later attempts build on it; None: all of it.
        step: steps done at its end.
        end_ns: how long it is known to have lived.
        kept_ns, redone_ns: `[PHASES]`, of work that counts and of work that was done again.
        overlap_ns: of the kept waits for data, when the device worked.
        device_ns: when the device worked; 0 where nobody looked.
        inferred_ns: known from the heartbeat alone.
        estimated_ns: of spans that a rollback split.
        writing_steps, writing_ns: steps done while a checkpoint was written in the background,
            and their time.
    """

    begin: Begin
    close: Close | None
    kept_through: int | None
    step: int
    end_ns: int = 0
    kept_ns: Int64Array = field(default_factory=_none)
    redone_ns: Int64Array = field(default_factory=_none)
    overlap_ns: int = 0
    device_ns: int = 0
    inferred_ns: int = 0
    estimated_ns: int = 0
    writing_steps: int = 0
    writing_ns: int = 0

    @property
    def kept_steps(self) -> int:
        """Steps that count."""
        return self._kept_until(self.step) - self.begin.from_step

    @property
    def redone_steps(self) -> int:
        """Steps that a later attempt did again, or will."""
        return self.step - self.begin.from_step - self.kept_steps

    def slowdown_ns(self) -> int | None:
        """What background writes slowed the steps beside them by, an estimate.

        The time of those steps, less what as many took on average without; None where there is
        nothing to compare. It is part of the buckets already.
        """
        steps = self.step - self.begin.from_step
        calm_steps = steps - self.writing_steps
        if not self.writing_steps or calm_steps <= 0:
            return None
        calm_ns = int((self.kept_ns + self.redone_ns)[_IN_STEPS].sum()) - self.writing_ns
        return self.writing_ns - calm_ns * self.writing_steps // calm_steps

    def add(self, spans: Spans) -> None:
        """Add spans of this attempt, in order."""
        spent_ns = spans.spent_ns
        self.step, self.end_ns = int(spans.steps[-1]), int(spans.ends_ns[-1])
        redone = after(spans, self.kept_through)
        if redone.any():
            kept_ns = self._kept_of(spans, redone)
            self.kept_ns += kept_ns
            self.redone_ns += spent_ns.sum(axis=0) - kept_ns
        else:
            self.kept_ns += spent_ns.sum(axis=0)
        rows = spans.rows
        self.overlap_ns += int(rows[~redone, OVERLAP].sum())
        self.device_ns += int(rows[:, DEVICE].sum())
        inferred = rows[:, INFERRED] > 0
        if inferred.any():
            self.inferred_ns += int(spent_ns[inferred].sum())
        writing = rows[:, WRITING] > 0
        if writing.any():
            self.writing_steps += int((spans.steps - spans.before)[writing].sum())
            self.writing_ns += int(spent_ns[writing][:, _IN_STEPS].sum())

    def _kept_until(self, step: int) -> int:
        through = step if self.kept_through is None else self.kept_through
        return max(self.begin.from_step, min(step, through))

    def _kept_of(self, spans: Spans, redone: BoolArray) -> Int64Array:
        spent_ns = spans.spent_ns
        kept_ns: Int64Array = spent_ns[~redone].sum(axis=0)
        through = self._kept_until(self.step)
        for row in np.flatnonzero(redone & (spans.before < through)):
            before, step = int(spans.before[row]), int(spans.reached[row])
            for phase, ns in enumerate(spent_ns[row].tolist()):
                kept_ns[phase] += ns * (through - before) // (step - before)
            self.estimated_ns += int(spent_ns[row].sum())
        return kept_ns


def after(spans: Spans, through: int | None) -> BoolArray:
    """`[spans]`, which of them went beyond a step; none do where it is None."""
    if through is None:
        return np.zeros(len(spans), np.bool_)
    return spans.reached > through


def kept_through(from_steps: dict[int, int]) -> dict[int, int | None]:
    """For each attempt, the earliest step that any later one began from; None for the last.

    Args:
        from_steps: where each attempt began.
    """
    through: dict[int, int | None] = {}
    earliest: int | None = None
    for attempt in sorted(from_steps, reverse=True):
        through[attempt] = earliest
        step = from_steps[attempt]
        earliest = step if earliest is None else min(earliest, step)
    return through


def lives_of(ledger: RankLedger, through: dict[int, int | None]) -> list[Life]:
    """The lives of one rank, in order.

    Args:
        ledger: of the rank.
        through: `kept_through` of the attempts of all ranks.

    Raises:
        LedgerError: its spans don't add up.
    """
    lives = {
        begin.attempt: Life(
            begin, ledger.closes.get(begin.attempt), through[begin.attempt], begin.from_step
        )
        for begin in ledger.begins
    }
    _add_all(lives, ledger.spans())
    return list(lives.values())


def _add_all(lives: dict[int, Life], pieces: Iterable[Spans]) -> None:
    for spans in pieces:
        lives[spans.attempt].add(spans)
