"""The metrics journal: within its budget, through failures, over lives; and reading it back."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.clock import FakeClock
from tapeline.errors import RunError
from tapeline.runs import MachineFigures, MetricsJournal, Probe, RunFolder, read_metrics
from tapeline.runs.metrics import thin
from tapeline.signals import Watch, examine
from tapeline.testing import Fault, FaultyDisk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics" / "rank-0.jsonl"


def write(path: Path, attempt: int, first: int, last: int, *, every: int = 10, **options) -> None:
    """One life from step `first` to `last`; the loss of a step is `step + attempt / 10`."""
    with MetricsJournal(path, attempt, **options) as journal:
        for step in range(first, last + 1, every):
            upto = min(step + every - 1, last)
            journal.losses(upto, [s + attempt / 10 for s in range(step, upto + 1)])


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_comes_back(path: Path):
    figures = MachineFigures(
        step_ns=[1_000_000, 2_000_000],
        collective_wait_ns=[0, 500_000],
        samples_per_s=170.5,
        rss_bytes=2**40 + 1,
        device_bytes=7,
        utilisation=0.5,
    )
    with MetricsJournal(path, 1) as journal:
        journal.losses(2, [0.5, 0.25], grad_norms=[3.0, 2.0], learning_rate=1e-3)
        journal.machine(2, figures)
        journal.validation(2, {"mse": 0.125, "num_windows": 7, "per_horizon": [1, 2]})
        journal.profile(2, per_step=400, median_us=3.5, busy=0.25)
    metrics = read_metrics(path)
    series = {
        name: (s.steps.tolist(), s.values.tolist()) for name, s in metrics.snapshot.series.items()
    }
    assert series == {
        "loss": ([1, 2], [0.5, 0.25]),
        "grad_norm": ([1, 2], [3.0, 2.0]),
        "learning_rate": ([2], [1e-3]),
        "step_s": ([1, 2], [0.001, 0.002]),
        "collective_wait_s": ([1, 2], [0.0, 0.0005]),
        "samples_per_s": ([2], [170.5]),
        "rss_bytes": ([2], [2.0**40 + 1]),
        "device_bytes": ([2], [7.0]),
        "utilisation": ([2], [0.5]),
        "validation/mse": ([2], [0.125]),
        "validation/num_windows": ([2], [7.0]),
    }
    assert metrics.profile == {"per_step": 400, "median_us": 3.5, "busy": 0.25}
    assert (metrics.snapshot.resumes, metrics.failures, metrics.thinned) == ((), {}, None)


def test_what_was_not_measured_is_not_there(path: Path):
    with MetricsJournal(path, 1) as journal:
        journal.machine(1, MachineFigures(rss_bytes=5))
    assert lines_of(path) == [{"attempt": 1, "step": 1, "rss_bytes": 5}]
    assert len(read_metrics(path).snapshot["utilisation"]) == 0
    assert read_metrics(path.with_name("rank-1.jsonl")).snapshot.series == {}


def test_what_json_has_no_word_for_is_text_and_comes_back(path: Path):
    with MetricsJournal(path, 1) as journal:
        journal.losses(4, [math.nan, math.inf, -math.inf, 1.0], learning_rate=math.nan)
        journal.validation(4, {"mse": math.nan})
    strict = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert strict["losses"] == ["nan", "inf", "-inf", 1.0]
    snapshot = read_metrics(path).snapshot
    assert np.array_equal(
        snapshot["loss"].values, [math.nan, math.inf, -math.inf, 1.0], equal_nan=True
    )
    assert math.isnan(snapshot["validation/mse"].values[0])
    run = RunFolder(path.parents[1], FakeClock())
    assert math.isnan(run.losses()[1])
    assert run.losses()[3] == -math.inf
    assert math.isnan(run.validations()[4]["mse"])


def test_each_step_is_there_once_and_what_was_given_up_apart(path: Path):
    write(path, 1, 1, 150)
    write(path, 2, 101, 110)  # killed soon: 111 to 150 are given up although nobody did them again
    metrics = read_metrics(path)
    loss = metrics.snapshot["loss"]
    assert loss.steps.tolist() == list(range(1, 111))
    assert loss.attempts.tolist() == [1] * 100 + [2] * 10
    assert metrics.snapshot.resumes == (100,)
    write(path, 3, 106, 160)
    metrics = read_metrics(path)
    loss = metrics.snapshot["loss"]
    assert loss.steps.tolist() == list(range(1, 161))
    assert loss.attempts.tolist() == [1] * 100 + [2] * 5 + [3] * 55
    assert metrics.snapshot.resumes == (100, 105)
    gone = metrics.given_up["loss"]
    assert gone.steps.tolist() == [*range(101, 151), *range(106, 111)]
    assert gone.attempts.tolist() == [1] * 50 + [2] * 5
    assert np.allclose(gone.values, gone.steps + gone.attempts / 10)


def test_a_life_that_begins_with_the_evaluation_it_owes_keeps_what_is_before(path: Path):
    write(path, 1, 1, 30)
    with MetricsJournal(path, 2) as journal:
        journal.validation(20, {"mse": 0.5})
        journal.losses(25, [0.0] * 5)
    metrics = read_metrics(path)
    assert metrics.snapshot["loss"].attempts.tolist() == [1] * 20 + [2] * 5
    assert metrics.snapshot["validation/mse"].steps.tolist() == [20]
    assert metrics.snapshot.resumes == (20,)


def test_the_records_of_one_interval_do_not_give_each_other_up(path: Path):
    with MetricsJournal(path, 1) as journal:
        journal.losses(10, [1.0] * 10)
        journal.machine(10, MachineFigures(step_ns=[5] * 10))
    with MetricsJournal(path, 2) as journal:
        journal.machine(10, MachineFigures(step_ns=[6] * 5))
        journal.losses(10, [2.0] * 5)
    snapshot = read_metrics(path).snapshot
    assert snapshot["loss"].values.tolist() == [1.0] * 5 + [2.0] * 5
    assert snapshot["step_s"].attempts.tolist() == [1] * 5 + [2] * 5


def test_a_run_that_goes_back_within_one_life_is_read_the_same_way(path: Path):
    with MetricsJournal(path, 1) as journal:
        journal.losses(10, [1.0] * 10)
        journal.losses(6, [2.0] * 2)
    metrics = read_metrics(path)
    assert metrics.snapshot["loss"].values.tolist() == [1.0] * 4 + [2.0] * 2
    assert metrics.given_up["loss"].steps.tolist() == [5, 6, 7, 8, 9, 10]
    assert metrics.snapshot.resumes == (4,)


lives = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6)


@given(lives, st.integers(1, 7))
def test_any_sequence_of_lives_reads_as_the_last_word_on_each_step(
    tmp_path_factory, drawn: list[tuple[int, int]], every: int
):
    """Against the plain rule: a life stands up to where the first later one began."""
    path = tmp_path_factory.mktemp("lives") / "rank-0.jsonl"
    done = 0
    expected: dict[int, int] = {}
    written: list[tuple[int, int]] = []
    for attempt, (begin, length) in enumerate(drawn, 1):
        begin = min(begin, done)  # nobody resumes from a step that no life came to
        done = begin + length
        write(path, attempt, begin + 1, done, every=every)
        expected = {s: a for s, a in expected.items() if s <= begin}
        expected |= dict.fromkeys(range(begin + 1, done + 1), attempt)
        written += [(s, attempt) for s in range(begin + 1, done + 1)]
    metrics = read_metrics(path)
    loss = metrics.snapshot["loss"]
    standing = list(zip(loss.steps.tolist(), loss.attempts.tolist(), strict=True))
    assert standing == sorted(expected.items())
    gone = metrics.given_up.get("loss")
    given_up = list(zip(gone.steps.tolist(), gone.attempts.tolist(), strict=True)) if gone else []
    assert sorted(standing + given_up) == sorted(written)


def test_a_torn_tail_is_cut_before_the_next_life_writes(path: Path):
    write(path, 1, 1, 20)
    with path.open("ab") as stream:
        stream.write(b'{"attempt":1,"step":30,"los')
    write(path, 2, 21, 30)
    assert [line["step"] for line in lines_of(path)] == [10, 20, 30]


def test_a_damaged_line_is_an_error(path: Path):
    write(path, 1, 1, 20)
    path.write_text("half a li\n" + path.read_text())
    with pytest.raises(RunError, match=r"line 1: expected a record in JSON, found 'half a li'"):
        read_metrics(path)


def test_watchers_see_in_a_journal_what_happened_to_the_run(path: Path):
    """A checkpoint without the optimiser's state: seen live by the next life, and afterwards."""
    random = np.random.default_rng(0)
    with MetricsJournal(path, 1) as journal:
        for step in range(10, 221, 10):
            journal.losses(step, random.lognormal(0, 0.1, 10).tolist())
    watch = Watch(read_metrics(path).snapshot, from_step=200, every_s=0)
    with MetricsJournal(path, 2) as journal:
        losses = (3 * random.lognormal(0, 0.1, 10)).tolist()
        journal.losses(210, losses)
    (live,) = watch.observe(210, {"loss": losses})
    afterwards = next(
        f for f in examine(read_metrics(path).snapshot) if f.watcher == "resume_spike"
    )
    assert (live.watcher, live.step, live.seen) == (
        "resume_spike",
        afterwards.step,
        afterwards.seen,
    )
    assert live.means.startswith("the checkpoint of step 200")


