"""Which checkpoints to delete: pure functions of step numbers.

Covers: keep the last N. Does not cover deleting.
"""

from __future__ import annotations

from collections.abc import Collection


def steps_to_delete(verified: Collection[int], others: Collection[int], *, keep: int) -> list[int]:
    """The steps to delete so that the newest `keep` verified ones stay.

    Only verified checkpoints count: damaged ones never push a good one out. The newest verified
    one is never among those deleted. A damaged one goes when it is older than all that stay.

    Args:
        verified: steps whose every byte was checked.
        others: steps of damaged or unfinished checkpoints.
        keep: how many to keep, at least 1.
    """
    assert keep >= 1, "the newest one always stays"
    kept = sorted(verified)[-keep:]
    return sorted(step for step in {*verified, *others} if kept and step < kept[0])
