"""`tapeline diagnose` on real runs with planted causes, and on folders with little in them."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from helpers_ranks import FORKS
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import FakeClock, SystemClock
from tapeline.diagnosis import collect, diagnose
from tapeline.errors import RunError
from tapeline.ledger import Ledger, writer
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder, live
from tapeline.signals import Exit
from tapeline.world import World

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def planted():
    """The module of planted causes, which the benchmark tries 20 times each."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("planted")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def bed(planted, tmp_path_factory):
    return planted.Bed(tmp_path_factory.mktemp("planted"), FORKS)


@pytest.mark.parametrize(
    "name",
    [
        "healthy",
        "slow loader",
        "slow loaders",
        "slow rank",
        "slow rank under ddp",
        "slow rank under fsdp2",
        "stopped in a collective",
        "a rank raises",
        "killed",
        "slow checkpoint",
    ],
)
def test_a_planted_cause_is_told(planted, bed, name):
    plant = planted.PLANTS[name]
    run, end = bed.grow(plant, name.replace(" ", "-"), steps=60)
    try:
        found = diagnose(run)
        printed = CliRunner().invoke(app, ["diagnose", str(run), "--json"])
    finally:
        end()
    assert plant.told_by(found.verdicts[0]), found.verdicts
    assert found.lives is plant.alive
    assert printed.exit_code == (0 if name == "healthy" else 1)
    assert json.loads(printed.stdout)["verdicts"][0]["kind"] == plant.kind


