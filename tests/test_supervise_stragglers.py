"""Slow ranks: judged by their own work, told, and left out where that is faster."""

from __future__ import annotations

import json

import pytest
from helpers_supervise import ended, plan, state_after, supervisor
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import FakeClock
from tapeline.config import TrainingConfig
from tapeline.ledger import Ledger, ledger_path, read_ledger, step_times_after
from tapeline.supervise.alerts import Alerts
from tapeline.supervise.elastic import Ranks, heaviest, load
from tapeline.supervise.places import Places
from tapeline.supervise.quarantine import Quarantine, Rule
from tapeline.supervise.stragglers import Pace, SlowLimits, judge
from tapeline.training.tree import lanes_of
from tapeline.world import World

S = 1_000_000_000
LIMITS = SlowLimits(persistent=4, num_windows=5)
ALIKE = dict.fromkeys(range(4), 1.0)


def windows(*times):
    """From the times of each rank, one a window."""
    return [dict(enumerate(window)) for window in zip(*times, strict=True)]


def test_a_rank_that_lags_persistently_is_found_and_chance_is_not():
    steady = ([1.0, 1.1, 1.0, 0.9, 1.0], [1.1, 1.0, 1.0, 1.0, 0.9], [1.0, 0.9, 1.1, 1.0, 1.0])
    (slow,) = judge(windows(*steady, [2.0, 2.0, 1.0, 2.0, 2.0]), ALIKE, {}, LIMITS)
    assert (slow.rank, slow.behind, slow.num_slow, slow.times_best) == (3, True, 4, 2 / 0.9)
    assert slow.text == (
        "rank 3 is slow in 4 of 5 windows: its own part of a step takes 2.2 times the best rank's"
    )
    assert judge(windows(*steady, [2.0, 2.0, 1.0, 1.0, 2.0]), ALIKE, {}, LIMITS) == []
    assert judge(windows(*steady, [2.0] * 5)[:4], ALIKE, {}, LIMITS) == []  # too few to tell
    turns = [[2.0 if turn == rank else 1.0 for turn in (0, 1, 2, 3, 0)] for rank in range(4)]
    assert judge(windows(*turns), ALIKE, {}, LIMITS) == []


def test_ranks_that_differ_among_themselves_need_more_to_stand_out():
    spread = ([1.0] * 5, [1.4] * 5, [1.8] * 5)
    assert judge(windows(*spread, [2.2] * 5), ALIKE, {}, LIMITS) == []
    assert [s.rank for s in judge(windows(*spread, [4.0] * 5), ALIKE, {}, LIMITS)] == [3]


def test_of_two_ranks_the_slower_is_found():
    two = dict.fromkeys(range(2), 1.0)
    assert judge(windows([1.0] * 5, [1.29] * 5), two, {}, LIMITS) == []
    assert [s.rank for s in judge(windows([1.0] * 5, [1.31] * 5), two, {}, LIMITS)] == [1]


def test_a_rank_with_more_to_do_is_no_straggler_but_may_become_slower_than_it_was():
    training = TrainingConfig(lanes=4)
    loads = {rank: load(rank, 3, training) for rank in range(3)}
    assert sorted(loads.values()) == [0.25, 0.25, 0.5]
    heavy = max(loads, key=loads.__getitem__)
    times = [[2.0] * 5 if rank == heavy else [1.0] * 5 for rank in loads]
    assert judge(windows(*times), loads, dict.fromkeys(loads, 1.5), LIMITS) == []
    (slow,) = judge(windows(*times), loads, {heavy: 1.0}, LIMITS)
    assert (slow.rank, slow.behind, slow.times_best, slow.times_own_best) == (heavy, False, None, 2)
    assert slow.text.endswith("takes 2.0 times its own best")


@given(st.integers(0, 5), st.data())
def test_loads_are_those_of_the_lanes(doublings, data):
    lanes = 2**doublings
    number = data.draw(st.integers(1, lanes))
    training = TrainingConfig(lanes=lanes)
    loads = [load(rank, number, training) for rank in range(number)]
    assert loads == [len(lanes_of(rank, number, lanes)) / lanes for rank in range(number)]
    assert heaviest(number, training) == max(loads)
    assert sum(loads) == 1


