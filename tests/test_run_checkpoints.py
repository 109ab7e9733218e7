"""What a run does with its checkpoints: stops when told to, keeps by rules, chooses, copies."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from helpers_ranks import FORKS
from helpers_s3 import s3_server

from tapeline.attempt import life
from tapeline.attempt.cadence import interval_controller
from tapeline.checkpoint import Shelf
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.preempt import EXIT_PREEMPTED, Preempted
from tapeline.cli import main
from tapeline.clock import FakeClock, SystemClock
from tapeline.config import RunConfig
from tapeline.errors import CheckpointError
from tapeline.files import read_journal
from tapeline.ledger import account_of
from tapeline.run import RunResult, resume, start
from tapeline.runs import RunFolder
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions
from tapeline.testing import Fault, FaultyDisk


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_shards(synthetic_sessions(2, rows=300), folder / "store", "mmap")
    return folder


def config_of(workplace: Path, *overrides: str) -> RunConfig:
    values = {
        "data": {"store": str(workplace / "store")},
        "training": {"steps": 40, "batch": 32},
        "validation": {"every": 10},
        "checkpoint": {"every": 8, "keep": 2},
    }
    return RunConfig.from_mapping(values, "test", overrides)


@pytest.fixture(scope="module")
def whole(workplace: Path) -> RunResult:
    """The run that was never disturbed."""
    return start(config_of(workplace), workplace / "whole")


class Stop(BaseException):
    """A crash in between."""


def crash_at(step: int):
    def progress(done: int, _: int) -> None:
        if done == step:
            raise Stop

    return progress


def crashed(workplace: Path, run: Path, step: int, *overrides: str) -> Path:
    with pytest.raises(Stop):
        start(config_of(workplace, *overrides), run, progress=crash_at(step))
    return run


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lives(run: Path) -> list[dict]:
    return RunFolder(run, FakeClock()).attempts()


def steps_of(run: Path) -> list[int]:
    return sorted(Shelf(run / "checkpoints").steps())


# --- told to stop


def train_until_told(folder: Path, argv: list[str], where: str, at: int) -> None:
    """`tapeline …`, which waits at a step, or within an evaluation after it, to be told to go."""

    def wait(done: int) -> None:
        if done == at:
            (folder / "there").touch()
            while not (folder / "go").exists():
                time.sleep(0.005)

    if where == "step":
        tell = life._Life._tell

        def tell_and_wait(self, number, loss):
            tell(self, number, loss)
            wait(number)

        life._Life._tell = tell_and_wait
    else:
        really_evaluate, steps = life.evaluate, itertools.count(10, 10)

        def evaluate(*arguments, between, **options):
            step = next(steps)

            def wait_between():
                wait(step)
                between()

            return really_evaluate(*arguments, between=wait_between, **options)

        life.evaluate = evaluate
    sys.argv = ["tapeline", *argv]
    with (folder / "said").open("w", buffering=1) as sys.stderr:
        main()


def told_to_stop(folder: Path, argv: list[str], number: signal.Signals, where: str, at: int):
    """A real process that is sent a real signal at a known moment."""
    process = FORKS.Process(target=train_until_told, args=(folder, argv, where, at))
    process.start()
    while not (folder / "there").exists():
        assert process.is_alive(), (folder / "said").read_text()
        time.sleep(0.005)
    os.kill(process.pid, number)
    (folder / "go").touch()
    process.join()
    return process.exitcode, (folder / "said").read_text()


@pytest.mark.parametrize(
    ("number", "where", "at", "saved"),
    [
        (signal.SIGTERM, "step", 19, 20),
        (signal.SIGUSR1, "evaluation", 20, 20),
        (signal.SIGTERM, "evaluation", 40, 40),
    ],
)
def test_a_signal_stops_a_run_saved_and_it_goes_on_bitwise(
    workplace, whole, tmp_path, number, where, at, saved
):
    (tmp_path / "run.toml").write_text(
        textwrap.dedent(
            f"""
            [data]
            store = "{workplace / "store"}"
            [training]
            steps = 40
            batch = 32
            [validation]
            every = 10
            [checkpoint]
            every = 8
            keep = 2
            """
        )
    )
    run = tmp_path / "run"
    argv = ["train", str(tmp_path / "run.toml"), "--out", str(run)]
    code, err = told_to_stop(tmp_path, argv, number, where, at)
    assert code == EXIT_PREEMPTED, err
    assert err.endswith(
        f"tapeline: preempted by {number.name}; saved at step {saved}. "
        "Go on with `tapeline resume`.\n"
    )
    (life,) = lives(run)
    assert (life["how"], life["step"]) == ("preempted", saved)
    assert max(steps_of(run)) == saved
    result = resume(run)
    assert result.from_step == saved
    assert result.part_sha256 == whole.part_sha256
    assert result.losses == whole.losses
    assert result.validation == whole.validation
    assert list(RunFolder(run, FakeClock()).validations()) == [10, 20, 30, 40]


def test_a_notice_file_stops_a_run_too(workplace, whole, tmp_path):
    notice = tmp_path / "notice"
    notice.touch()
    with pytest.raises(Preempted) as stopped:
        start(config_of(workplace, f"checkpoint.notice_file={notice}"), tmp_path / "run")
    assert str(stopped.value) == f"preempted by the notice file {notice}; saved at step 1"
    notice.unlink()
    assert resume(tmp_path / "run").state_sha256 == whole.state_sha256


def test_in_another_thread_a_run_trains_without_signals(workplace, whole, tmp_path):
    found = []
    thread = threading.Thread(
        target=lambda: found.append(start(config_of(workplace), tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert found[0].state_sha256 == whole.state_sha256


def test_a_grace_period_that_is_too_short_is_told_beforehand(workplace, tmp_path):
    with pytest.warns(RuntimeWarning, match="the grace period is 1e-06 s"):
        start(config_of(workplace, "checkpoint.grace_s=1e-6"), tmp_path / "run")


def test_a_copy_that_does_not_fit_the_grace_period_is_told(workplace, tmp_path, monkeypatch):
    clock, copied, really = FakeClock(), threading.Event(), DurableTier.copy

    def copy(tier, folder):
        clock.advance(60_000_000_000)
        marker = really(tier, folder)
        copied.set()
        return marker

    def progress(done: int, _: int) -> None:
        if done == 18:  # step 16 was copied behind the loop: the steps after it know
            assert copied.wait(60)

    monkeypatch.setattr(DurableTier, "copy", copy)
    with pytest.warns(RuntimeWarning, match=r"grace period is 30 s, .* and a save \d+ s\. Save"):
        start(
            config_of(workplace, *durable(tmp_path)),
            tmp_path / "run",
            progress=progress,
            clock=clock,
        )


# --- a disk that is full


FULL = (Fault("full_disk", 0, "*step-00000016*"),)


def test_on_a_full_disk_a_run_stops_and_goes_on_once_there_is_room(workplace, whole, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with (
        FaultyDisk(run / "checkpoints", *FULL),
        pytest.raises(CheckpointError, match=r"step-00000016: .* found No space left on device"),
    ):
        start(config_of(workplace), run)
    assert steps_of(run) == [8]
    result = resume(run)
    assert (result.from_step, result.part_sha256) == (8, whole.part_sha256)


def test_by_its_policy_a_run_goes_on_without_a_checkpoint_but_not_without_its_last(
    workplace, whole, tmp_path
):
    run = tmp_path / "run"
    run.mkdir()
    with (
        FaultyDisk(run / "checkpoints", *FULL),
        pytest.warns(RuntimeWarning, match="The run goes on without a checkpoint: ") as told,
        pytest.raises(CheckpointError, match=r"step-00000040: .* found No space left on device"),
    ):
        start(config_of(workplace, "checkpoint.on_failure=go_on"), run)
    for one, step in zip(told, (16, 24, 32), strict=True):
        assert f"step-{step:08d}" in str(one.message)
    assert steps_of(run) == [8]
    result = resume(run)
    assert (result.from_step, result.part_sha256) == (8, whole.part_sha256)


# --- what is kept


def test_what_the_rules_keep_stays(workplace, tmp_path):
    run = tmp_path / "run"
    start(
        config_of(
            workplace,
            "checkpoint.keep=1",
            "checkpoint.keep_every=20",
            "checkpoint.keep_best=1",
            "training.learning_rate=0.05",
        ),
        run,
    )
    mse = {step: v["loss"] for step, v in RunFolder(run, FakeClock()).validations().items()}
    best = min(mse, key=mse.get)
    assert steps_of(run) == sorted({20, 40, best})
    metrics = {e.step: e.metadata["metric"] for e in Shelf(run / "checkpoints").entries()}
    assert metrics == {step: mse[step] for step in steps_of(run)}


def test_a_step_that_was_not_evaluated_has_no_metric(workplace, whole):
    entries = Shelf(workplace / "whole" / "checkpoints").entries()
    assert [(e.step, e.metadata["metric"] is None, e.metadata["attempt"]) for e in entries] == [
        (40, False, 1),
        (32, True, 1),
    ]


# --- which one a run resumes from


def test_a_checkpoint_whose_resume_failed_twice_is_passed_over_aloud(workplace, whole, tmp_path):
    run = crashed(workplace, tmp_path / "run", 25)
    for _ in range(2):
        with pytest.raises(Stop):
            resume(run, progress=crash_at(26))
    result = resume(run)
    assert result.from_step == 16
    (skipped,) = result.skipped
    assert skipped.path == run / "checkpoints" / "step-00000024"
    assert skipped.reason == "tainted: the resumes in attempts 2, 3 failed within 10 steps"
    assert result.part_sha256 == whole.part_sha256
    assert [life["from_step"] for life in lives(run)] == [0, 24, 24, 16]


def test_a_resume_that_came_far_enough_is_no_suspect(workplace, tmp_path):
    run = crashed(workplace, tmp_path / "run", 9)
    for _ in range(3):
        with pytest.raises(Stop):
            resume(run, ["checkpoint.every=100"], progress=crash_at(18))
    assert resume(run).from_step == 8


def test_where_all_are_suspect_the_newest_is_taken_aloud(workplace, whole, tmp_path):
    run = crashed(workplace, tmp_path / "run", 9)
    for _ in range(2):
        with pytest.raises(Stop):
            resume(run, progress=crash_at(10))
    with pytest.warns(RuntimeWarning, match="resumes from every usable checkpoint have failed"):
        result = resume(run)
    assert result.from_step == 8
    assert result.state_sha256 == whole.state_sha256


def test_what_a_life_before_saved_beyond_the_choice_is_out_of_line(workplace, whole, tmp_path):
    """The later one was damaged, passed over, and has become whole again: it was given up."""
    run = crashed(workplace, tmp_path / "run", 25)
    later = run / "checkpoints" / "step-00000024" / "rank-0.safetensors"
    flip(later)
    with pytest.raises(Stop):
        resume(run, ["checkpoint.every=9"], progress=crash_at(19))
    flip(later)
    result = resume(run)
    assert result.from_step == 18
    (skipped,) = result.skipped
    assert skipped.reason == (
        "attempt 2 began again from step 16: what attempt 1 saved beyond that was given up"
    )
    assert result.state_sha256 == whole.state_sha256


def test_a_checkpoint_of_another_run_is_passed_over(workplace, whole, tmp_path):
    run = crashed(workplace, tmp_path / "run", 9)
    shutil.copytree(
        workplace / "whole" / "checkpoints" / "step-00000040",
        run / "checkpoints" / "step-00000040",
    )
    result = resume(run)
    assert result.from_step == 8
    assert result.skipped[0].reason.startswith("it is of run run, begun ")


# --- how often


class Ticking(SystemClock):
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:
        self._now_ns += 1_000_000_000
        return self._now_ns


def test_auto_saves_by_measured_costs_and_journals_why(workplace, whole, tmp_path):
    run = tmp_path / "run"
    config = config_of(
        workplace,
        "checkpoint.every=auto",
        "checkpoint.mtbf_hours=0.05",
        "checkpoint.keep=99",
        "checkpoint.grace_s=1e6",
        "training.steps=300",
    )
    assert config.hash() == config_of(workplace, "training.steps=300").hash()
    start(config, run, clock=Ticking())
    decisions = read_journal(run / "intervals.jsonl")
    assert decisions[0]["attempt"] == 1
    assert decisions[0]["mtbf"]["middle_s"] == 180.0
    low, high = decisions[0]["range_steps"]
    assert low <= decisions[0]["num_steps"] <= high
    saved = steps_of(run)
    assert saved[0] == decisions[0]["at_step"]
    assert decisions[0]["next_step"] in saved
    assert 3 <= len(saved) < 100
    assert saved[-1] == 300


def test_a_life_that_was_killed_counts_until_its_last_sign(workplace, tmp_path):
    run = crashed(workplace, tmp_path / "run", 20)
    lived_s = account_of(run).ranks[0].lives[0].lived_ns / 1e9
    for name, end in (("attempts.jsonl", '"ended"'), ("ledger/rank-0.jsonl", '"close"')):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if end not in line))
    folder = RunFolder(run, SystemClock())
    assert folder.begin_attempt(from_step=0, world_size=1) == 2
    settings = config_of(workplace, "checkpoint.every=auto").checkpoint
    with mock.patch("tapeline.attempt.cadence.IntervalController") as made:
        interval_controller(folder, settings, attempt=2, first=0, last=60)
    assert made.call_args.kwargs["num_failures"] == 1
    assert made.call_args.kwargs["exposure_s"] == pytest.approx(lived_s, rel=0.01)


def test_a_run_shorter_than_its_first_interval_is_saved_once(workplace, whole, tmp_path):
    run = tmp_path / "run"
    assert start(config_of(workplace, "checkpoint.every=auto"), run).state_sha256 == (
        whole.state_sha256
    )
    assert steps_of(run) == [40]


# --- the durable tier


def durable(tmp_path: Path, every: int = 10) -> tuple[str, str]:
    return (f"checkpoint.durable={tmp_path / 'far'}", f"checkpoint.durable_every={every}")


def test_copies_are_made_behind_and_a_lost_disk_is_survived(workplace, whole, tmp_path):
    run = crashed(workplace, tmp_path / "run", 25, *durable(tmp_path))
    assert DurableTier(tmp_path / "far").steps() == [24, 16]
    shutil.rmtree(run / "checkpoints")
    result = resume(run)
    assert result.from_step == 24
    assert result.part_sha256 == whole.part_sha256
    assert DurableTier(tmp_path / "far").steps() == [40, 32, 24, 16]
    assert DurableTier(tmp_path / "far").verify(40).metadata["attempt"] == 2


def test_a_damaged_local_one_is_replaced_by_its_copy(workplace, whole, tmp_path):
    run = crashed(workplace, tmp_path / "run", 25, *durable(tmp_path))
    flip(run / "checkpoints" / "step-00000024" / "rank-0.safetensors")
    result = resume(run)
    assert (result.from_step, result.skipped) == (24, ())
    assert result.part_sha256 == whole.part_sha256


@pytest.mark.parametrize("every", [1, 8])
def test_a_run_that_is_told_to_stop_leaves_a_copy(workplace, tmp_path, every):
    notice = tmp_path / "notice"
    notice.touch()
    settings = (*durable(tmp_path, 1000), f"checkpoint.notice_file={notice}")
    with pytest.raises(Preempted):
        start(config_of(workplace, *settings, f"checkpoint.every={every}"), tmp_path / "run")
    assert DurableTier(tmp_path / "far").steps() == [1]


def test_a_run_survives_the_loss_of_its_machine_on_an_object_store(
    workplace, whole, tmp_path, monkeypatch
):
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("runs")
        settings = ("checkpoint.durable=s3://runs/one", "checkpoint.durable_every=10")
        run = crashed(workplace, tmp_path / "run", 25, *settings)
        shutil.rmtree(run / "checkpoints")
        result = resume(run)
    assert result.from_step == 24
    assert result.part_sha256 == whole.part_sha256


def test_a_copy_that_fails_is_told_and_made_up_for(workplace, tmp_path):
    run, far = tmp_path / "run", tmp_path / "far"
    crashed(workplace, run, 9)
    far.touch()  # in the way of the folder
    with (
        pytest.warns(RuntimeWarning, match="A checkpoint was not copied: .*far: expected a place"),
        pytest.warns(RuntimeWarning, match=r"left out of this resume: .*far: .* Not a directory"),
        pytest.warns(RuntimeWarning, match=r"copies can't be listed: .*far: .* Not a directory"),
        pytest.raises(CheckpointError, match="far: expected a place for durable copies"),
    ):
        resume(run, durable(tmp_path))
    assert lives(run)[-1]["how"] == "failed"
    assert steps_of(run)[-1] == 40
    far.unlink()
    assert resume(run, durable(tmp_path)).from_step == 40
    assert DurableTier(far).steps() == [40]


def test_copies_go_by_a_rule_of_their_own(workplace, tmp_path):
    start(config_of(workplace, *durable(tmp_path), "checkpoint.durable_keep=2"), tmp_path / "run")
    assert DurableTier(tmp_path / "far").steps() == [40, 32]


def test_the_best_copies_stay_beside_the_newest(workplace, tmp_path):
    settings = (*durable(tmp_path), "checkpoint.durable_keep=1", "checkpoint.keep_best=2")
    start(config_of(workplace, *settings), tmp_path / "run")
    validations = RunFolder(tmp_path / "run", FakeClock()).validations()
    best = sorted(validations, key=lambda step: validations[step]["loss"])[:2]
    assert set(DurableTier(tmp_path / "far").steps()) == {40, *best}


def test_a_tier_out_of_reach_is_told_and_the_local_one_is_gone_on_from(
    workplace, whole, tmp_path, monkeypatch
):
    run = crashed(workplace, tmp_path / "run", 25, *durable(tmp_path))
    listed = DurableTier.steps
    out_of_reach = CheckpointError("far", expected="an answer", found="none", fix="Look")

    def unreachable(tier):
        raise out_of_reach

    monkeypatch.setattr(DurableTier, "steps", unreachable)
    with pytest.warns(RuntimeWarning) as told:
        result = resume(run)
    assert [str(one.message) for one in told] == [
        f"Durable copies are left out of this resume: {out_of_reach}",
        f"The durable copies can't be listed: {out_of_reach}",
    ]
    assert (result.from_step, result.part_sha256) == (24, whole.part_sha256)
    assert listed(DurableTier(tmp_path / "far"))[0] == 40  # it was back in time for the copies

    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="far: expected an answer"):
        resume(run)  # to begin anew would be to lose what lies there


def test_the_record_is_json_whatever_the_settings(workplace, tmp_path):
    run = crashed(workplace, tmp_path / "run", 9, "checkpoint.every=auto", *durable(tmp_path))
    assert json.loads((run / "run.json").read_text())["config"]["checkpoint"]["every"] == "auto"
    assert resume(run).from_step == 0
