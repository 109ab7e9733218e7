"""The account: closed oracles, rules one by one, and random histories against a count by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers_ledger import S, begin, kill, new_clock, records, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.clock import utc
from tapeline.errors import LedgerError
from tapeline.ledger import (
    BUCKETS,
    PHASES,
    Attempt,
    account,
    account_of,
    ledger_path,
    lines,
    read_attempts,
    read_ledger,
    read_ledgers,
    timeline,
)
from tapeline.ledger.lives import kept_through

HOUR = 3600 * S


@pytest.fixture
def clock():
    return new_clock()


def seconds(times):
    """The buckets that aren't empty."""
    return {name: ns / S for name, ns in times.buckets_ns.items() if ns}


def lost(times):
    return {name: ns / S for name, ns in times.lost_ns.items() if ns}


def test_without_failure_all_is_useful(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 100)
    found = account_of(str(tmp_path))
    assert seconds(found.job) == {"useful": 1000}
    assert found.goodput == found.ettr == 1.0


def test_a_kill_costs_what_is_done_again_and_the_time_down(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 60, save_after={50})
    kill(ledger)
    clock.advance(610 * S)
    with begin(tmp_path, clock, from_step=50) as ledger:
        steps(ledger, clock, 50, 100)
    found = account_of(tmp_path)
    assert found.job.wall_ns == 1710 * S
    assert seconds(found.job) == {"useful": 1000, "lost": 710}
    assert lost(found.job) == {"redone": 100, "down": 610}
    assert found.goodput == pytest.approx(0.5848, abs=5e-5)
    assert found.job.lost_ns["redone"] / found.job.wall_ns == pytest.approx(0.0585, abs=5e-5)
    assert found.job.lost_ns["down"] / found.job.wall_ns == pytest.approx(0.3567, abs=5e-5)
    assert (found.job.kept_steps, found.job.redone_steps) == (100, 10)
    assert found.job.estimated_ns == 0


def test_a_gap_after_a_clean_stop_is_time_down(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 60)
    clock.advance(3600 * S)
    with begin(tmp_path, clock, from_step=60) as ledger:
        steps(ledger, clock, 60, 100)
    found = account_of(tmp_path)
    assert found.job.wall_ns == 4600 * S
    assert found.goodput == pytest.approx(0.2174, abs=5e-5)
    assert found.job.lost_ns["down"] / found.job.wall_ns == pytest.approx(0.7826, abs=5e-5)
    assert lost(found.job) == {"down": 3600}


@pytest.mark.parametrize("how", ["finished", "stopped", "preempted"])
def test_a_gap_in_which_the_run_was_over_is_in_no_bucket(tmp_path, clock, how) -> None:
    said = []
    for number, (before, last) in enumerate([(0, 60), (60, 100)], 1):
        with begin(tmp_path, clock, from_step=before) as ledger:
            clock.advance(8 * S)
            with ledger.span("restore"):
                clock.advance(2 * S)
            steps(ledger, clock, before, last)
        said += [
            {"attempt": number, "started": utc(0), "from_step": before},
            {"attempt": number, "how": how, "ended": utc(clock.wall_ns())},
        ]
        clock.advance(3600 * S)
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    found = account_of(tmp_path)
    first, second = found.ranks[0].lives
    if how == "preempted":  # told to end, and taken up again: it was waited for
        assert lost(found.job) == {"down": 3600, "restart": 8, "reload": 2}
        assert seconds(found.job) == {"useful": 1000, "startup": 10, "lost": 3610}
        assert (first.starts_again, second.starts_again) == (False, True)
    else:
        assert seconds(found.job) == {"useful": 1000, "startup": 20}
        assert second.begin_ns == first.lived_ns
        assert (first.starts_again, second.starts_again) == (False, False)


def history(folder, clock):
    """Two lives with all there is: killed at 27 of which 20 were saved, noticed after 5 s."""
    ledger = begin(folder, clock)
    clock.advance(8 * S)
    steps(ledger, clock, 0, 20, data_ns=2 * S)
    with ledger.span("checkpoint"):
        clock.advance(3 * S)
    with ledger.span("evaluation"):
        clock.advance(4 * S)
    steps(ledger, clock, 20, 27)
    kill(ledger)
    clock.advance(5 * S)
    ended = clock.wall_ns()
    clock.advance(6 * S)
    with begin(folder, clock, from_step=20) as ledger:
        clock.advance(7 * S)
        with ledger.span("restore"):
            clock.advance(2 * S)
        steps(ledger, clock, 20, 30)
        ledger.switch("other")
        clock.advance(1 * S)
    attempts = [
        {"attempt": 1, "started": utc(0), "from_step": 0},
        {"attempt": 1, "how": "killed", "ended": utc(ended)},
        {"attempt": 2, "started": utc(0), "from_step": 20},
        {"attempt": 2, "how": "finished", "ended": utc(clock.wall_ns())},
    ]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in attempts))


