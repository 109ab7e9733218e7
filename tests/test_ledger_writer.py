"""The ledger as it is written: phases that add up, few lines, and what a kill leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers_ledger import S, begin, kill, new_clock, records, steps
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import LedgerError
from tapeline.ledger import (
    PHASES,
    Histogram,
    Ledger,
    Overlap,
    account_of,
    bin_edges_ns,
    bin_of,
    heartbeat_path,
    ledger_path,
    process_began_ns,
    read_heartbeat,
    read_ledger,
    read_ledgers,
)


@pytest.fixture
def clock():
    return new_clock()


def spans(folder, rank=0):
    return [record for record in records(folder, rank) if "attempt" in record]


def spent(line):
    return {phase: line[phase] for phase in PHASES if phase in line}


def test_each_moment_is_in_the_phase_of_its_time(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        clock.advance(1)
        ledger.switch("restore")
        clock.advance(20)
        ledger.switch("data")
        clock.advance(300)
        ledger.switch("transfer")
        clock.advance(4000)
        ledger.switch("compute")
        clock.advance(50000)
        with ledger.span("communication"):
            clock.advance(600000)
        ledger.step_done(1)
        clock.advance(7000000)
        with ledger.span("evaluation"):
            clock.advance(80000000)
            with ledger.span("data"):
                clock.advance(900)
            clock.advance(10000000)
    by_phase = dict.fromkeys(PHASES, 0)
    for line in spans(tmp_path):
        for phase, ns in spent(line).items():
            by_phase[phase] += ns
    assert by_phase == {
        "startup": 1,
        "restore": 20,
        "data": 1200,
        "transfer": 4000,
        "compute": 50000,
        "communication": 600000,
        "checkpoint": 0,
        "evaluation": 90000000,
        "other": 7000000,
    }


def test_batches_are_waited_for_and_computed_with(tmp_path, clock) -> None:
    def slow():
        for batch in "abc":
            clock.advance(7)
            yield batch

    with begin(tmp_path, clock) as ledger:
        seen = []
        for step, batch in enumerate(ledger.batches(slow()), 1):
            seen.append(batch)
            clock.advance(100)
            ledger.step_done(step)
            clock.advance(1000)
    assert seen == ["a", "b", "c"]
    (line,) = spans(tmp_path)
    assert spent(line) == {"data": 21, "compute": 300, "other": 3000}
    assert (line["step"], line["end"]) == (3, 3321)


def test_a_second_of_steps_is_one_line_and_one_distribution(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 2500, step_ns=S // 1000, data_ns=S // 5000)
    found = records(tmp_path)
    assert [line["step"] for line in found if "attempt" in line] == [1000, 2000, 2500]
    times = [line for line in found if "steps" in line]
    assert [sum(line["times"][1::2]) for line in times] == [1000, 1000, 500]
    assert [list(line) for line in found[:1] + found[-1:]] == [
        [
            "begin",
            "run",
            "rank",
            "world_size",
            "from_step",
            "wall_ns",
            "monotonic_ns",
            "boot",
        ],
        ["close", "step", "end", "wall_ns", "how", "failed_writes"],
    ]


def test_a_checkpoint_and_an_evaluation_end_a_line(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 3, step_ns=10)
        with ledger.span("checkpoint"):
            clock.advance(5)
        steps(ledger, clock, 3, 4, step_ns=10)
        with ledger.span("evaluation"):
            clock.advance(6)
        steps(ledger, clock, 4, 6, step_ns=10)
        ledger.flush()
        ledger.switch("data")
        clock.advance(3)
    assert [(line["step"], line["end"], line.get("partial")) for line in spans(tmp_path)] == [
        (3, 35, None),
        (4, 51, None),
        (6, 71, None),
        (6, 74, 1),
    ]


def test_what_an_exception_ends_says_so(tmp_path, clock) -> None:
    with pytest.raises(KeyError), begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 2)
        raise KeyError("x")
    assert records(tmp_path)[-1]["how"] == "KeyError"
    ledger.close()  # as a hook that can't know would
    assert sum("close" in record for record in records(tmp_path)) == 1


def test_an_attempt_is_one_more_than_the_last_or_the_one_given(tmp_path, clock) -> None:
    begin(tmp_path, clock).close()
    begin(tmp_path, clock).close()
    begin(tmp_path, clock, attempt=7).close()
    begin(tmp_path, clock).close()
    assert [b.attempt for b in read_ledger(ledger_path(tmp_path, 0)).begins] == [1, 2, 7, 8]


def test_wrong_use_is_told(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock, attempt=3, from_step=5)
    with pytest.raises(LedgerError) as caught:
        ledger.switch("dataa")
    assert str(caught.value) == (
        "phase: expected one of startup, restore, data, transfer, compute, communication, "
        "checkpoint, evaluation, other, found 'dataa'. Name one of these; \"other\" is what has "
        "no name."
    )
    with pytest.raises(LedgerError) as caught:
        ledger.step_done(5)
    assert str(caught.value) == (
        "step 5: expected a step after 5, found one that is done. Count steps over the whole run, "
        "and give `from_step` when resuming."
    )
    ledger.close()
    with pytest.raises(LedgerError) as caught:
        ledger.step_done(6)
    assert str(caught.value) == (
        "step 6: expected an open ledger, found one that is closed. Keep the loop inside its "
        "`with` block."
    )
    with pytest.raises(LedgerError) as caught:
        begin(tmp_path, clock, attempt=3)
    assert str(caught.value) == (
        f"{ledger_path(tmp_path, 0)}, attempt 3: expected an attempt after 3, found one that is "
        "in the ledger. Give each life of the run a number of its own, or leave the number out."
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError) as caught:
        Ledger(tmp_path / "file")
    assert str(caught.value) == (
        f"{ledger_path(tmp_path / 'file', 0)}: expected a ledger that can be written, found Not a "
        "directory. Make room, or give a folder that can be written to."
    )


def test_background_writes_stand_apart(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 10, step_ns=100)
        ledger.background_write = True
        steps(ledger, clock, 10, 14, step_ns=130)
        ledger.background_write = False
        steps(ledger, clock, 14, 20, step_ns=100)
    # The step during which it begins or ends belongs to what was before.
    assert [(line["step"], line.get("writing")) for line in spans(tmp_path)] == [
        (11, None),
        (15, 1),
        (20, None),
    ]
    job = account_of(tmp_path).job
    assert job.background_slowdown_ns == 3 * 130 + 100 - (10 * 100 + 130 + 5 * 100) * 4 // 16
    assert job.wall_ns == 16 * 100 + 4 * 130


class FakeTimer:
    """A device that begins each step's work when told, and reports it one step later."""

    def __init__(self, clock, work_ns):
        self._clock, self._work_ns = clock, work_ns
        self._begins, self._done = [], []

    def step_begins(self):
        self._begins.append(self._clock.monotonic_ns())

    def step_ends(self):
        self._done.append((self._begins[-1], self._begins[-1] + self._work_ns))

    def finished(self):
        done, self._done = self._done[:-1], self._done[-1:]
        return done


