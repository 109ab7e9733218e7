"""Windows found row by row: what an index must hold, said without one."""

import numpy as np
import pytest
from helpers_windows import among, session
from hypothesis import strategies as st

from tapeline.errors import WindowError

ROOM = 11  # rows that the longest window asked for and its target take
MARKS = st.sampled_from([True, True, True, False])
VALID = st.sampled_from([True] * 9 + [False])
# One session has room for a window, the others may have.
MASKS = among(
    st.lists(MARKS, max_size=25),
    st.tuples(st.lists(MARKS, max_size=7), st.lists(MARKS, max_size=7)).map(
        lambda ends: [*ends[0], *[True] * ROOM, *ends[1]]
    ),
    8,
)
SKIPS = st.sampled_from([1] * 15 + [3])
HORIZONS = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)


@st.composite
def grids(draw, most=5, least_rows=0):
    """Validity and times of sessions on a grid of step 10, some rows missing, many overlapping.

    One session has room for a window, the others may have.
    """
    found = []
    num = draw(st.integers(1, most))
    roomy = draw(st.integers(0, num - 1))
    for number in range(num):
        least = max(least_rows, ROOM) if number == roomy else least_rows
        mask = draw(st.lists(VALID, min_size=least, max_size=30))
        begin = draw(st.integers(0, 40)) * 10
        skips = draw(st.lists(SKIPS, min_size=30, max_size=30))
        if number == roomy:
            first = draw(st.integers(0, len(mask) - ROOM))
            mask[first : first + ROOM] = [True] * ROOM
            skips[first : first + ROOM] = [1] * ROOM
        found.append((mask, begin + 10 * np.cumsum(skips)[: len(mask)]))
    return found


def stored(sessions):
    """Sessions of (validity, times); times may be None."""
    return [session(n, len(mask), times, mask) for n, (mask, times) in enumerate(sessions)]


def check_refused(make):
    """`make` must say that no window fits."""
    with pytest.raises(WindowError, match="expected a session with at least"):
        make()


def by_hand(sessions, T, reach, stride=1, max_gap_ns=None, chosen=None):
    """All (session, start) whose `reach` rows exist, are valid and follow each other."""
    found = []
    for number, (mask, times) in enumerate(sessions):
        if chosen is not None and number not in chosen:
            continue

        def follows(row, mask=mask, times=times):
            """Row and the one before it are valid and no further apart than is allowed."""
            near = times is None or max_gap_ns is None or times[row] - times[row - 1] <= max_gap_ns
            return mask[row - 1] and mask[row] and near

        for start in range(len(mask) - reach + 1):
            first = start
            while first > 0 and follows(first):
                first -= 1
            whole = mask[start] and all(follows(r) for r in range(start + 1, start + reach))
            if whole and (start - first) % stride == 0:
                found.append((number, start))
    return found
