"""Windows found row by row: what an index must hold, said without one."""

import numpy as np
from helpers_windows import session
from hypothesis import strategies as st

MASKS = st.lists(st.lists(st.sampled_from([True, True, True, False]), max_size=25), min_size=1)
VALID = st.sampled_from([True] * 9 + [False])
SKIPS = st.sampled_from([1] * 15 + [3])
HORIZONS = st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True)


@st.composite
def grids(draw, most=5, least_rows=0):
    """Validity and times of sessions on a grid of step 10, some rows missing, many overlapping."""
    found = []
    for _ in range(draw(st.integers(1, most))):
        mask = draw(st.lists(VALID, min_size=least_rows, max_size=30))
        begin = draw(st.integers(0, 40)) * 10
        skips = draw(st.lists(SKIPS, min_size=30, max_size=30))
        found.append((mask, begin + 10 * np.cumsum(skips)[: len(mask)]))
    return found


def stored(sessions):
    """Sessions of (validity, times); times may be None."""
    return [session(n, len(mask), times, mask) for n, (mask, times) in enumerate(sessions)]


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