def test_a_device_that_works_while_the_host_waits_is_not_starved(tmp_path, clock) -> None:
    with begin(tmp_path, clock, device=FakeTimer(clock, work_ns=80)) as ledger:
        for step in range(1, 12):
            ledger.switch("data")
            clock.advance(100)
            ledger.switch("compute")
            clock.advance(10)  # only the launch
            ledger.step_done(step)
    job = account_of(tmp_path).job
    # Ten steps are reported; 70 ns of each one's work lie in the wait that follows.
    assert (job.device_ns, job.overlap_ns) == (800, 700)
    assert job.buckets_ns["starved"] == 1100 - 700
    assert job.buckets_ns["useful"] == 110 + 700
    assert job.wall_ns == 1210


@given(
    waits=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=12),
    works=st.lists(st.tuples(st.integers(-5, 20), st.integers(1, 20)), max_size=12),
)
def test_overlap_is_that_of_the_sets_of_moments(waits, works) -> None:
    def intervals(pairs):
        at, found = 0, []
        for gap, length in pairs:
            begin_ns = max(0, at + gap)
            at = begin_ns + length
            found.append((begin_ns, at))
        return found

    overlap = Overlap()
    for wait in intervals(waits):
        overlap.waited(*wait)
    waited = {t for a, b in intervals(waits) for t in range(a, b)}
    worked: set[int] = set()
    until = 0
    for a, b in intervals(works):
        overlap.worked(a, b)
        worked |= set(range(max(a, until), b))
        until = max(until, b)
    assert overlap.busy_ns == len(worked)
    assert overlap.overlap_ns == len(waited & worked)


@given(st.integers(0, 1 << 62))
def test_a_bin_holds_its_times_and_is_narrow(nanoseconds) -> None:
    begin_ns, end_ns = bin_edges_ns(bin_of(nanoseconds))
    assert begin_ns <= nanoseconds < end_ns
    assert end_ns - begin_ns == 1 or (end_ns - begin_ns) / begin_ns <= 0.125