def test_each_loss_is_told_apart(tmp_path, clock) -> None:
    history(tmp_path, clock)
    found = account_of(tmp_path, price_per_hour=3600.0)
    assert seconds(found.job) == {
        "useful": 20 * 8 + 100,
        "starved": 40,
        "checkpoint": 3,
        "lost": 70 + 5 + 6 + 7 + 2,
        "startup": 8,
        "evaluation": 4,
        "other": 1,
    }
    assert lost(found.job) == {
        "redone": 70,
        "detection": 5,
        "down": 6,
        "restart": 7,
        "reload": 2,
    }
    assert found.cost() == pytest.approx({n: ns / S for n, ns in found.job.buckets_ns.items()})
    assert found.ettr == (found.job.wall_ns - 98 * S) / found.job.wall_ns
    first, second = found.ranks[0].lives
    assert (first.how, first.detection_ns, first.down_ns) == (None, 5 * S, 6 * S)
    assert (second.how, second.begin_ns) == ("ended", first.lived_ns + 11 * S)
    assert second.wall_begin_ns == first.wall_begin_ns + second.begin_ns
    assert read_attempts(tmp_path)[1] == Attempt(2, 20, "finished", clock.wall_ns())


def test_the_account_as_json(tmp_path, clock) -> None:
    history(tmp_path, clock)
    told = json.loads(json.dumps(account_of(tmp_path, price_per_hour=2.0).as_dict()))
    assert list(told) == [
        "goodput",
        "ettr",
        "price_per_hour",
        "cost",
        "clock_faults",
        "notes",
        "job",
        "ranks",
    ]
    assert told["job"]["buckets_ns"]["useful"] == 260 * S
    assert sum(told["ranks"][0]["buckets_ns"].values()) == told["ranks"][0]["wall_ns"]
    assert [life["attempt"] for life in told["ranks"][0]["lives"]] == [1, 2]
    assert account_of(tmp_path).as_dict()["cost"] is None


def test_the_earliest_of_all_later_begins_decides() -> None:
    assert kept_through({1: 0, 2: 80, 4: 50, 5: 90}) == {1: 50, 2: 50, 4: 90, 5: None}


def test_a_rollback_beyond_several_lives(tmp_path, clock) -> None:
    for from_step, last in ((0, 100), (80, 90), (50, 60)):
        ledger = begin(tmp_path, clock, from_step=from_step)
        steps(ledger, clock, from_step, last, save_after=range(10, 200, 10))
        kill(ledger)
    found = account_of(tmp_path)
    assert [life.times.kept_steps for life in found.ranks[0].lives] == [50, 0, 10]
    assert lost(found.job) == {"redone": 600}


def test_a_step_that_a_kill_cut_is_done_again(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 10, save_after={10})
    ledger.switch("data")
    clock.advance(30 * S)
    ledger.switch("compute")  # writes a line: step 10 is done, and 11 begun
    kill(ledger)
    with begin(tmp_path, clock, from_step=10) as ledger:
        steps(ledger, clock, 10, 11)
    found = account_of(tmp_path)
    assert seconds(found.job) == {"useful": 110, "lost": 30}


def test_without_checkpoints_in_the_ledger_a_line_is_split_and_told(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 10, step_ns=1000, data_ns=200)
    clock.advance(5)
    ledger.flush()
    kill(ledger)
    with begin(tmp_path, clock, from_step=7):
        pass
    job = account_of(tmp_path).job
    assert job.estimated_ns == 10_005
    assert {name: ns for name, ns in job.buckets_ns.items() if ns} == {
        "useful": 800 * 7,
        "starved": 200 * 7,
        "other": 3,
        "lost": 1000 * 3 + 2,
    }
    assert job.lost_ns["redone"] == job.buckets_ns["lost"]


