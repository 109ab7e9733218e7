"""`tapeline watch`: a run at one moment, from the ends of its files, and as a terminal shows it."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from helpers_runs import new_record, write_run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import FakeClock, SystemClock, utc
from tapeline.errors import RunError
from tapeline.files import Journal, tail_records
from tapeline.ledger import Account, Ledger, Times, ledger_path
from tapeline.ledger.tail import pace_per_s
from tapeline.report.live_frame import duration, frame, sparkline
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder, live
from tapeline.runs.live import LiveRank, LiveRun, LiveView
from tapeline.supervise.history import History
from tapeline.world import World

ENDED = utc(time.time_ns())


def begun(folder, ranks=1, *, host=None, name="r"):
    """A run whose first life has begun."""
    run = RunFolder(folder, SystemClock())
    run.create(new_record(name=name))
    life = {"attempt": 1, "started": "s", "world_size": ranks, "from_step": 0}
    with Journal(run.attempts_path) as journal:
        journal.append({**life, "host": host or socket.gethostname()})
    return run


def end(run, how="finished"):
    with Journal(run.attempts_path) as journal:
        journal.append({"attempt": 1, "ended": ENDED, "how": how, "step": 3, "evidence": "so"})


def look(run):
    return LiveView(run.path, SystemClock()).look()


def drawn(seen, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame(seen, width))
    return console.export_text()


def test_a_run_that_goes_on_is_told_by_rank_loss_time_and_pace(tmp_path):
    run = begun(tmp_path / "run", ranks=2)
    with (
        Ledger(run.path, world=World(0, 2, 0)) as first,
        Ledger(run.path, world=World(1, 2, 1)) as second,
        MetricsJournal(run.metrics_path(0), 1) as metrics,
    ):
        for step in (1, 2, 3):
            for ledger in (first, second):
                ledger.switch("compute")
                ledger.step_done(step)
                with ledger.span("checkpoint"):
                    pass  # ends a line
        metrics.losses(3, [3.0, math.nan, 1.0])
        metrics.machine(3, MachineFigures(samples_per_s=120.0))
        seen = look(run)
        text = drawn(seen)
        printed = CliRunner().invoke(app, ["watch", str(run.path), "--once"])
        told = CliRunner().invoke(app, ["watch", str(run.path), "--json"])
    assert (seen.state, seen.ended, seen.healthy, seen.step) == ("running", False, True, 3)
    assert [(rank.rank, rank.step, rank.lives) for rank in seen.ranks] == [
        (0, 3, True),
        (1, 3, True),
    ]
    assert seen.ranks[0].samples_per_s == 120.0
    assert seen.ranks[1].samples_per_s is None
    assert seen.losses[0] == (1, 3.0) and math.isnan(seen.losses[1][1])
    assert seen.pace_per_s and seen.eta_s == pytest.approx(37 / seen.pace_per_s)
    assert "step 3 of 40" in text and "█×▁" in text and "steps/s" in text
    assert printed.exit_code == told.exit_code == 0
    assert "running" in printed.stdout
    found = json.loads(told.stdout)
    assert found["losses"] == [[1, 3.0], [2, "nan"], [3, 1.0]]
    assert sum(found["buckets_ns"].values()) > 0


LOOP = """
import sys, time
from tapeline.ledger import Ledger
ledger = Ledger(sys.argv[1])
for step in range(1, 10_000):
    ledger.switch("compute")
    ledger.step_done(step)
    print(step, flush=True)
    time.sleep(0.01)