def seconds_of_work(ledger, clock, step, own_ms, seconds):
    """Steps of 100 ms, `own_ms` of them the rank's own work."""
    for _ in range(seconds * 10):
        step += 1
        ledger.switch("compute")
        clock.advance(own_ms * S // 1000)
        ledger.switch("communication")
        clock.advance((100 - own_ms) * S // 1000)
        ledger.step_done(step)
    return step


def write(run, rank, *parts, attempt=1):
    """The ledger of one rank: (own milliseconds a step, seconds) after each other."""
    clock, step = FakeClock(), 0
    with Ledger(run, world=World(rank, 2), attempt=attempt, clock=clock) as ledger:
        for own_ms, seconds in parts:
            step = seconds_of_work(ledger, clock, step, own_ms, seconds)


def test_ledgers_of_an_attempt_are_followed_and_a_straggler_is_told_once(tmp_path):
    for rank in (0, 1):  # an attempt before, in which the other rank was slow
        write(tmp_path, rank, (80 - 60 * rank, 20))
    clock = FakeClock()
    pace = Pace(tmp_path, [0.5, 0.5], LIMITS, clock)
    assert pace.look() == []
    for rank in (0, 1):
        write(tmp_path, rank, (20, 8), (20 + 60 * rank, 8), attempt=2)
    assert pace.look() == []  # within the second
    clock.advance(S)
    (slow,) = pace.look()
    assert (slow.rank, slow.behind) == (1, True)
    assert slow.times_best == pytest.approx(4, rel=0.15)  # bins of times are up to 12.5 % wide
    clock.advance(S)
    assert pace.look() == []


def test_a_rank_alone_is_held_against_its_own_best(tmp_path):
    clock = FakeClock()
    pace = Pace(tmp_path, [1.0], LIMITS, clock)
    write(tmp_path, 0, (20, 8))
    clock.advance(S)
    assert pace.look() == []
    write(tmp_path, 0, (60, 8), attempt=2)  # the same attempt, to a pace
    clock.advance(S)
    (slow,) = pace.look()
    assert (slow.behind, slow.times_best) == (False, None)
    assert slow.times_own_best == pytest.approx(3, rel=0.15)


def test_a_ledger_is_read_on_from_where_it_was_read(tmp_path):
    path = ledger_path(tmp_path, 0)
    assert step_times_after(path, 0) == ([], 0)
    write(tmp_path, 0, (20, 3))
    first, read = step_times_after(path, 0)
    assert first == list(read_ledger(path).step_times())
    with path.open("a") as stream:
        stream.write('{"steps":1}\n{"steps":1,"st')  # a line that is no record, and half of one
    again, end = step_times_after(path, read)
    assert (again, end) == ([], path.stat().st_size - len('{"steps":1,"st'))
    path.write_bytes(path.read_bytes()[:end])
    write(tmp_path, 0, (20, 2), attempt=2)
    second, _ = step_times_after(path, end)
    assert len(second) == 2
    assert [times.attempt for times in second] == [2, 2]


def places(tmp_path, ranks, training):
    clock = FakeClock()
    quarantine = Quarantine(tmp_path / "q.json", Rule())
    said: list[str] = []
    alerts = Alerts(said.append, clock)
    return Places(Ranks.parse(ranks), training, quarantine, None, alerts, clock), said


def test_a_place_is_given_up_only_where_the_rest_is_faster(tmp_path):
    here, said = places(tmp_path, "2:4", TrainingConfig(lanes=4))
    # Of four lanes on three ranks, one rank has two: twice as long for everybody.
    assert not here.evict(2, 4, 1.9, "slow")
    assert here.evict(2, 4, 2.1, "slow")
    assert here.choose() == [0, 1, 3]
    assert said[0].endswith(":2 is in quarantine: slow")
    fixed, _ = places(tmp_path / "fixed", "4", TrainingConfig(lanes=4))
    assert not fixed.evict(2, 4, 9.0, "slow")


def test_a_spare_place_takes_over_from_a_slow_one_at_any_factor(tmp_path):
    here, _ = places(tmp_path, "2:5", TrainingConfig(lanes=4))
    assert here.choose() == [0, 1, 2, 3]
    assert here.evict(2, 4, 1.4, "slow")
    assert here.choose() == [0, 1, 3, 4]


@pytest.mark.parametrize("evict", [True, False], ids=["evict", "alert"])
def test_a_slow_rank_of_a_run_is_told_and_by_policy_left_out(tmp_path, evict):
    plan(tmp_path, (1, 1, "each", "slow"))
    said: list[str] = []
    slow = SlowLimits(persistent=2, num_windows=2)
    outcome = supervisor(tmp_path, "2:3", 50, said=said, slow=slow, evict=evict).supervise()
    assert outcome.exit_code == 0
    left = 2 if evict else 3
    assert json.loads(outcome.output) == {"state": state_after(50), "ranks": left}
    lives = [(life["how"], life["ranks"], life["planned"]) for life in ended(tmp_path)]
    assert lives == [("preempted", 3, True)] * evict + [("finished", left, False)]
    told = [line for line in said if "is slow in 2 of 2 windows" in line]
    assert "rank 1 is slow" in told[0]
    path = tmp_path / "run/supervise/quarantine.json"
    assert path.exists() == evict
    if evict:
        (place,) = json.loads(path.read_text())
        assert place.endswith(":1")