# The budget.


def test_the_file_keeps_to_its_budget_and_says_what_is_gone(path: Path):
    budget = 8192
    with MetricsJournal(path, 1, budget_bytes=budget) as journal:
        for step in range(10, 10_001, 10):
            journal.losses(step, [float(step)] * 10)
            journal.machine(step, MachineFigures(step_ns=[1_000_000] * 10))
            assert path.stat().st_size <= budget
    metrics = read_metrics(path)
    steps = metrics.snapshot["loss"].steps
    assert metrics.thinned
    records = sum("losses" in line or "step_ns" in line for line in lines_of(path))
    assert metrics.thinned["records"] == 2000 - records
    assert 0 < metrics.thinned["up_to_step"] < 10_000 - 10 * records // 8
    assert lines_of(path)[0] == {"thinned": metrics.thinned}
    # The newest are all there; the older, the sparser.
    newest = np.arange(10_000 - 100, 10_001)
    assert np.isin(newest, steps).all()
    gaps = np.diff(steps)
    assert gaps[: len(gaps) // 2].sum() > gaps[len(gaps) // 2 :].sum()


def test_evaluations_and_the_beginnings_of_lives_outlast_the_detail(path: Path):
    budget = 20_000
    for attempt in range(1, 5):
        with MetricsJournal(path, attempt, budget_bytes=budget) as journal:
            begin = 1000 * (attempt - 1)
            for step in range(begin + 10, begin + 1201, 10):
                journal.losses(step, [0.123456789] * 10)
            journal.validation(begin + 1200, {"mse": attempt})
    metrics = read_metrics(path)
    assert metrics.thinned["records"] > 100
    assert metrics.snapshot.resumes == (1000, 2000, 3000)
    given_up = metrics.given_up["validation/mse"].values.tolist()
    assert given_up + metrics.snapshot["validation/mse"].values.tolist() == [1, 2, 3, 4]


def test_what_may_not_be_thinned_goes_by_age_in_the_end(path: Path):
    with MetricsJournal(path, 1, budget_bytes=4096) as journal:
        for step in range(1, 1001):
            journal.validation(step, {"mse": float(step)})
            assert path.stat().st_size <= 4096
    metrics = read_metrics(path)
    steps = metrics.snapshot["validation/mse"].steps
    assert steps.tolist() == list(range(metrics.thinned["up_to_step"] + 1, 1001))
    assert metrics.thinned["records"] == metrics.thinned["up_to_step"]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(200, 6000),
)
def test_thinning_never_brings_back_what_was_given_up(
    tmp_path_factory, drawn: list[tuple[int, int]], most_bytes: int
):
    path = tmp_path_factory.mktemp("thin") / "rank-0.jsonl"
    done = 0
    for attempt, (begin, length) in enumerate(drawn, 1):
        begin = min(begin, done)
        done = begin + length
        write(path, attempt, begin + 1, done, every=3)
    before = read_metrics(path).snapshot["loss"]
    stood = set(zip(before.steps.tolist(), before.attempts.tolist(), strict=True))
    whole = path.read_bytes()
    thinned = thin(whole, most_bytes)
    path.write_bytes(thinned)
    after = read_metrics(path).snapshot["loss"]
    assert set(zip(after.steps.tolist(), after.attempts.tolist(), strict=True)) <= stood
    assert after.steps[-1] == before.steps[-1]
    header, last = thinned.splitlines(keepends=True)[0], whole.splitlines(keepends=True)[-1]
    assert len(thinned) <= max(most_bytes + len(header), len(header) + len(last))
    lost = len(whole.splitlines()) - (len(thinned.splitlines()) - 1)
    assert json.loads(header)["thinned"]["records"] == lost


