"""Sessions to cut windows from, and what windows are, said the slow way."""

import numpy as np
from hypothesis import strategies as st

from tapeline.session import Session, SessionKey


@st.composite
def among(draw, others, one, most):
    """Up to `most` of `others`, and at any place among them `one` that a test can't do without."""
    found = draw(st.lists(others, max_size=most - 1))
    found.insert(draw(st.integers(0, len(found))), draw(one))
    return found


def arrays(*lengths, columns=3, seed=0):
    """Random float32 sessions of the given numbers of rows."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rows, columns)).astype(np.float32) for rows in lengths]


def session(number, rows, times=None, valid=None, columns=3):
    """One session of random values, of an instrument of its own."""
    values = arrays(rows, columns=columns, seed=number)[0]
    return Session(
        SessionKey(f"instrument-{number}"),
        values,
        times=None if times is None else np.asarray(times, np.int64),
        valid=None if valid is None else np.asarray(valid, np.bool_),
    )


def valid_windows(masks, T, horizon):
    """All (session, start) whose rows, input to target, exist and are valid."""
    return [
        (number, start)
        for number, mask in enumerate(masks)
        for start in range(len(mask))
        if start + T + horizon <= len(mask) and all(mask[start : start + T + horizon])
    ]


def listed(index):
    """All windows of an index in order, as (session, start)."""
    sessions, starts = index.locate(np.arange(index.num_windows))
    return list(zip(sessions.tolist(), starts.tolist(), strict=True))