"""


def test_a_killed_process_is_dead_and_under_a_supervisor_not_the_end(tmp_path):
    run = begun(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    while process.stdout.readline() != "5\n":
        pass
    assert look(run).state == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    seen = look(run)
    assert (seen.state, seen.ended, seen.healthy) == ("dead", True, False)
    assert seen.step >= 5 and seen.eta_s is None
    assert seen.account and seen.account.job.wall_ns > 0
    printed = CliRunner().invoke(app, ["watch", str(run.path)])
    assert printed.exit_code == 1
    assert "gone" in printed.stdout and "no end is told" in printed.stdout

    history = History(run.path)
    assert not look(run).supervised
    with history.locked(0):
        seen = look(run)
        assert seen.supervised and not seen.ended
        end(run, "killed")
        assert not look(run).ended
    assert look(run).ended


@pytest.mark.parametrize(
    ("how", "healthy"), [("finished", True), ("stopped", True), ("failed", False)]
)
def test_an_end_that_is_told_ends_it(tmp_path, how, healthy):
    run = RunFolder(write_run(tmp_path / "run", new_record(), how=how), FakeClock())
    seen = look(run)
    assert (seen.state, seen.ended, seen.healthy, seen.step) == (how, True, healthy, 40)
    assert seen.account is None and "no ledger of any rank" in seen.problem
    assert "goodput   unknown: " in drawn(seen, 300)
    assert max(map(len, drawn(seen, 80).splitlines())) <= 80
    printed = CliRunner().invoke(app, ["watch", str(run.path)])
    assert printed.exit_code == (0 if healthy else 1)


def test_what_is_not_seen_is_said_to_be_unknown(tmp_path):
    run = begun(tmp_path / "run", ranks=2, host="elsewhere")
    with Ledger(run.path):
        seen = look(run)
    assert seen.state == "unknown" and not seen.healthy and not seen.ended
    assert seen.ranks == (LiveRank(0, 0, "startup"), LiveRank(1))
    assert "not seen from here" in drawn(seen)


def test_after_a_reboot_a_number_is_no_process(tmp_path, monkeypatch):
    run = begun(tmp_path / "run", ranks=2)
    with Ledger(run.path, world=World(0, 2, 0)), Ledger(run.path, world=World(1, 2, 1)):
        assert look(run).state == "running"
        monkeypatch.setattr(live, "boot_id", lambda: "another")
        seen = look(run)
    assert [rank.lives for rank in seen.ranks] == [False, None]
    assert (seen.state, seen.ended) == ("dead", True)


def test_a_run_without_a_life_has_not_begun(tmp_path):
    run = RunFolder(tmp_path / "run", SystemClock())
    run.create(new_record())
    seen = look(run)
    assert (seen.state, seen.ended, seen.step) == ("not begun", False, 0)
    assert "step 0 of 40" in drawn(seen)


def test_no_run_is_told(tmp_path):
    with pytest.raises(RunError, match="expected the folder of a run"):
        LiveView(tmp_path, SystemClock())


def run_of(*ranks, **more):
    return LiveRun("r", 100, lives=({"attempt": 1},), ranks=ranks, **more)


def test_stale_and_broken_are_not_healthy():
    here = LiveRank(0, 5, "compute", 1.0, True)
    stuck = LiveRank(1, 5, "compute", 61.0, True)
    saving = LiveRank(1, 5, "checkpoint", 61.0, True)
    gone = LiveRank(1, 5, "compute", 1.0, False)
    states = [run_of(here, one).state for one in (stuck, saving, gone)]
    assert states == ["stale", "running", "broken"]
    assert run_of(gone).state == "dead"
    assert "stale" in drawn(run_of(here, stuck))


def test_of_many_ranks_those_behind_are_shown():
    ranks = [LiveRank(rank, 10, "compute", 0.0, True) for rank in range(40)]
    ranks[33] = LiveRank(33, 9, "compute", 2.0, True)
    ranks[39] = LiveRank(39, 10, "compute", 2.0, False)
    text = drawn(run_of(*ranks))
    assert "33" in text and "gone" in text and "and 24 more ranks" in text


def test_text_from_outside_is_no_command_to_the_terminal(tmp_path):
    run = begun(tmp_path / "run", name="a\x1b[2Jb")
    with Journal(run.findings_path) as journal:
        journal.append({"attempt": 1, "watcher": "spike", "step": 3, "seen": "\x1b]0;x\x07"})
    end(run, "failed")
    text = CliRunner().invoke(app, ["watch", str(run.path), "--once"]).stdout
    assert "\x1b[2J" not in text and "\x07" not in text and "spike" in text


def test_losses_of_steps_done_again_stand_once(tmp_path):
    run = begun(tmp_path / "run")
    with MetricsJournal(run.metrics_path(0), 1) as metrics:
        metrics.losses(4, [4.0, 3.0, 2.0, 1.0])
    with MetricsJournal(run.metrics_path(0), 2) as metrics:
        metrics.losses(3, [9.0])
    assert look(run).losses == ((1, 4.0), (2, 3.0), (3, 9.0))


def test_a_resumed_lifes_own_number_of_steps_counts(tmp_path):
    run = begun(tmp_path / "run")
    run.attempt_path(1).parent.mkdir()
    run.attempt_path(1).write_text(json.dumps({"config": {"training": {"steps": 70}}}))
    assert look(run).target == 70


def test_shares_of_time_are_a_bar_with_its_legend():
    times = Times()
    times.buckets_ns |= {"useful": 60, "lost": 40}
    account = Account((), times, None, (), ())
    text = drawn(run_of(account=account))
    assert "60 %  " + "█" * 36 + "░" * 24 in text
    assert "█ useful 60 %  ░ lost 40 %" in text


def test_a_narrow_terminal_breaks_no_line(tmp_path):
    run = begun(tmp_path / "run", ranks=2)
    with (
        Ledger(run.path, world=World(0, 2, 0)) as ledger,
        MetricsJournal(run.metrics_path(0), 1) as metrics,
    ):
        for step in range(1, 4):
            for phase in ("data", "compute", "evaluation", "other"):
                ledger.switch(phase)
                time.sleep(0.002)
            ledger.step_done(step)
        metrics.losses(3, [3.0, 2.0, 1.0])
        lines = drawn(look(run), 40).splitlines()
    assert max(map(len, lines)) <= 40
    begins = ("r  ", "step 3 of", "rank ", "   0 ", "   1 ", "loss  ", "goodput ", " " * 10)
    rest = [line for line in lines if line and not line.startswith(begins)]
    assert all(line.startswith(("attempt ", "findings ")) or "steps/s" in line for line in rest)
    assert "attempt   1 from step 0, which goes on" in lines
    (bar,) = (line for line in lines if line.startswith("goodput "))
    assert "%" in bar
    legend = [part for line in lines for part in line[10:].split("  ") if part.endswith(" %")]
    assert any(re.fullmatch(r"█ useful [\d.]+ %", part.strip()) for part in legend)


def test_the_screen_follows_a_run_to_its_end(tmp_path):
    run = begun(tmp_path / "run")
    ours, its = pty.openpty()
    shown = []

    def read():
        try:
            while text := os.read(ours, 4096):
                shown.append(text)
        except OSError:
            pass  # how a terminal says that nobody writes to it any more

    with Ledger(run.path) as ledger:
        process = subprocess.Popen(
            [sys.executable, "-m", "tapeline", "watch", str(run.path)], stdout=its, stderr=its
        )
        os.close(its)
        reader = threading.Thread(target=read)
        reader.start()
        while b"running" not in b"".join(shown):
            time.sleep(0.02)
        ledger.step_done(1)
        end(run)
    assert process.wait() == 0
    reader.join()
    os.close(ours)
    assert b"finished" in b"".join(shown)


@given(st.lists(st.floats(), max_size=500))
def test_a_sparkline_fits_whatever_it_is_made_of(values):
    line = sparkline(values, width=20)
    assert len(line) <= 20 and bool(line) == bool(values)
    assert set(line) <= set("▁▂▃▄▅▆▇█×")


def test_durations_are_said_as_people_say_them():
    assert [duration(s) for s in (4.2, 59.99, 185, 7500)] == [
        "4.2 s",
        "1 min 00 s",
        "3 min 05 s",
        "2 h 05 min",
    ]


def test_the_tail_of_a_journal_is_its_last_whole_records(tmp_path):
    path = tmp_path / "journal.jsonl"
    assert tail_records(path) == []
    path.write_bytes(b'{"a":1}\n{"a":2}\nnonsense\n[3]\n{"a":4}\n{"a":')
    assert tail_records(path) == [{"a": 1}, {"a": 2}, {"a": 4}]
    assert tail_records(path, most_bytes=26) == [{"a": 4}]


def test_the_pace_is_that_of_the_attempt_at_the_end(tmp_path):
    path = ledger_path(tmp_path, 0)
    assert pace_per_s(path, 1) is None
    lines = [(1, 10, 1), (1, 30, 2), (2, 20, 5), (2, 40, 9)]
    with Journal(path) as journal:
        for attempt, step, end_s in lines:
            journal.append({"attempt": attempt, "step": step, "end": end_s * 10**9})
    assert pace_per_s(path, 1) == 20.0
    assert pace_per_s(path, 2) == 5.0
    assert pace_per_s(path, 3) is None
