"""What retention keeps and deletes: each rule, and what holds for any policy."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.checkpoint.retain import Held, Retention, reasons_to_keep, to_delete
from tapeline.errors import CheckpointError

metrics = st.none() | st.floats(width=16)
tags = st.sampled_from([frozenset(), frozenset(), frozenset({"paper"}), frozenset({"a", "b"})])
histories = st.lists(
    st.builds(Held, st.integers(0, 60), st.booleans() | st.just(True), metrics, tags),
    unique_by=lambda one: one.step,
)
policies = st.builds(
    Retention,
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
    best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
)


def kept(held: list[Held], retention: Retention) -> list[int]:
    gone = to_delete(held, retention)
    return sorted(one.step for one in held if one.step not in gone)


def test_the_rules_add_up_and_say_why():
    losses = {10: 0.9, 20: 0.5, 30: 0.4, 40: math.nan, 50: 0.6, 60: 0.7, 70: 0.8}
    held = [
        Held(step, metric=loss, tags=frozenset({"paper"} if step == 10 else ()))
        for step, loss in losses.items()
    ]
    retention = Retention(last=2, every=25, best=2)
    assert reasons_to_keep(held, retention) == {
        10: ("tagged paper",),
        20: ("best 2 of 2",),
        30: ("first from step 25", "best 1 of 2"),
        50: ("first from step 50",),
        60: ("last 2 of 2",),
        70: ("newest",),
    }
    assert to_delete(held, retention) == [40]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_nan_and_infinities_are_never_best(mode, best: int):
    values = [math.nan, 0.1, 0.9, math.inf, -math.inf, None, math.nan]
    held = [Held(step, metric=value) for step, value in enumerate(values, start=1)]
    assert kept(held, Retention(last=1, best=1, mode=mode)) == [best, 7]


def test_of_equally_good_ones_the_earlier_is_best():
    held = [Held(step, metric=1.0) for step in (1, 2, 3, 4)]
    assert kept(held, Retention(last=1, best=1)) == [1, 4]


def test_steps_off_the_grid_still_leave_one_in_every_block():
    held = [Held(step) for step in (7, 98, 103, 150, 199, 204, 420, 430)]
    assert kept(held, Retention(last=1, every=100)) == [103, 204, 420, 430]


def test_damaged_ones_never_count_and_go_when_they_are_old():
    held = [
        *(Held(step) for step in (1, 3, 5)),
        *(Held(step, verified=False, metric=-1.0) for step in (2, 4, 6)),
    ]
    assert to_delete(held, Retention(last=2, every=2, best=1)) == [1, 2]
    assert to_delete(held[3:], Retention(last=1)) == []


def test_a_damaged_tagged_one_stays():
    held = [Held(1, verified=False, tags=frozenset({"paper"})), Held(2), Held(3)]
    assert to_delete(held, Retention(last=1)) == [2]


@given(histories, policies)
def test_newest_best_and_tagged_stay_whatever_the_policy(held: list[Held], retention: Retention):
    gone = to_delete(held, retention)
    verified = [one for one in held if one.verified]
    assert len(set(gone)) == len(gone)
    assert set(gone) <= {one.step for one in held}
    for one in held:
        if one.tags:
            assert one.step not in gone
    if not verified:
        assert gone == []
        return
    newest = sorted(one.step for one in verified)[-retention.last :]
    assert not set(newest) & set(gone)
    assert all(step < newest[-1] for step in gone)
    finite = [one for one in verified if one.metric is not None and math.isfinite(one.metric)]
    if finite and retention.best:
        choose = min if retention.mode == "min" else max
        best = choose(one.metric for one in finite)
        assert any(one.step not in gone for one in finite if one.metric == best)


@given(histories, policies)
def test_deleting_twice_deletes_nothing_more(held: list[Held], retention: Retention):
    gone = to_delete(held, retention)
    assert to_delete([one for one in held if one.step not in gone], retention) == []


@given(histories, policies)
def test_deleting_after_every_save_keeps_what_deleting_once_would(held, retention):
    present: list[Held] = []
    for one in sorted(held, key=lambda one: one.step):
        present.append(one)
        gone = to_delete(present, retention)
        present = [other for other in present if other.step not in gone]
    assert kept(held, retention) == [one.step for one in present]


@given(histories, policies, st.randoms())
def test_the_order_of_listing_does_not_matter(held: list[Held], retention: Retention, random):
    shuffled = list(held)
    random.shuffle(shuffled)
    assert to_delete(shuffled, retention) == to_delete(held, retention)


@given(histories, policies)
def test_what_stays_has_a_reason_or_is_damaged_and_recent(held, retention):
    stay = set(kept(held, retention))
    reasons = reasons_to_keep(held, retention)
    assert reasons.keys() <= stay
    assert all(not one.verified for one in held if one.step in stay - reasons.keys())


@pytest.mark.parametrize(("name", "least"), [("last", 1), ("every", 1), ("best", 0)])
def test_numbers_out_of_range_are_refused(name: str, least: int):
    with pytest.raises(CheckpointError) as error:
        dataclasses.replace(Retention(), **{name: least - 1})
    assert str(error.value) == (
        f"retention, {name}: expected at least {least}, found {least - 1}. "
        "The newest checkpoint always stays; leave out a rule that isn't wanted."
    )