def life(
    run: Path, rank: int = 0, world_size: int = 1, *, clock: FakeClock | None = None
) -> Ledger:
    """The ledger of a rank that has begun."""
    return Ledger(run, world=World(rank, world_size), clock=clock, attempt=1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run", SystemClock())
    folder.create({"format": "tapeline run", "version": 1})
    return folder


def test_a_run_without_a_life_is_an_error(run):
    with pytest.raises(RunError, match="expected a run of which a life has begun, found none in"):
        diagnose(run.path)
    shown = CliRunner().invoke(app, ["diagnose", str(run.path.parent)])
    assert isinstance(shown.exception, RunError)


def test_what_was_not_seen_is_told_and_not_healthy(run):
    run.begin_attempt(from_step=0, world_size=2)
    found = diagnose(run.path)
    assert found.verdicts[0].kind == "unknown"
    assert any("any trace of 2 of 2 ranks" in line for line in found.verdicts[0].evidence)
    assert not found.healthy
    shown = CliRunner().invoke(app, ["diagnose", str(run.path)])
    assert shown.exit_code == 1
    assert "unknown" in shown.stdout


def test_ends_are_read_from_where_they_stand(run):
    run.begin_attempt(from_step=0, world_size=4)
    ledgers = [life(run.path, rank, 4) for rank in range(4)]
    ledgers[0].close()
    ledgers[1].close("Preempted")
    told = {"attempt": 1, "exception": "ValueError: bad row", "wall_ns": 5}
    run.errors_path(2).parent.mkdir()
    run.errors_path(2).write_text(json.dumps(told) + "\nTraceback…\n")
    supervised = run.path / "supervise" / "attempt-0001"
    supervised.mkdir(parents=True)
    for rank, content in {
        1: {"pid": os.getpid(), "code": 75, "ended_ns": 6},
        3: {"pid": os.getpid(), "code": -9, "ended_ns": 7},
    }.items():
        (supervised / f"rank-{rank}.json").write_text(json.dumps(content))
    ends = {rank.rank: rank.exit for rank in collect(run.path).ranks}
    assert ends == {
        0: Exit(code=0),
        1: Exit(code=75, time_ns=6),
        2: Exit(exception="ValueError: bad row", time_ns=5),
        3: Exit(signal=9, time_ns=7),
    }
    hang = {"ranks": [{"rank": 3, "age_s": 61.0}]}
    (supervised / "hang.json").write_text(json.dumps(hang))
    (last,) = [rank for rank in collect(run.path).ranks if rank.rank == 3]
    assert last.exit == Exit(signal=9, time_ns=7, by_supervisor=True)
    assert last.heartbeat is not None
    assert last.heartbeat.age_s == 61.0
    for ledger in ledgers:
        ledger.close()


def test_another_lifes_exception_is_not_this_ones(run):
    run.begin_attempt(from_step=0, world_size=1)
    run.errors_path(0).parent.mkdir()
    told = {"attempt": 7, "exception": "ValueError: old", "wall_ns": 5}
    run.errors_path(0).write_text(json.dumps(told) + "\n")
    with life(run.path):
        (rank,) = collect(run.path).ranks
        assert rank.exit is None
        assert rank.process_state in "RS"


def test_of_another_machines_rank_no_process_is_looked_for(run, monkeypatch):
    run.begin_attempt(from_step=0, world_size=2)
    mine = life(run.path, 0, 2)
    monkeypatch.setattr(writer, "boot_id", lambda: "another machine's")
    others = life(run.path, 1, 2)
    zero, one = collect(run.path).ranks
    assert zero.process_state in "RS" and zero.heartbeat
    assert (one.exit, one.process_state, one.heartbeat) == (None, None, None)
    monkeypatch.setattr(live, "boot_id", lambda: "this machine, started again")
    zero, one = collect(run.path).ranks
    assert (zero.exit, one.exit) == (Exit(), None)
    mine.close()
    others.close()


def test_windows_are_of_the_same_steps_on_each_rank_and_of_this_life(run):
    run.begin_attempt(from_step=0, world_size=2)
    for rank, first in ((0, 1), (1, 21)):
        with MetricsJournal(run.metrics_path(rank), 1) as journal:
            for step in range(first + 9, 131, 10):
                times = [1_000_000 * (step - 9 + n) for n in range(10)]
                journal.machine(
                    step, MachineFigures(step_ns=times, collective_wait_ns=[500_000] * 10)
                )
    ledgers = [life(run.path, rank, 2) for rank in range(2)]
    zero, one = (rank.windows for rank in collect(run.path).ranks)
    for ledger in ledgers:
        ledger.close()
    assert len(zero) == len(one) == 11
    assert zero[0].own_s == pytest.approx([1e-3 * step - 5e-4 for step in range(21, 31)])
    assert one[0].own_s == pytest.approx(zero[0].own_s)
    assert zero[0].wait_s == pytest.approx(5e-4)


def test_shares_are_of_the_time_since_startup(run):
    run.begin_attempt(from_step=0, world_size=1)
    clock = FakeClock(wall_ns=10**18)
    ledger = life(run.path, clock=clock)
    clock.advance(10**10)
    for step in range(1, 21):
        for phase, seconds in (("data", 3), ("compute", 6), ("other", 1)):
            ledger.switch(phase)
            clock.advance(seconds * 10**9)
        ledger.step_done(step)
    ledger.close()
    (rank,) = collect(run.path, clock=clock).ranks
    assert rank.shares is not None
    assert rank.shares["starved"] == pytest.approx(0.3)
    assert rank.shares["useful"] == pytest.approx(0.6)
    assert rank.shares["startup"] == 0


def test_of_a_few_steps_there_are_no_shares(run):
    run.begin_attempt(from_step=0, world_size=1)
    clock = FakeClock(wall_ns=10**18)
    with life(run.path, clock=clock) as ledger:
        for step in range(1, 20):
            ledger.switch("data")  # as the first batches are waited for
            clock.advance(10**9)
            ledger.step_done(step)
    (verdict,) = diagnose(run.path, clock=clock).verdicts
    assert "not seen: enough steps in the ledger of 1 of 1 ranks" in verdict.evidence


def lived(run: RunFolder, clock: FakeClock, attempt: int, startup_s: int) -> None:
    """A life of 20 steps of 5 s, a fifth of each a wait for data, after step 0."""
    run.begin_attempt(from_step=0, world_size=1)
    ledger = Ledger(run.path, world=World(0, 1), clock=clock, attempt=attempt)
    clock.advance(startup_s * 10**9)
    for step in range(1, 21):
        for phase, seconds in (("data", 1), ("compute", 4)):
            ledger.switch(phase)
            clock.advance(seconds * 10**9)
        ledger.step_done(step)
    ledger.close()
    run.end_attempt(attempt, how="failed", step=20, evidence="RuntimeError: out of luck")


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (1, "the most of it to steps done again"),
        (900, "went by before the first step"),
        (None, None),
    ],
)
def test_what_took_more_than_a_change_of_the_steps_can_return_comes_first(tmp_path, first, told):
    clock = FakeClock(wall_ns=10**18)
    run = RunFolder(tmp_path / "run", clock)
    run.create({"format": "tapeline run", "version": 1})
    if first:
        lived(run, clock, 1, first)
    lived(run, clock, 1 + bool(first), 1)
    found = diagnose(run.path, clock=clock)
    assert found.verdicts[0].kind == "starvation"
    assert found.verdicts[0].ceiling == pytest.approx(0.2)
    shown = CliRunner().invoke(app, ["diagnose", str(run.path)]).stdout
    assert shown.startswith("of ")
    assert "at most 20 % of the time of steps" in shown
    assert "%" not in shown.replace(" %", "")  # one spelling everywhere
    assert ("first of all: " in shown) is bool(first)
    if told:
        assert found.outweighed.endswith(told)
        assert f"\nfirst of all: {found.outweighed}\n" in shown
        assert "\nattempt 1, failed: RuntimeError: out of luck\n" in shown
    as_json = json.loads(CliRunner().invoke(app, ["diagnose", str(run.path), "--json"]).stdout)
    assert as_json["goodput"] == pytest.approx(found.account.goodput)
    assert as_json["outweighed"] == found.outweighed
    assert as_json["before"] == list(found.before)
