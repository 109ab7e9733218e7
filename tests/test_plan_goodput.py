"""Goodput composed of its parts: the naive and the tuned job, and plans beside accounts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.plan.goodput import BUCKETS, compare, compose, plan_goodput, utilisation
from tapeline.plan.job import Job
from tapeline.plan.saving import Failures, three_ways

JOB = Job(336.0, 64, 2.5)
FAILING = Failures(6 * 3600.0, 720.0)
ONE, SHARDS, BACKGROUND = three_ways(
    checkpoint_s=180.0, num_shards=8, async_fraction=0.1, slowdown=0.0
)


def test_utilisation():
    about = {"compute_samples_per_s": 64 * 108.0}
    assert utilisation(loader_samples_per_s=5000.0, overlapped=True, **about) == pytest.approx(
        0.723, abs=5e-4
    )
    for share, busy in ((1.25, 1.0), (2.0, 1.0), (0.5, 0.5), (1.0, 1.0)):
        found = utilisation(loader_samples_per_s=share * 6912.0, overlapped=True, **about)
        assert found == pytest.approx(busy)
    assert utilisation(loader_samples_per_s=6912.0, overlapped=False, **about) == 0.5
    assert utilisation(loader_samples_per_s=0.0, overlapped=False, **about) == 1.0


def test_the_naive_and_the_tuned_job():
    """16 % overhead and 28 % starved: about 60 %, 560 h, 89,600; tuned: 95 %, 353 h, 56,500."""
    plan = plan_goodput(
        compose("before", ONE, FAILING, 5000 / 6912, JOB),
        compose("after", BACKGROUND, FAILING, 1.0, JOB),
    )
    assert plan.before.goodput == pytest.approx(0.60, abs=0.01)
    assert plan.before.bill.wall_hours == pytest.approx(560, rel=0.01)
    assert plan.before.bill.cost == pytest.approx(89_600, rel=0.01)
    assert plan.after.goodput == pytest.approx(0.95, abs=5e-3)
    assert plan.after.bill.wall_hours == pytest.approx(353, abs=0.5)
    assert plan.after.bill.cost == pytest.approx(56_500, abs=50)
    assert plan.saved_cost == pytest.approx(plan.before.bill.cost - plan.after.bill.cost)


@given(
    st.floats(0.01, 1.0),
    st.floats(2e3, 1e9),
    st.floats(0, 500),
    st.sampled_from([ONE, SHARDS, BACKGROUND]),
)
def test_shares_close_and_money_and_hours_agree(busy, mtbf_s, restart_s, save):
    found = compose("case", save, Failures(mtbf_s, restart_s), busy, JOB)
    assert set(found.shares) == set(BUCKETS)
    assert math.fsum(found.shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert found.hours["useful"] == pytest.approx(336.0)
    assert math.fsum(found.hours.values()) == pytest.approx(found.bill.wall_hours)
    for bucket in BUCKETS:
        assert found.cost[bucket] == pytest.approx(found.hours[bucket] * 64 * 2.5)


@given(st.floats(1.0, 1e5), st.floats(1.0, 100.0), st.booleans())
def test_faster_loaders_never_raise_the_cost(rate, faster, overlapped):
    bills = [
        compose(
            "case",
            ONE,
            FAILING,
            utilisation(
                compute_samples_per_s=6912.0, loader_samples_per_s=one, overlapped=overlapped
            ),
            Job(336.0, 64, 2.5),
        ).bill.cost
        for one in (max(rate, 10.0), max(rate, 10.0) * faster)
    ]
    assert bills[1] <= bills[0] * (1 + 1e-12)


def test_a_job_that_never_ends_is_refused():
    with pytest.raises(TapelineError) as error:
        compose("before", ONE, FAILING, 1e-4, JOB)
    assert str(error.value) == (
        "before: expected a job that ends, found 0.0084 % of its time useful. Save more cheaply, "
        "raise the MTBF or the loader's rate."
    )


def test_a_plan_beside_an_account():
    rows = compare({"useful": 0.9, "lost": 0.1}, {"useful": 8.0, "lost": 1.0, "startup": 1.0})
    assert [(row.bucket, row.planned, row.measured) for row in rows] == [
        ("useful", 0.9, 0.8),
        ("lost", 0.1, 0.1),
        ("startup", None, 0.1),
    ]
    assert rows[0].difference == pytest.approx(-0.1)
    assert rows[2].difference is None
    with pytest.raises(
        TapelineError, match="the account of the run: expected some time, found none"
    ):
        compare({}, {"useful": 0.0})