def test_thinning_keeps_lines_that_are_not_ours(path: Path):
    """Whoever wrote them: training must not end over them, and reading names them."""
    path.parent.mkdir(parents=True)
    path.write_text("edited by hand\n")
    with MetricsJournal(path, 1, budget_bytes=2000) as journal:
        for step in range(1, 61):
            journal.losses(step, [1.0])
    lines = path.read_text().splitlines()
    assert lines[0].startswith('{"thinned":{')
    assert lines[1] == "edited by hand"
    with pytest.raises(RunError, match="line 2: expected a record in JSON, found 'edited by hand'"):
        read_metrics(path)


# Failures.


def faulty(path: Path, *faults: Fault, steps: int = 100) -> tuple[list[str], MetricsJournal]:
    """Write under faults; returns what was said, and the closed journal."""
    said: list[str] = []
    with FaultyDisk(path.parents[2], *faults):
        journal = MetricsJournal(path, 1, warn=said.append)
        for step in range(10, steps + 1, 10):
            journal.losses(step, [float(step)] * 10)
        journal.close()
    return said, journal


@pytest.mark.parametrize("kind", ["io_error", "short_write"])
@pytest.mark.parametrize("at", range(10))
def test_a_write_that_fails_is_said_once_and_made_up_for(path: Path, kind: str, at: int):
    path.parent.mkdir(parents=True)
    said, journal = faulty(path, Fault(kind, at))
    steps = read_metrics(path).snapshot["loss"].steps.tolist()
    assert steps == list(range(1, 101))
    if at == 9 and kind == "short_write":  # the last write: `close` repeats it, and can note it
        assert read_metrics(path).failures
    if said:
        (sentence,) = said
        assert sentence.startswith(f"{path}: metrics can't be written (")
        assert sentence.endswith("; training goes on")
        assert journal.failed_writes == 1
        assert journal.lost_records == 0
        note = read_metrics(path).failures[1]
        assert (note["failed_writes"], note["lost_records"]) == (1, 0)
        assert note["error"] in sentence


