"""The timeline of a rank for a picture: attempts cut into a bounded number of segments.

A segment is a stretch of whole spans of one attempt, and its phases add up to its length. In one
pass, in memory that doesn't grow: when there are too many segments, neighbours are joined and the
grid becomes twice as coarse. Long spans (a checkpoint, an evaluation, a stall) stay visible as
what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapeline.ledger.lives import after, kept_through
from tapeline.ledger.phases import NS_PER_S, PHASES
from tapeline.ledger.reading import RankLedger, Spans
from tapeline.session import Int64Array


@dataclass(slots=True)
class Segment:
    """A stretch of one attempt.

    Attributes:
        attempt: which.
        begin_ns, end_ns: since the attempt began.
        before, step: steps done at its begin and at its end.
        spent_ns: `[PHASES]`, adding up to its length.
        redone: whether its steps were done again later.
    """

    attempt: int
    begin_ns: int
    end_ns: int
    before: int
    step: int
    spent_ns: Int64Array
    redone: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; phases by name."""
        spent = dict(zip(PHASES, self.spent_ns.tolist(), strict=True))
        return {
            name: spent if name == "spent_ns" else getattr(self, name) for name in self.__slots__
        }


def timeline(
    ledger: RankLedger, ledgers: Sequence[RankLedger] = (), *, most: int = 400
) -> list[Segment]:
    """The segments of a rank, in order.

    Args:
        ledger: of the rank.
        ledgers: of all ranks, where later attempts may have run without this one.
        most: of segments that one grid of time cuts; attempts and rollbacks cut further.

    Raises:
        LedgerError: its spans don't add up.
    """
    begins = {b.attempt: b.from_step for one in (ledger, *ledgers) for b in one.begins}
    through = kept_through(begins)
    segments: list[Segment] = []
    width_ns = NS_PER_S
    for spans in ledger.spans():
        segments += _cut(spans, through[spans.attempt], width_ns)
        segments = _joined(segments, width_ns)
        while len(segments) > most and width_ns <= max(one.end_ns for one in segments):
            width_ns *= 2
            segments = _joined(segments, width_ns)
    return segments


def _cut(spans: Spans, through: int | None, width_ns: int) -> list[Segment]:
    redone = after(spans, through)
    cell = spans.begins_ns // width_ns
    cuts = np.flatnonzero((np.diff(cell) != 0) | (np.diff(redone) != 0)) + 1
    starts = np.concatenate(([0], cuts))
    spent_ns = np.add.reduceat(spans.spent_ns, starts, axis=0)
    ends = [*cuts.tolist(), len(spans)]
    return [
        Segment(
            spans.attempt,
            int(spans.begins_ns[start]),
            int(spans.ends_ns[end - 1]),
            int(spans.before[start]),
            int(spans.steps[end - 1]),
            spent,
            bool(redone[start]),
        )
        for start, end, spent in zip(starts.tolist(), ends, spent_ns, strict=True)
    ]


def _joined(segments: list[Segment], width_ns: int) -> list[Segment]:
    if not segments:
        return segments
    joined = [segments[0]]
    for segment in segments[1:]:
        last = joined[-1]
        same = last.attempt == segment.attempt and last.redone == segment.redone
        if same and last.begin_ns // width_ns == segment.begin_ns // width_ns:
            joined[-1] = Segment(
                last.attempt,
                last.begin_ns,
                segment.end_ns,
                last.before,
                segment.step,
                last.spent_ns + segment.spent_ns,
                last.redone,
            )
        else:
            joined.append(segment)
    return joined