def test_a_wall_clock_set_back_makes_no_negative_time(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 60)
    clock.advance(100 * S)
    clock.set_wall(clock.wall_ns() - 300 * S)
    with begin(tmp_path, clock, from_step=60) as ledger:
        steps(ledger, clock, 60, 100)
    found = account_of(tmp_path)
    assert found.goodput is None and found.ettr is None
    assert found.clock_faults == (
        "rank 0, between attempts 1 and 2: the second began 200.0 s before the first ended, so a "
        "clock was set or both ran at once; the time between them is unknown",
    )
    assert found.job.wall_ns == 1000 * S  # what is known adds up

    path = ledger_path(tmp_path, 0)
    path.write_text(path.read_text().replace('"boot":null', '"boot":"since-yesterday"'))
    found = account_of(tmp_path)
    assert found.clock_faults == ()
    assert found.notes == (
        "rank 0, between attempts 1 and 2: the wall clock moved by -300.0 s against the machine's "
        "own, which was counted",
    )
    assert lost(found.job) == {"down": 100}
    assert found.goodput == 1000 / 1100


def test_a_clock_set_back_inside_an_attempt_that_says_its_end_counts_right(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 30)
        clock.set_wall(clock.wall_ns() - 300 * S)
        steps(ledger, clock, 30, 60)
    clock.advance(50 * S)
    with begin(tmp_path, clock, from_step=60) as ledger:
        steps(ledger, clock, 60, 61)
    assert lost(account_of(tmp_path).job) == {"down": 50}


def test_an_end_noticed_before_it_happened_is_told(tmp_path, clock) -> None:
    history(tmp_path, clock)
    path = tmp_path / "attempts.jsonl"
    path.write_text(
        path.read_text().replace('"killed", "ended": "2023', '"killed", "ended": "2013')
    )
    found = account_of(tmp_path)
    assert lost(found.job)["down"] == 11
    (note,) = found.notes
    assert note.startswith("rank 0, attempt 1: its end was noticed -31")
    assert note.endswith("by the wall clock, which can't be; how long that took is not told apart")


def test_ranks_that_come_and_go(tmp_path, clock) -> None:
    ledgers = [begin(tmp_path, clock, rank=rank, size=3) for rank in range(3)]
    for step in range(1, 11):
        for ledger in ledgers:
            ledger.switch("compute")
        clock.advance(10 * S)
        for ledger in ledgers:
            ledger.step_done(step)
            if step == 6:
                with ledger.span("checkpoint"):
                    pass
    for ledger in ledgers:
        kill(ledger)
    clock.advance(40 * S)
    ledgers = [begin(tmp_path, clock, rank=rank, size=2, from_step=6) for rank in range(2)]
    for step in range(7, 11):
        for ledger in ledgers:
            ledger.switch("compute")
        clock.advance(15 * S)
        for ledger in ledgers:
            ledger.step_done(step)
    for ledger in ledgers:
        ledger.close()
    found = account_of(tmp_path)
    assert [seconds(rank.times) for rank in found.ranks] == [
        {"useful": 120, "lost": 80},
        {"useful": 120, "lost": 80},
        {"useful": 60, "lost": 40},  # released when the second life began without it
    ]
    assert found.job.wall_ns == 500 * S and found.goodput == 0.6


def broken(tmp_path, clock, change):
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 5)
    path = ledger_path(tmp_path, 0)
    path.write_text(change(path.read_text()))
    with pytest.raises(LedgerError) as caught:
        account_of(tmp_path)
    return str(caught.value).replace(str(path), "rank-0.jsonl")


def test_spans_that_do_not_add_up_are_an_error(tmp_path, clock) -> None:
    said = broken(tmp_path, clock, lambda text: text.replace('"compute":1', '"compute":2', 1))
    assert said == (
        "rank-0.jsonl, attempt 1: expected phases that add up to 10000000000 ns in the span that "
        "ends at step 1, found 20000000000 ns. Restore the file from a copy; it was changed, or "
        "two processes wrote it at once."
    )


