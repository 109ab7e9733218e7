"""The audit: for each session, which rows start a window, and why the others don't.

Every row could be the first of a window. It is, or it isn't for exactly one reason, so the
numbers of a session add up to its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tapeline.session import Int64Array

# A row is counted under the first reason that holds.
REASONS = MappingProxyType(
    {
        "not_selected": "the session isn't among those asked for",
        "too_short": "the session has fewer rows than one window and its target",
        "window_tail": "the window would run over the session's end",
        "horizon_tail": "the target would lie behind the session's end",
        "invalid_rows": "a row marked invalid lies in the window or before its target",
        "stale_rows": "a row that is too old lies there",
        "gap": "rows are missing there",
        "stride": "the stride passes over it",
        "other_part": "it lies wholly in another part of the split",
        "purge": "it or its target crosses an end of this part",
        "embargo": "it starts too soon after the part before",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Audit:
    """What became of the rows of a store; `rows = windows + Σ lost`, in each session.

    Attributes:
        sessions: a name for each session.
        rows: int64 `[sessions]`.
        windows: int64 `[sessions]`, the windows that there are.
        rows_read: int64 `[sessions]`, rows that some window reads as input.
        lost: for each of `REASONS`, int64 `[sessions]`: windows that there aren't.
    """

    sessions: tuple[str, ...]
    rows: Int64Array
    windows: Int64Array
    rows_read: Int64Array
    lost: dict[str, Int64Array]

    def totals(self) -> dict[str, int]:
        """Windows lost over all sessions, by reason; all of `REASONS`."""
        return {reason: int(self.lost[reason].sum()) for reason in REASONS}

    def as_dict(self) -> dict[str, Any]:
        """All numbers as JSON can hold them; a session names only the reasons it has."""
        return {
            "rows": int(self.rows.sum()),
            "rows_read": int(self.rows_read.sum()),
            "windows": int(self.windows.sum()),
            "lost": self.totals(),
            "sessions": [
                {
                    "session": name,
                    "rows": int(self.rows[s]),
                    "rows_read": int(self.rows_read[s]),
                    "windows": int(self.windows[s]),
                    "lost": {r: int(self.lost[r][s]) for r in REASONS if self.lost[r][s]},
                }
                for s, name in enumerate(self.sessions)
            ],
        }


def nothing_lost(num_sessions: int) -> dict[str, Int64Array]:
    """Zero for every reason and session."""
    return {reason: np.zeros(num_sessions, np.int64) for reason in REASONS}
