"""Checkpoint formulas against published and recomputed numbers; monotonicity by hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import TapelineError
from tapeline.quantiles import chi_square_quantile
from tapeline.reliability import (
    Mtbf,
    async_interval_s,
    async_overhead,
    check_feasible,
    daly_interval_s,
    effective_training_time,
    efficiency,
    exact_interval_s,
    num_saves_before_end,
    overhead,
    young_interval_s,
)

HOUR = 3600.0
seconds = st.floats(1e-3, 1e7)
GROWN = st.floats(1.001, 100)


@pytest.mark.parametrize(
    ("c", "m", "r", "young", "daly", "exact", "efficiencies"),
    [
        (5, 1440, 10, 120.00, 116.69, 116.69, (0.9126, 0.8940, 0.8947)),
        (5, 360, 10, 60.00, 56.71, 56.71, (0.8194, 0.7867, 0.7891)),
        (5, 15, 10, 12.25, 9.14, 9.17, (0.1997, 0.1679, 0.1754)),
        (1, 60, 0, 10.95, 10.30, 10.30, (0.8284, 0.7923, 0.7952)),
        (30, 60, 0, 60.0, 41.67, 41.90, (0.3017, 0.2466, 0.2610)),
        (60, 30, 0, 60.0, 30, 28.43, (0.0525, 0.0394, 0.0436)),
    ],
)
def test_intervals_and_efficiencies(c, m, r, young, daly, exact, efficiencies):
    """The last digit printed is the tolerance."""
    assert young_interval_s(blocking_s=c, mtbf_s=m) == pytest.approx(young, abs=5e-3)
    assert daly_interval_s(blocking_s=c, mtbf_s=m) == pytest.approx(daly, abs=5e-3)
    best = exact_interval_s(blocking_s=c, mtbf_s=m)
    assert best == pytest.approx(exact, abs=5e-3)
    for factor, expected in zip((1, 2, 0.5), efficiencies, strict=True):
        found = efficiency(best * factor, blocking_s=c, mtbf_s=m, restart_s=r)
        assert found == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(("c", "m", "published"), [(5, 1440, 117), (5, 360, 57), (5, 15, 9.1)])
def test_published_optima(c: float, m: float, published: float):
    """Daly 2006, figures 3 to 5, to the precision printed there."""
    tolerance = 0.5 if published > 10 else 0.1
    assert exact_interval_s(blocking_s=c, mtbf_s=m) == pytest.approx(published, abs=tolerance)


@pytest.mark.parametrize(
    ("blocking", "interval", "lost"),
    [(180, 2788.5, 0.162), (22.5, 985.9, 0.079), (2.25, 311.8, 0.048)],
)
def test_the_default_scenario(blocking: float, interval: float, lost: float):
    best = young_interval_s(blocking_s=blocking, mtbf_s=6 * HOUR)
    assert best == pytest.approx(interval, abs=0.05)
    found = overhead(best, blocking_s=blocking, mtbf_s=6 * HOUR, restart_s=720)
    assert found == pytest.approx(lost, abs=5e-4)


def test_four_times_cheaper_halves_the_interval():
    assert young_interval_s(blocking_s=200, mtbf_s=4 * HOUR) == pytest.approx(2400, rel=1e-12)
    assert young_interval_s(blocking_s=50, mtbf_s=4 * HOUR) == pytest.approx(1200, rel=1e-12)


def test_twice_off_the_optimum_costs_three_points():
    about = {"blocking_s": 180, "mtbf_s": 6 * HOUR, "restart_s": 720}
    best = young_interval_s(blocking_s=180, mtbf_s=6 * HOUR)
    for factor in (2, 0.5):
        assert overhead(best * factor, **about) - overhead(best, **about) == pytest.approx(
            0.03, abs=5e-3
        )


@given(seconds, seconds, st.floats(0.01, 100))
def test_off_the_optimum_the_optimisable_part_grows_as_told(c: float, m: float, factor: float):
    best = young_interval_s(blocking_s=c, mtbf_s=m)
    ratio = overhead(best * factor, blocking_s=c, mtbf_s=m) / overhead(best, blocking_s=c, mtbf_s=m)
    assert ratio == pytest.approx((factor + 1 / factor) / 2, rel=1e-9)


@pytest.mark.parametrize(("minutes", "ettr"), [(60, 0.684), (30, 0.819), (10, 0.910), (5, 0.932)])
def test_effective_training_time_of_two_thousand_nodes(minutes: float, ettr: float):
    """arXiv 2410.21680 gives 0.93 for the last; 6.50e-3 failures a node-day, 5 minutes restart."""
    found = effective_training_time(
        minutes * 60.0, blocking_s=0.0, mtbf_s=24 * HOUR / (2000 * 6.50e-3), restart_s=300.0
    )
    assert found == pytest.approx(ettr, abs=5e-4)


def test_effective_training_time_is_none_where_no_work_gets_done():
    about = {"mtbf_s": 100.0, "restart_s": 99.0}
    assert effective_training_time(10.0, blocking_s=1.0, **about) == 0.0
    assert effective_training_time(1.0, blocking_s=1.0, **about) == pytest.approx(0.0025)


def test_background_writes():
    about = {"snapshot_s": 2.0, "write_s": 100.0, "slowdown": 0.02, "mtbf_s": 5000.0}
    assert async_interval_s(**about) == pytest.approx(200.0, rel=1e-12)  # C_eff = 4
    assert async_overhead(200.0, restart_s=50.0, **about) == pytest.approx(
        4 / 200 + (100 + 100 + 50) / 5000, rel=1e-12
    )
    assert async_interval_s(**about | {"write_s": 300.0, "slowdown": 0.0}) == 300.0


@given(seconds, seconds, st.floats(0, 1), seconds)
def test_one_write_is_in_flight_and_none_is_the_synchronous_case(s, p, a, m):
    interval = async_interval_s(snapshot_s=s, write_s=p, slowdown=a, mtbf_s=m)
    assert interval >= p
    synchronous = async_interval_s(snapshot_s=s, write_s=0.0, slowdown=a, mtbf_s=m)
    assert synchronous == young_interval_s(blocking_s=s, mtbf_s=m)


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.95, 1, 3.841458820694124),
        (0.95, 4, 9.487729036781154),
        (0.95, 10, 18.307038053275146),
        (0.05, 10, 3.940299136119060),
        (0.5, 2, 2 * math.log(2)),
        (0.95, 100, 124.34211340400407),
    ],
)
def test_chi_square_quantiles(probability: float, degrees: int, value: float):
    """Tabulated values."""
    assert chi_square_quantile(probability, degrees) == pytest.approx(value, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-6))
def test_two_degrees_have_a_closed_form(p: float):
    assert chi_square_quantile(p, 2) == pytest.approx(-2 * math.log1p(-p), rel=1e-8)


@given(st.integers(0, 200), st.sampled_from([0.05, 0.5, 0.95]))
def test_even_degrees_are_a_poisson_tail(k: int, p: float):
    mean = chi_square_quantile(p, 2 * k + 2) / 2
    terms = [math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1)]
    assert math.fsum(terms) == pytest.approx(1 - p, rel=1e-8)


def test_mtbf_from_counts():
    none = Mtbf.observed(0, 2.996)
    assert none.low_s == pytest.approx(1, abs=5e-4)
    assert none.high_s == math.inf
    assert Mtbf.observed(466, 54 * 24).high_s == pytest.approx(2.78, abs=5e-3)  # Llama 3, hours
    assert Mtbf.observed(419, 54 * 24).high_s == pytest.approx(3.09, abs=5e-3)  # unexpected ones
    assert Mtbf.observed(419, 54 * 24).high_s == pytest.approx(3.09, abs=5e-3)
    assert Mtbf.known(7.0) == Mtbf(7.0, 7.0, 7.0)


@given(st.integers(0, 300), seconds)
def test_mtbf_is_ordered_and_no_failure_raises_it(k: int, t: float):
    now, after = Mtbf.observed(k, t), Mtbf.observed(k + 1, t)
    assert 0 < now.low_s < now.middle_s < now.high_s
    assert after.low_s < now.low_s
    assert after.middle_s < now.middle_s
    assert after.high_s < now.high_s


@pytest.mark.parametrize("formula", [young_interval_s, daly_interval_s, exact_interval_s])
@given(c=seconds, m=seconds, factor=GROWN)
def test_intervals_are_positive_and_grow(formula: Callable, c: float, m: float, factor: float):
    if formula is daly_interval_s:
        c = min(c, m)  # it jumps down and up again where it is capped
        factor = min(factor, 1.5)
    interval = formula(blocking_s=c, mtbf_s=m)
    assert 0 < interval < math.inf
    assert formula(blocking_s=c * factor, mtbf_s=m) >= interval * (1 - 1e-9)
    assert formula(blocking_s=c, mtbf_s=m * factor) > interval


@given(st.floats(0, 1e-3), seconds)
def test_young_and_daly_are_exact_where_c_is_small(ratio: float, m: float):
    exact = exact_interval_s(blocking_s=ratio * m, mtbf_s=m)
    assert daly_interval_s(blocking_s=ratio * m, mtbf_s=m) == pytest.approx(exact, rel=1e-5)
    assert young_interval_s(blocking_s=ratio * m, mtbf_s=m) == pytest.approx(exact, rel=0.02)


@given(c=seconds, m=seconds, r=st.floats(0, 1e7), factor=st.floats(0.01, 100))
def test_efficiency_is_a_share_and_no_interval_beats_the_exact_one(c, m, r, factor):
    best = exact_interval_s(blocking_s=c, mtbf_s=m)
    most = efficiency(best, blocking_s=c, mtbf_s=m, restart_s=r)
    other = efficiency(best * factor, blocking_s=c, mtbf_s=m, restart_s=r)
    assert 0 <= other <= most * (1 + 1e-9) <= 1 + 1e-9
    assert efficiency(best, blocking_s=c, mtbf_s=m, restart_s=r + 1) <= most


def test_extremes_are_numbers():
    assert exact_interval_s(blocking_s=0, mtbf_s=1) == 0
    assert exact_interval_s(blocking_s=1e-40, mtbf_s=1) == pytest.approx(math.sqrt(2) * 1e-20)
    assert exact_interval_s(blocking_s=1e9, mtbf_s=1) == 1
    assert efficiency(1e9, blocking_s=1, mtbf_s=1e-9) == 0


def test_a_run_shorter_than_its_interval_saves_once_at_the_end():
    assert [num_saves_before_end(100, run) for run in (0, 99, 100, 101, 200, 350)] == [
        *(0, 0, 0),
        *(1, 1, 3),
    ]


def test_a_workload_that_carries_is_not_refused():
    check_feasible(blocking_s=180, mtbf_s=6 * HOUR, restart_s=720)
    check_feasible(blocking_s=0, mtbf_s=100)


def test_a_workload_that_cant_run_is_told_what_would_have_to_change():
    with pytest.raises(TapelineError) as error:
        check_feasible(blocking_s=60, mtbf_s=30, restart_s=5)
    assert str(error.value) == (
        "blocking 60 s, MTBF 30 s, restart 5 s: expected an overhead below 100 % and an efficiency "
        "of 50 % or more, found 217 % and 4.4 % at the best interval. This workload can't run on "
        "this infrastructure: raise the MTBF to about 323.5 s, or lower the blocking time to "
        "about 3.515 s."
    )


WAYS = {
    "raise the MTBF": "mtbf_s",
    "lower the blocking time": "blocking_s",
    "lower the restart time": "restart_s",
}


@given(seconds, seconds, st.floats(0, 1e6), st.floats(0.05, 0.95))
def test_each_change_that_is_named_is_enough_and_needed(c, m, r, floor):
    inputs = {"blocking_s": c, "mtbf_s": m, "restart_s": r}
    try:
        check_feasible(**inputs, floor=floor)
    except TapelineError as error:
        for way in error.fix.partition(": ")[2].split(", or "):
            name, value = way.removesuffix(" s").rsplit(" to about ", 1)
            better = 1.01 if name == "raise the MTBF" else 0.99
            check_feasible(**inputs | {WAYS[name]: float(value) * better}, floor=floor)
            if float(value):
                with pytest.raises(TapelineError):
                    check_feasible(**inputs | {WAYS[name]: float(value) / better}, floor=floor)
    else:
        check_feasible(**inputs | {"mtbf_s": 2 * m}, floor=floor)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_inputs_are_named(value: float):
    with pytest.raises(TapelineError) as error:
        young_interval_s(blocking_s=value, mtbf_s=1)
    assert str(error.value) == (
        f"blocking_s: expected a finite number, 0 or more, found {value:g}. "
        "Give a measured or a planned number."
    )
    with pytest.raises(TapelineError, match="mtbf_s: expected a finite number above 0"):
        exact_interval_s(blocking_s=1, mtbf_s=value)
    with pytest.raises(TapelineError, match="floor: expected a share above 0 and below 1"):
        check_feasible(blocking_s=1, mtbf_s=1, floor=value)