def test_a_line_that_is_missing_is_an_error(tmp_path, clock) -> None:
    def without_the_third(text):
        kept = [
            line for line in text.splitlines(True) if not line.startswith('{"attempt":1,"step":3')
        ]
        return "".join(kept)

    assert "add up to 20000000000 ns in the span that ends at step 4" in broken(
        tmp_path, clock, without_the_third
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda text: text.replace('{"attempt":1,"step":3', '{"attempt":2,"step":3'),
            "rank-0.jsonl, attempt 2: expected the line in which the attempt begins, found none",
        ),
        (
            lambda text: text.replace(
                '"step":4,"end":40000000000,"c', '"step":1,"end":40000000000,"c'
            ),
            "rank-0.jsonl, attempt 1: expected steps that grow, found step 1 after step 3",
        ),
        (
            lambda text: text.replace('{"attempt":1,"step":3', '{"attempt":-1,"step":3'),
            'rank-0.jsonl: expected a record of a ledger in each line, found \'{"attempt":-1,',
        ),
        (lambda text: text + "[]\n", "rank-0.jsonl: expected a record of a ledger in each line"),
        (lambda text: text + "{}\n", "rank-0.jsonl: expected a record of a ledger in each line"),
        (
            lambda text: text.split("\n", 1)[1],
            "rank-0.jsonl: expected a ledger, as `tapeline train` or `Ledger` writes it, found a "
            "file in which no attempt begins. Give the folder of a run that keeps one.",
        ),
        (lambda text: text.replace('"rank":0', '"rank"'), "found a damaged line"),
    ],
)
def test_damage_is_told(tmp_path, clock, change, told) -> None:
    assert told in broken(tmp_path, clock, change)


def test_a_folder_without_ledgers_is_told(tmp_path) -> None:
    with pytest.raises(LedgerError, match="found no ledger of any rank"):
        account_of(tmp_path)


def test_ranks_that_contradict_each_other_are_an_error(tmp_path, clock) -> None:
    begin(tmp_path, clock, rank=0, size=2, from_step=3).close()
    begin(tmp_path, clock, rank=1, size=2, from_step=4).close()
    with pytest.raises(LedgerError) as caught:
        account_of(tmp_path)
    assert str(caught.value) == (
        f"{ledger_path(tmp_path, 1)}, attempt 1: expected step 3, where another rank or "
        "attempts.jsonl says that it began, found step 4. Keep the ledgers of different runs in "
        "different folders."
    )


# Random histories. Every phase lasts at least a second, so that each has its line, and what a line
# is worth can be counted by hand: an in-step phase belongs to the step that is not done yet, as
# does what comes after it, up to the step's end; the rest belongs to the step done last, and so do
# checkpoints and evaluations.
IN_STEPS = ("data", "transfer", "compute", "communication")
PHASE = st.sampled_from([phase for phase in PHASES if phase not in ("startup", "checkpoint")])
LONG = st.integers(S, 100 * S)
OPERATION = st.one_of(
    st.tuples(PHASE, LONG),
    st.tuples(st.just("step"), st.just(0)),
    st.tuples(st.just("checkpoint"), LONG),
)


class Attempted:
    """A fake attempt, and its own log of what it did, beside the ledger."""

    def __init__(self, folder, clock, from_step):
        self.clock, self.step, self.from_step = clock, from_step, from_step
        self.ledger = begin(folder, clock, from_step=from_step)
        self.log, self.saved, self.within = [], [], False

    def do(self, what, ns):
        if what == "step":
            self.step += 1
            self.within = False
            self.ledger.step_done(self.step)
            return
        with self.ledger.span(what):
            self.clock.advance(ns)
        if what == "checkpoint":
            self.saved.append(self.step)
        if what in ("checkpoint", "evaluation"):
            self.within = False
        self.within |= what in IN_STEPS
        self.log.append((self.step + self.within, what, ns))


PART = st.floats(0, 1, exclude_max=True)  # of a list whose length isn't known yet
LIFE = st.fixed_dictionaries(
    {
        "gap_ns": st.integers(0, 1000 * S),
        "from": PART,
        "startup_ns": LONG,
        "operations": st.lists(OPERATION, max_size=15),
        "killed": st.booleans(),
        "repeated": st.none() | st.tuples(PART, PART),
    }
)