def test_bins_follow_each_other() -> None:
    edges = [bin_edges_ns(number) for number in range(480)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


def test_quantiles_are_within_a_bin() -> None:
    histogram = Histogram.of(range(1, 10_001))
    histogram.add(Histogram.of([10**9]).counts)
    assert histogram.total == 10_001
    assert histogram.quantile_ns(0.5) == pytest.approx(5000, rel=0.0625)
    assert histogram.quantile_ns(1.0) == pytest.approx(10**9, rel=0.0625)


def test_step_times_are_those_of_the_steps(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        clock.advance(99 * S)
        for step in range(1, 4):
            ledger.switch("compute")
            clock.advance(1000)
            ledger.switch("communication")
            clock.advance(500 * step)
            ledger.step_done(step)
            with ledger.span("checkpoint"):
                clock.advance(77 * S)
    found = list(read_ledgers(tmp_path)[0].step_times())
    times, own = Histogram(), Histogram()
    for second in found:
        times.add(second.times.counts)
        own.add(second.own.counts)
    assert times == Histogram.of([1500, 2000, 2500])
    assert own == Histogram.of([1000, 1000, 1000])
    assert found[-1].longest_step == 3 and found[-1].longest_ns == 2500


KILLED = """
import os, pathlib, sys, time
from tapeline.ledger import Ledger
ledger = Ledger(pathlib.Path(sys.argv[1]))
for step in range(1, 10**9):
    ledger.switch("data")
    time.sleep(0.0005)
    ledger.switch("compute")
    time.sleep(0.001)
    ledger.step_done(step)
    if step % 300 == 0:
        with ledger.span("checkpoint"):
            time.sleep(0.01)
    if step == 600:
        print("ready", flush=True)
"""


def test_kill_9_leaves_all_but_the_open_second_and_the_heartbeat_tells_that(tmp_path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    beat = read_heartbeat(heartbeat_path(tmp_path, 0))
    assert beat is not None and beat.pid == process.pid
    last = spans(tmp_path)[-1]
    assert beat.step >= last["step"] >= 600
    account = account_of(tmp_path)
    (life,) = account.ranks[0].lives
    assert life.how is None and life.step == beat.step
    assert account.job.wall_ns == beat.monotonic_ns - beat.began_ns
    assert account.job.inferred_ns == account.job.wall_ns - last["end"]

    # The next life writes down what is known of this one, before its heartbeat replaces it.
    with Ledger(str(tmp_path), from_step=600):
        pass
    inferred = [line for line in spans(tmp_path) if "inferred" in line]
    assert [line["step"] for line in inferred] == ([beat.step] if account.job.inferred_ns else [])
    again = account_of(tmp_path)
    assert again.job.inferred_ns == account.job.inferred_ns
    assert again.ranks[0].lives[0].lived_ns == life.lived_ns
    assert again.job.kept_steps == 600 and again.job.redone_steps == beat.step - 600


def test_a_torn_last_line_costs_only_itself(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 5)
    kill(ledger)
    path = ledger_path(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"attempt":1,"step":6,"en')
    assert account_of(tmp_path).job.kept_steps == 5
    with begin(tmp_path, clock, from_step=5) as ledger:
        steps(ledger, clock, 5, 6)
    assert path.read_bytes().startswith(whole)
    assert account_of(tmp_path).job.kept_steps == 6


FULL = """
import pathlib, resource, sys, time, warnings
from tapeline.clock import FakeClock
from tapeline.ledger import Ledger, ledger_path
folder = pathlib.Path(sys.argv[1])
clock = FakeClock()
ledger = Ledger(folder, clock=clock)
def steps(first, last):
    for step in range(first + 1, last + 1):
        ledger.switch("compute")
        clock.advance(10**9)
        ledger.step_done(step)
steps(0, 10)
size = ledger_path(folder, 0).stat().st_size
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, unlimited[1]))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    steps(10, 300)
print(*(str(one.message) for one in told), sep="|")
print(ledger.failed_writes > 0)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
steps(300, 310)
ledger.close()
"""


def test_a_full_disk_stops_nothing_is_told_once_and_leaves_no_hole(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "The ledger can't be written (File too large); the training goes on, and what is missing "
        "is in the next line that can be written.\nTrue\n"
    )
    account = account_of(tmp_path)
    assert account.job.kept_steps == 310
    assert account.job.buckets_ns["useful"] == account.job.wall_ns == 310 * S
    (note,) = account.notes
    assert note.startswith("rank 0: ") and note.endswith(" writes of the ledger failed")


def test_the_process_began_before_now() -> None:
    now_ns = time.monotonic_ns()
    script = (
        "import time; from tapeline.ledger import process_began_ns; "
        "print(time.monotonic_ns(), process_began_ns())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    inside, began = map(int, done.stdout.split())
    tick_ns = S // os.sysconf("SC_CLK_TCK")
    assert now_ns - 5 * tick_ns <= began < inside
    assert process_began_ns() < now_ns


def test_time_before_the_ledger_is_startup(tmp_path) -> None:
    with Ledger(tmp_path, began_ns=time.monotonic_ns() - 5 * S):
        pass
    assert account_of(tmp_path).job.buckets_ns["startup"] >= 5 * S