def test_a_full_disk_never_raises_and_says_what_is_lost(path: Path):
    said, journal = faulty(path, Fault("full_disk", 8))
    assert [s.partition(": ")[2] for s in said] == [
        f"metrics can't be written ({_text(errno.ENOSPC)}); training goes on",
        f"{journal.lost_records} records of metrics are lost",
    ]
    assert journal.failed_writes > 1
    kept = len(read_metrics(path).snapshot["loss"]) // 10
    assert kept + journal.lost_records == 10
    assert kept == 2


def _text(code: int) -> str:
    return OSError(code, os.strerror(code)).strerror


def test_what_waits_in_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tapeline.runs.metrics._MOST_PENDING", 4)
    path.parent.mkdir(parents=True)
    path.mkdir()  # no file can be opened there
    said: list[str] = []
    journal = MetricsJournal(path, 1, warn=said.append)
    for step in range(1, 11):
        journal.losses(step, [1.0])
    assert journal.lost_records == 6
    path.rmdir()
    journal.losses(11, [1.0])
    journal.sync()  # doesn't wait for the next try
    journal.losses(12, [1.0])
    journal.close()
    metrics = read_metrics(path)
    assert metrics.snapshot["loss"].steps.tolist() == [8, 9, 10, 11, 12]
    assert metrics.failures[1]["lost_records"] == journal.lost_records == 7
    assert metrics.failures[1]["failed_writes"] == 3  # at the start, after 1 record, after 3
    assert len(said) == 1