@settings(max_examples=60)
@given(plan=st.lists(LIFE, min_size=1, max_size=4))
def test_random_histories_are_counted_as_by_hand(plan, tmp_path_factory) -> None:
    folder, clock = tmp_path_factory.mktemp("run"), new_clock()
    attempts, saved = [], [0]
    for life in plan:
        if attempts:
            clock.advance(life["gap_ns"])
        one = Attempted(folder, clock, saved[int(life["from"] * len(saved))])
        saved = [step for step in saved if step <= one.from_step]
        clock.advance(life["startup_ns"])
        one.ledger.switch("other")
        one.log.append((None, "startup", life["startup_ns"]))
        for what, ns in life["operations"]:
            one.do(what, ns)
        saved += one.saved
        attempts.append(one)
        if life["killed"]:
            kill(one.ledger)
        else:
            one.ledger.close()
        if life["repeated"]:
            repeat_lines(folder, *life["repeated"])
    down_ns = sum(life["gap_ns"] for life in plan[1:])
    expected = dict.fromkeys(BUCKETS, 0) | {"lost": down_ns}
    for number, one in enumerate(attempts):
        through = min((later.from_step for later in attempts[number + 1 :]), default=10**9)
        for step, phase, ns in one.log:
            expected[worth(number, step, phase, through)] += ns
    found = account_of(folder)
    assert found.job.buckets_ns == expected
    assert found.job.lost_ns["down"] == down_ns
    assert found.job.inferred_ns == found.job.estimated_ns == 0
    assert sum(one.lived_ns for one in found.ranks[0].lives) == sum(
        ns for one in attempts for _, _, ns in one.log
    )


def worth(number, step, phase, through):
    if phase in ("startup", "restore"):
        return "lost" if number else "startup"
    if step > through:
        return "lost"
    if phase in ("data", "transfer"):
        return "starved"
    return "useful" if phase in ("compute", "communication") else phase


def repeat_lines(folder, begin_part, length_part):
    """Copy a stretch of lines to the end, as a copy that was resumed wrongly does."""
    path = ledger_path(folder, 0)
    written = path.read_bytes().splitlines(True)
    first = int(begin_part * len(written))
    last = first + int(length_part * (len(written) - first + 1))
    path.write_bytes(b"".join(written + written[first:last]))


ANY = st.fixed_dictionaries(
    {
        "phases": st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 3 * S)), max_size=20),
        "killed": st.booleans(),
        "gap_ns": st.integers(0, 5 * S),
        "wall_moves_ns": st.integers(-9 * S, 9 * S),
    }
)


@settings(max_examples=40)
@given(plan=st.lists(ANY, min_size=1, max_size=4))
def test_whatever_the_clocks_do_the_account_closes(plan, tmp_path_factory) -> None:
    folder, clock = tmp_path_factory.mktemp("run"), new_clock()
    saved = 0
    for life in plan:
        ledger = begin(folder, clock, from_step=saved)
        step = saved
        for phase, ns in life["phases"]:
            with ledger.span(phase):
                clock.advance(ns)
            if phase == "compute":
                step += 1
                ledger.step_done(step)
            if phase == "checkpoint":
                saved = step
        if life["killed"]:
            kill(ledger)
        else:
            ledger.close()
        clock.advance(life["gap_ns"])
        clock.set_wall(clock.wall_ns() + life["wall_moves_ns"])
    found = account_of(folder)
    assert all(ns >= 0 for ns in found.job.buckets_ns.values())
    assert sum(found.job.lost_ns.values()) == found.job.buckets_ns["lost"]
    lives = found.ranks[0].lives
    assert found.job.wall_ns == sum(one.lived_ns + one.down_ns for one in lives)
    unknown = bool(found.clock_faults) or found.job.wall_ns == 0
    assert (found.goodput is None) == unknown
    assert unknown or 0 <= found.goodput <= 1
    segments = timeline(read_ledgers(folder)[0])
    shown_ns = sum(int(one.spent_ns.sum()) for one in segments)
    assert shown_ns == sum(one.lived_ns for one in lives)


def test_lines_that_are_there_twice_are_left_out_and_told(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 5)
    path = ledger_path(tmp_path, 0)
    line = '{"attempt":1,"step":2,"end":20000000000,"compute":10000000000}\n'
    path.write_text(path.read_text().replace(line, line * 3))
    found = account_of(tmp_path)
    assert found.job.wall_ns == 50 * S
    assert found.notes == ("rank 0: 2 lines were there twice",)


