"""The whole path to an order at once: what is drawn is what is valid, once, for any world.

For random sessions, subsets, lengths, horizons, strides, splits, world sizes, stops and resumes:
over an epoch each valid (session, start) comes exactly once, in one global order, and no window
touches two parts of a split.
"""

import itertools
import json
from collections import Counter
from functools import partial

import numpy as np
from helpers_index import HORIZONS, by_hand, check_refused, grids, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import RowPolicy, WindowIndex, WindowSampler

GRID = RowPolicy(max_gap_ns=10)


@st.composite
def problems(draw):
    """A market, the windows asked for, where it is cut, and how it is drawn."""
    sessions = draw(grids(least_rows=10))
    numbers = st.integers(0, len(sessions) - 1)
    return {
        "sessions": sessions,
        "chosen": draw(st.lists(numbers, min_size=1, unique=True)),
        "T": draw(st.integers(1, 5)),
        "horizons": draw(HORIZONS),
        "stride": draw(st.integers(1, 3)),
        "targets": draw(st.sampled_from(["all", "any"])),
        "shares": draw(st.sampled_from([{}, {"train": 0.6}, {"train": 0.5, "validation": 0.25}])),
        "embargo_ns": draw(st.sampled_from([0, 0, 10, 45])),
        "world": draw(st.integers(1, 4)),
        "per_rank": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 2**64)),
        "lives": draw(st.lists(st.integers(0, 7), max_size=4)),
    }


def reach_of(problem):
    """Rows that a window of the problem needs."""
    horizons = problem["horizons"]
    return problem["T"] + (max(horizons) if problem["targets"] == "all" else min(horizons))


def valid_windows(problem):
    """All windows of the problem, before any split."""
    shape = problem["T"], reach_of(problem), problem["stride"]
    return by_hand(problem["sessions"], *shape, 10, problem["chosen"])


def parts_of(new_store, problem):
    """The indexes of a problem: the parts of the split, or the whole; none if it is refused."""
    make = partial(
        WindowIndex,
        new_store(stored(problem["sessions"])),
        problem["T"],
        problem["horizons"],
        problem["stride"],
        sessions=problem["chosen"],
        targets=problem["targets"],
        policy=GRID,
    )
    if not valid_windows(problem):
        check_refused(make)
        return []
    if not problem["shares"]:
        return [make()]
    last = {"validation" if len(problem["shares"]) == 1 else "test": "rest"}
    try:
        parts = make().split(**problem["shares"], **last, embargo_ns=problem["embargo_ns"])
    except WindowError as error:
        assert "expected at least one window" in str(error)
        return []
    return list(parts.values())


def drawn_by_ranks(index, problem, num_batches):
    """Each rank's own sampler, its slice of every batch; put together in the order of ranks.

    Ranks stop and come back with a fresh sampler after each of the problem's lives, and the
    number of ranks changes between two lives while the global batch stays.
    """
    batch, world = problem["world"] * problem["per_rank"], problem["world"]
    pieces, done, state = [], 0, None
    for number, steps in enumerate([*problem["lives"], num_batches]):
        ranks = world if number % 2 == 0 else 1
        samplers = [WindowSampler(index, batch=batch, seed=problem["seed"]) for _ in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.set_state(json.loads(state))
        for _ in range(min(steps, num_batches - done)):
            size = batch // ranks
            for rank, sampler in enumerate(samplers):
                sessions, starts = sampler.next()
                mine = slice(rank * size, (rank + 1) * size)
                pieces += zip(sessions[mine].tolist(), starts[mine].tolist(), strict=True)
            done += 1
        states = {json.dumps(sampler.state()) for sampler in samplers}
        (state,) = states  # all ranks agree on where they are
    return pieces


def instants(problem, window, reach):
    """The times of a window's first row and of the last row that it needs."""
    session, start = window
    times = problem["sessions"][session][1]
    return times[start], times[start + reach - 1]


@settings(max_examples=150)
@given(problems())
def test_an_epoch_is_the_valid_windows_once_each_in_one_order(new_store, problem):
    reach, valid, parts = reach_of(problem), valid_windows(problem), parts_of(new_store, problem)
    drawn = []
    for index in parts:
        num = index.num_windows
        batch = problem["world"] * problem["per_rank"]
        pieces = drawn_by_ranks(index, problem, -(-2 * num // batch))
        epochs = [pieces[:num], pieces[num : 2 * num]]
        for epoch in epochs:
            assert Counter(epoch) == Counter(set(epoch))
            assert set(epoch) == set(epochs[0])
        alone = WindowSampler(index, batch=1, seed=problem["seed"])
        order = [tuple(int(v[0]) for v in alone.next()) for _ in range(2 * num)]
        assert pieces[: 2 * num] == order
        drawn.append(set(epochs[0]))

    assert all(part <= set(valid) for part in drawn)
    if not problem["shares"] and valid:
        assert drawn == [set(valid)]
    # Parts lie apart in time, whole windows and their targets, by the embargo at least.
    for before, after in itertools.pairwise(drawn):
        end = max(instants(problem, window, reach)[1] for window in before)
        begin = min(instants(problem, window, reach)[0] for window in after)
        assert begin > end
        assert begin - end > problem["embargo_ns"]
    # What is in no part touches a cut or its embargo: the parts' edges leave no room for it.
    for window in set(valid) - set().union(*drawn):
        first, last = instants(problem, window, reach)
        spans = [
            (
                min(instants(problem, w, reach)[0] for w in part),
                max(instants(problem, w, reach)[1] for w in part),
            )
            for part in drawn
        ]
        assert not any(low <= first and last <= high for low, high in spans)


@settings(max_examples=60)
@given(problems())
def test_every_target_that_is_not_missing_lies_in_its_part(new_store, problem):
    problem["targets"] = "any"
    parts = parts_of(new_store, problem)
    reach = problem["T"] + max(problem["horizons"])
    labelled = []
    for index in parts:
        sessions, starts = index.locate(np.arange(index.num_windows))
        missing = index.missing(sessions, starts)
        spans = []
        for session, start, row in zip(sessions, starts, missing, strict=True):
            times = problem["sessions"][session][1]
            there = [h for h, gone in zip(problem["horizons"], row, strict=True) if not gone]
            assert there  # at least one target
            ends = start + problem["T"] + max(there)
            assert ends <= start + reach
            assert all(problem["sessions"][session][0][start:ends])
            spans.append((times[start], times[ends - 1]))
        labelled.append(spans)
    for before, after in itertools.pairwise(labelled):
        assert max(end for _, end in before) < min(begin for begin, _ in after)