def test_a_journal_that_can_not_be_thinned_grows_and_is_still_whole(path: Path):
    path.parent.mkdir(parents=True)
    said: list[str] = []
    with FaultyDisk(path.parents[2], Fault("io_error", 0, path_pattern="*.aside-*")):
        journal = MetricsJournal(path, 1, budget_bytes=2000, warn=said.append)
        for step in range(1, 101):
            journal.losses(step, [1.0])
        journal.close()
    assert len(said) == 1
    metrics = read_metrics(path)
    assert metrics.thinned
    assert metrics.failures[1]["failed_writes"] == 1
    assert metrics.snapshot["loss"].steps[-1] == 100
    assert path.stat().st_size <= 2000


def test_the_plain_warning_is_a_runtime_warning(path: Path):
    path.parent.mkdir(parents=True)
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="metrics can't be written"):
        MetricsJournal(path, 1)


def test_a_real_limit_on_the_file_is_survived(tmp_path: Path):
    """A process whose files may not grow: the kernel writes half a record and then says no."""
    path = tmp_path / "rank-0.jsonl"
    script = f"""
    import resource
    from pathlib import Path
    from tapeline.runs import MetricsJournal

    said = []
    journal = MetricsJournal(Path({str(path)!r}), 1, warn=said.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for step in range(1, 101):
        journal.losses(step, [0.5])
        assert Path({str(path)!r}).read_bytes().endswith(b"\\n")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    journal.close()
    print(len(said), journal.failed_writes > 3, journal.lost_records)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 True 0\n"
    assert read_metrics(path).snapshot["loss"].steps.tolist() == list(range(1, 101))


@pytest.mark.parametrize(
    "act",
    [
        lambda j: j.losses(1, [1.0]),
        lambda j: j.machine(1, MachineFigures(rss_bytes=1)),
        lambda j: j.validation(1, {"mse": 1.0}),
        lambda j: j.profile(1, per_step=1, median_us=1, busy=1),
    ],
)
def test_a_record_is_in_the_file_when_the_call_returns(
    path: Path, act: Callable[[MetricsJournal], None]
):
    """It survives the process, however that ends."""
    journal = MetricsJournal(path, 1)
    act(journal)
    assert len(lines_of(path)) == 1
    journal.close()


# The probe.


def test_a_probe_reads_rates_over_what_passed_since(monkeypatch: pytest.MonkeyPatch):
    clock, busy = FakeClock(), iter([0, 1_500_000_000, 1_600_000_000, 9_000_000_000])
    monkeypatch.setattr("time.process_time_ns", lambda: next(busy))
    probe = Probe(2, clock=clock)
    clock.advance(1_000_000_000)
    figures = probe.read(512, step_ns=[5], collective_wait_ns=[3])
    assert (figures.samples_per_s, figures.utilisation) == (512.0, 0.75)
    assert (figures.step_ns, figures.collective_wait_ns) == ([5], [3])
    assert figures.device_bytes is None
    clock.advance(500_000_000)
    figures = probe.read(512)
    assert (figures.samples_per_s, figures.utilisation) == (1024.0, 0.1)
    figures = probe.read(512)  # no time passed: a rate is unknown, not zero and not infinite
    assert (figures.samples_per_s, figures.utilisation) == (None, None)


def test_a_probe_reads_the_real_process_and_a_device_that_it_is_given():
    probe = Probe(device=lambda: (7, None))
    held = np.ones(64 << 20, np.uint8)
    figures = probe.read(1)
    assert figures.rss_bytes > held.nbytes
    assert (figures.device_bytes, figures.utilisation) == (7, None)
    figures = Probe().read(1)
    assert 0 <= figures.utilisation <= 1