def test_the_compiled_scanner_reads_what_the_json_module_reads(tmp_path, monkeypatch) -> None:
    generator = np.random.default_rng(0)
    written = ['{"begin":1,"wall_ns":5}', '{"steps":1,"times":[1,2]}']
    for number in range(3000):
        record = {
            "attempt": 1 + number // 1000,
            "step": number,
            "end": int(generator.integers(1 << 60)),
        }
        for name in generator.permutation(lines.FIELDS[3:])[: generator.integers(8)]:
            record[str(name)] = int(generator.integers(1 << generator.integers(1, 62)))
        loose = number % 50 == 0
        written.append(json.dumps(record, separators=(", ", ": ") if loose else (",", ":")))
        if number % 70 == 0:
            written.append(json.dumps({"unknown": 1, **record}, separators=(",", ":")))
        if number % 90 == 0:
            written.append('{"close":1,"wall_ns":9}')
    path = tmp_path / "rank-0.jsonl"
    path.write_text("\n".join(written) + "\n")
    size = path.stat().st_size
    slow = np.concatenate(list(lines.read_spans(path, size)))
    monkeypatch.setattr(lines, "_WORTH_COMPILING_BYTES", 0)
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 10_000)  # lines across chunks
    fast = np.concatenate(list(lines.read_spans(path, size)))
    assert len(fast) == 3000 + 43
    assert np.array_equal(fast, slow)


def test_the_compiled_scanner_refuses_what_the_json_module_refuses(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(lines, "_WORTH_COMPILING_BYTES", 0)
    path = tmp_path / "rank-0.jsonl"
    good = '{"attempt":1,"step":1,"end":1}'
    for bad in (
        "",
        "{",
        "{}",
        "[1]",
        good[:-1],
        good + "x",
        '{"attempt":1,"step":1}',
        '{"attempt":1,"step":1,"end":-1}',
        '{"attempt":1,"step":1,"end":1.5}',
        '{"attempt":1,"step":1,"end":}',
        '{"attempt":1,"step":1,"end":1,}',
        '{"attempt":1,"step":1,"end":99999999999999999999}',
        '{"attempt":true,"step":1,"end":1}',
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(LedgerError, match="expected a record of a ledger in each line"):
            list(lines.read_spans(path, path.stat().st_size))


def test_a_timeline_is_bounded_and_adds_up(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 3000, step_ns=2 * S, data_ns=S, save_after={1000, 2000})
    with ledger.span("evaluation"):
        clock.advance(900 * S)
    kill(ledger)
    clock.advance(50 * S)
    with begin(tmp_path, clock, from_step=2000) as ledger:
        steps(ledger, clock, 2000, 2500, step_ns=2 * S)
    (one,) = read_ledgers(tmp_path)
    segments = timeline(one, most=50)
    assert len(segments) <= 50
    assert all(int(s.spent_ns.sum()) == s.end_ns - s.begin_ns for s in segments)
    first = [s for s in segments if s.attempt == 1]
    assert [s.begin_ns for s in first] == [0, *(s.end_ns for s in first[:-1])]
    assert (first[-1].end_ns, segments[-1].end_ns) == (6900 * S, 1000 * S)
    assert next(s.before for s in first if s.redone) == 2000
    assert [s.step for s in first if not s.redone][-1] == 2000
    told = json.loads(json.dumps(segments[0].as_dict()))
    assert told["spent_ns"]["data"] == told["spent_ns"]["compute"] > 0
    assert len(timeline(one, most=10_000)) > 3000


def test_ledgers_are_in_the_order_of_their_ranks(tmp_path, clock) -> None:
    for rank in (10, 2, 0):
        begin(tmp_path, clock, rank=rank, size=11).close()
    assert [ledger.rank for ledger in read_ledgers(tmp_path)] == [0, 2, 10]


def test_an_account_of_given_ledgers_without_a_folder(tmp_path, clock) -> None:
    with begin(tmp_path, clock) as ledger:
        steps(ledger, clock, 0, 2)
    alone = account([read_ledger(ledger_path(tmp_path, 0))], [Attempt(1, 0)])
    assert seconds(alone.job) == {"useful": 20}


def test_a_live_run_is_read_up_to_its_heartbeat(tmp_path, clock) -> None:
    ledger = begin(tmp_path, clock)
    steps(ledger, clock, 0, 4, step_ns=S // 8)
    assert [r for r in records(tmp_path) if "attempt" in r] == []
    found = account_of(tmp_path)
    assert found.job.inferred_ns == found.job.buckets_ns["useful"] == S // 2
    assert found.job.kept_steps == 4
    ledger.close()
    assert account_of(tmp_path).job.inferred_ns == 0
