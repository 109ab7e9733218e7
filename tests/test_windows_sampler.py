"""The sampler: every window once an epoch, and a state that gives back the same future."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from helpers_windows import among, arrays, listed
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import WindowError
from tapeline.windows import WindowIndex, WindowSampler
from tapeline.windows.order import permute
from tapeline.windows.plan import Plan

LENGTHS = among(st.integers(0, 20), st.integers(5, 20), 5)
BATCHES = st.integers(1, 60)
SEEDS = st.integers(-5, 2**64)


def sampler(lengths=(40, 50), T=3, horizon=2, batch=7, seed=4):
    return WindowSampler(lengths, T, horizon, batch, seed)


def drawn(source, batches):
    """The next batches, as one list of (session, start)."""
    pairs = []
    for _ in range(batches):
        sessions, starts = source.next()
        pairs += zip(sessions.tolist(), starts.tolist(), strict=True)
    return pairs


@given(LENGTHS, BATCHES, SEEDS)
def test_every_window_comes_once_in_each_epoch(lengths, batch, seed):
    source = sampler(lengths, batch=batch, seed=seed)
    num = source.index.num_windows
    pairs = drawn(source, -(-3 * num // batch))
    for epoch in range(3):
        part = pairs[epoch * num : (epoch + 1) * num]
        assert Counter(part) == Counter(listed(source.index))


@given(LENGTHS, BATCHES, SEEDS)
def test_the_order_is_the_keyed_permutation_of_each_epoch(lengths, batch, seed):
    source = sampler(lengths, batch=batch, seed=seed)
    num = source.index.num_windows
    windows = listed(source.index)
    wanted = [windows[w] for epoch in range(3) for w in permute(np.arange(num), num, seed, epoch)]
    batches = 3 * num // batch
    assert drawn(source, batches) == wanted[: batches * batch]


@given(LENGTHS, BATCHES, st.integers(0, 12), SEEDS)
def test_a_state_taken_anywhere_gives_the_same_future(lengths, batch, before, seed):
    source = sampler(lengths, batch=batch, seed=seed)
    drawn(source, before)
    state = json.loads(json.dumps(source.state()))
    resumed = sampler(lengths, batch=batch, seed=seed + 1)
    drawn(resumed, 3)
    resumed.set_state(state)
    assert resumed.seed == seed
    assert (resumed.position, resumed.epoch) == (
        before * batch,
        before * batch // source.index.num_windows,
    )
    # twice, since an offset must be applied once and not in every later epoch
    assert drawn(resumed, 4) == drawn(source, 4)
    assert resumed.state() == source.state()
    resumed.set_state(source.state())
    assert drawn(resumed, 4) == drawn(source, 4)


def test_a_batch_is_int64_and_does_not_move_the_sampler_by_being_looked_at():
    source = sampler()
    ahead = source.batch_at(14)
    assert source.position == 0
    source.next()
    source.next()
    for looked, came in zip(ahead, source.next(), strict=True):
        assert looked.dtype == came.dtype == np.int64
        assert looked.shape == (7,)
        np.testing.assert_array_equal(looked, came)


def test_seeds_and_epochs_differ():
    assert drawn(sampler(seed=1), 5) != drawn(sampler(seed=2), 5)
    source = sampler([11], batch=7)
    assert drawn(source, 1) != drawn(source, 1)


def test_an_index_decides_the_shape_itself():
    index = WindowIndex.from_lengths([40, 50], 3, 2)
    given_index = WindowSampler(index, T=99, horizon=99, batch=7, seed=4)
    assert drawn(given_index, 20) == drawn(sampler(), 20)


@pytest.mark.parametrize(
    "form", [list, tuple, np.array, lambda n: np.array(n, np.int32), torch.tensor]
)
def test_lengths_of_any_form_are_the_same_windows(form):
    source = sampler(form((40, 50)))
    assert source.state() == sampler().state()
    assert drawn(source, 5) == drawn(sampler(), 5)


def test_the_state_is_small_plain_and_grows_with_nothing(new_store):
    few = sampler().state()
    many = WindowSampler([46_800] * 10_000, batch=4096, seed=2**63)
    many.set_state(many.state() | {"position": 2**60})
    assert set(many.state()) == set(few)
    assert all(type(value) in (int, str) for value in many.state().values())
    assert len(json.dumps(many.state())) < 200
    assert (
        WindowSampler(WindowIndex(new_store(arrays(40, 50)), 3, 2), batch=7, seed=4).state() == few
    )


@pytest.mark.parametrize(
    ("other", "expected", "found"),
    [
        ({"batch": 8}, "batch 7", "batch 8"),
        ({"T": 4}, "T 3, windows 82, fingerprint *", "T 4, windows 80, fingerprint *"),
        (
            {"horizon": 3},
            "horizon 2, windows 82, fingerprint *",
            "horizon 3, windows 80, fingerprint *",
        ),
        ({"T": 2, "horizon": 3}, "T 3, horizon 2, fingerprint *", "T 2, horizon 3, fingerprint *"),
        ({"lengths": (50, 40)}, "fingerprint *", "fingerprint *"),
        ({"lengths": (40, 51)}, "windows 82, fingerprint *", "windows 83, fingerprint *"),
    ],
)
def test_a_state_of_other_windows_is_refused_and_changes_nothing(other, expected, found):
    saved, ours = sampler(**other), sampler()
    drawn(ours, 2)
    before = ours.state()
    with pytest.raises(WindowError) as error:
        ours.set_state(saved.state())
    expected = expected.replace("*", ours.index.fingerprint())
    found = found.replace("*", saved.index.fingerprint())
    assert str(error.value) == (
        f"sampler state: expected one of this sampler's windows ({expected}), found {found}. "
        "Resume with the data, T, horizon and batch of the saved run, or start anew."
    )
    assert ours.state() == before


def test_a_state_of_another_order_version_is_refused():
    with pytest.raises(WindowError, match=r"windows \(order 1\), found order 2"):
        sampler().set_state(sampler().state() | {"order": 2})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"position": -7}, "position -7, seed 4"),
        ({"position": 1.5}, "position 1.5, seed 4"),
        ({"position": None}, "position None, seed 4"),
        ({"position": True}, "position True, seed 4"),
        ({"seed": "4x"}, "position 14, seed 4x"),
        ({"seed": False}, "position 14, seed False"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, found):
    ours = sampler()
    drawn(ours, 2)
    before = ours.state()
    with pytest.raises(WindowError) as error:
        ours.set_state(before | change)
    assert str(error.value) == (
        "sampler state: expected a whole position, 0 or more, and a whole seed, "
        f"found {found}. Pass what `WindowSampler.state()` returned."
    )
    assert ours.state() == before


def test_an_empty_state_is_refused():
    with pytest.raises(WindowError, match="found T None, horizon None, batch None"):
        sampler().set_state({})


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_is_refused(state):
    ours = sampler()
    before = ours.state()
    with pytest.raises(WindowError) as error:
        ours.set_state(state)
    assert str(error.value) == (
        f"sampler state: expected a mapping of names to values, found {state!r}. Pass what "
        "`WindowSampler.state()` returned."
    )
    assert ours.state() == before


def test_a_batch_of_true_is_not_one():
    state = sampler(batch=1).state()
    with pytest.raises(WindowError, match=r"\(batch 1\), found batch True"):
        sampler(batch=1).set_state(state | {"batch": True})


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(WindowError) as error:
        sampler(seed=seed)
    assert str(error.value) == (
        f"seed: expected a whole number, found {seed!r}. Choose another seed."
    )


def test_a_batch_that_no_machine_holds_is_refused():
    for source in (lambda batch: sampler(batch=batch), lambda batch: Plan(10, batch)):
        with pytest.raises(WindowError, match=r"batch: expected at most .* Take a smaller batch"):
            source(10**12)
    most = (2**31 - 1) // 3
    assert sampler(batch=most).batch == most
    with pytest.raises(WindowError) as error:
        sampler(batch=most + 1)
    assert str(error.value) == (
        "batch: expected at most 715,827,882 windows, 2,147,483,647 values, found 715,827,883. "
        "Take a smaller batch."
    )


@pytest.mark.parametrize("batch", [0, -1, 2.5, True])
def test_a_batch_holds_a_whole_number_of_windows(batch):
    with pytest.raises(WindowError) as error:
        sampler(batch=batch)
    assert str(error.value) == (
        f"batch: expected a whole number, 1 or more, found {batch}. Choose another batch."
    )


def test_windows_longer_than_every_session_are_refused():
    with pytest.raises(WindowError) as error:
        WindowSampler([20, 29], T=20, horizon=10)
    assert str(error.value) == (
        "windows of 20 rows with a target 10 later: expected a session with at least 30 valid rows "
        "in sequence, found 29 in the longest of 2. Shorten T or horizon, or give longer sessions."
    )


def test_lengths_that_are_not_whole_are_refused():
    with pytest.raises(WindowError, match=r"found float64 of shape \[2\], \[40.0, 50.5\]"):
        WindowSampler([40.0, 50.5])
