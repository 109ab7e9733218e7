"""Saves behind the loop: never torn, one at a time, no failure lost, no memory lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest
import torch
from helpers_checkpoint import Run
from torch import nn

from tapeline.checkpoint import Checkpointer, State, capture_state, load_state, state_sha256
from tapeline.checkpoint.save import commit_source
from tapeline.checkpoint.snapshot import available_bytes
from tapeline.clock import FakeClock
from tapeline.errors import CheckpointError

COMMIT = "tapeline.checkpoint.checkpointer.commit_source"


def state_at(step: int) -> State:
    run = Run(seed=step)
    run.num_steps = step
    return run.capture()


class Disk:
    """Stands before the commit: holds writes back, lets them fail, sees how many there are."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failure: BaseException | None = None
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()

    def commit(self, path, source, about):
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            assert self.open.wait(60)
            if self.failure:
                raise self.failure
            return commit_source(path, source, about)
        finally:
            with self._lock:
                self._now -= 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(COMMIT, disk.commit)
    yield disk
    disk.open.set()


class Odd(nn.Module):
    """A tensor of every awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(35.0).reshape(5, 7)
        self.register_buffer("scalar", torch.tensor(5))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("transposed", whole.clone().T)
        self.register_buffer("slice", whole[1:, ::2])
        self.register_buffer("expanded", torch.ones(1).expand(3))
        self.register_buffer("halves", torch.full((3,), 1 / 3, dtype=torch.bfloat16))
        self.register_buffer("eighths", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("booleans", torch.tensor([True, False, True]))
        self.register_buffer("complex", torch.tensor([1j, 2.0]))
        self.register_buffer("bytes", torch.arange(13, dtype=torch.uint8))
        self.weight = nn.Parameter(torch.randn(300, 40))


def overwrite(state: State) -> None:
    """Change every byte of every tensor in place."""
    for tensor in state.tensors.values():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.bitwise_xor_(0xFF)


@pytest.mark.parametrize("make", [Odd, lambda: Run(seed=3).train(2).model])
def test_what_happens_after_save_returns_never_reaches_the_file(tmp_path: Path, disk: Disk, make):
    with Checkpointer(tmp_path, keep=9, background_from_bytes=0) as checkpoints:
        for step in (1, 2, 3):  # the memory of the first copy is used again
            state = capture_state(make(), None, step=step)
            expected = state_sha256(state)
            disk.open.clear()
            path = checkpoints.save(state)
            overwrite(state)
            assert state_sha256(state) != expected
            disk.open.set()
            checkpoints.wait()
            assert path is not None
            assert state_sha256(load_state(path)) == expected
    assert checkpoints.stats().background_saves == 3


def test_a_state_that_grows_is_copied_whole(tmp_path: Path):
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        for step, rows in enumerate((10, 200_000, 100), 1):
            state = capture_state(nn.Linear(rows, 1), None, step=step)
            path = checkpoints.save(state)
            checkpoints.wait()
            assert path is not None
            assert state_sha256(load_state(path)) == state_sha256(state)


@pytest.mark.parametrize(("num_floats", "in_background"), [(1_000, 0), (300_000, 1)])
def test_the_path_is_chosen_by_size(tmp_path: Path, num_floats: int, in_background: int):
    state = capture_state(nn.Linear(num_floats, 1), None, step=1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
    stats = checkpoints.stats()
    assert (stats.saves, stats.background_saves) == (1, in_background)
    assert stats.bytes_written == (tmp_path / "step-00000001/rank-0.safetensors").stat().st_size
    assert stats.bytes_written > 4 * num_floats


def test_a_save_that_finds_one_in_flight_waits(tmp_path: Path, disk: Disk):
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        disk.open.clear()
        checkpoints.save(state_at(1))

        def open_once_waited_for() -> None:
            while not checkpoints.stats().waits:
                time.sleep(0.001)
            disk.open.set()

        opener = threading.Thread(target=open_once_waited_for)
        opener.start()
        checkpoints.save(state_at(2))
        opener.join()
    assert (checkpoints.stats().saves, checkpoints.stats().waits) == (2, 1)
    assert disk.most_at_once == 1
    assert [entry.step for entry in checkpoints.entries()] == [2, 1]


def test_a_save_that_finds_one_in_flight_is_left_out(tmp_path: Path, disk: Disk):
    with Checkpointer(tmp_path, background_from_bytes=0, when_busy="skip") as checkpoints:
        disk.open.clear()
        first = state_at(1)
        checkpoints.save(first)
        assert checkpoints.save(state_at(2)) is None
        checkpoints.check()
        disk.open.set()
        checkpoints.wait()
        assert checkpoints.save(state_at(3)) == tmp_path / "step-00000003"
    stats = checkpoints.stats()
    assert (stats.saves, stats.skips, stats.waits) == (2, 1, 0)
    assert [entry.step for entry in checkpoints.entries()] == [3, 1]
    # The skipped save didn't touch the copy that was being written.
    assert state_sha256(load_state(tmp_path / "step-00000001")) == state_sha256(first)


def test_another_policy_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path, when_busy="drop")
    assert str(error.value) == (
        'when_busy: expected "wait" or "skip", found \'drop\'. Choose one of the two.'
    )


FULL = CheckpointError("disk", expected="room", found="none", fix="Make room")
ASKS = {
    "check": lambda checkpoints: checkpoints.check(),
    "save": lambda checkpoints: checkpoints.save(state_at(3)),
    "wait": lambda checkpoints: checkpoints.wait(),
    "close": lambda checkpoints: checkpoints.close(),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_failure_is_raised_once_where_the_loop_looks(tmp_path: Path, disk: Disk, ask: str):
    checkpoints = Checkpointer(tmp_path, background_from_bytes=0)
    checkpoints.save(state_at(1))
    checkpoints.wait()
    disk.failure = FULL
    checkpoints.save(state_at(2))
    assert checkpoints.newest().path == tmp_path / "step-00000001"  # waits, takes nothing away
    with pytest.raises(CheckpointError) as error:
        ASKS[ask](checkpoints)
    assert error.value is FULL
    checkpoints.check()
    disk.failure = None
    checkpoints.save(state_at(4))
    checkpoints.close()
    assert [entry.step for entry in checkpoints.entries()] == [4, 1]
    assert checkpoints.stats().saves == 2


def test_a_failure_is_raised_by_the_save_that_waited(tmp_path: Path, disk: Disk):
    checkpoints = Checkpointer(tmp_path, background_from_bytes=0)
    disk.failure = FULL
    disk.open.clear()
    checkpoints.save(state_at(1))
    threading.Timer(0.05, disk.open.set).start()
    with pytest.raises(CheckpointError) as error:
        checkpoints.save(state_at(2))
    assert error.value is FULL
    checkpoints.close()
    assert checkpoints.entries() == []


def test_an_error_of_any_kind_is_raised(tmp_path: Path, disk: Disk):
    checkpoints = Checkpointer(tmp_path, background_from_bytes=0)
    disk.failure = MemoryError("no room to hash")
    checkpoints.save(state_at(1))
    with pytest.raises(MemoryError, match="no room to hash"):
        checkpoints.close()


def test_the_failure_at_the_end_does_not_hide_what_ended_the_block(tmp_path: Path, disk: Disk):
    disk.failure = FULL
    with (
        pytest.raises(ZeroDivisionError) as error,
        Checkpointer(tmp_path, background_from_bytes=0) as checkpoints,
    ):
        checkpoints.save(state_at(1))
        raise ZeroDivisionError
    assert error.value.__notes__ == [f"A checkpoint could not be written either: {FULL}"]
    with pytest.raises(CheckpointError), Checkpointer(tmp_path, background_from_bytes=0) as again:
        again.save(state_at(1))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_leaving_the_block_finishes_the_write(tmp_path: Path, disk: Disk, error):
    try:
        with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
            disk.open.clear()
            checkpoints.save(state_at(1))
            threading.Timer(0.05, disk.open.set).start()
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert state_sha256(load_state(tmp_path / "step-00000001")) == state_sha256(state_at(1))


def test_reading_waits_for_the_write(tmp_path: Path, disk: Disk):
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        for step, read in enumerate(
            (checkpoints.newest, lambda: checkpoints.entries()[0], checkpoints.load), 1
        ):
            disk.open.clear()
            path = checkpoints.save(state_at(step))
            threading.Timer(0.05, disk.open.set).start()
            assert read().path == path


def test_an_interrupt_during_the_copy_writes_nothing(tmp_path: Path, monkeypatch):
    checkpoints = Checkpointer(tmp_path, background_from_bytes=0)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr("tapeline.checkpoint.snapshot._copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(state_at(1))
    assert checkpoints.entries() == []
    checkpoints.save(state_at(1))
    checkpoints.close()
    assert state_sha256(checkpoints.load().state) == state_sha256(state_at(1))


def test_a_copy_that_does_not_fit_is_told_and_saved_in_the_loop(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tapeline.checkpoint.snapshot.available_bytes", lambda: 1_000)
    state = state_at(1)
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        with pytest.warns(RuntimeWarning) as warned:
            path = checkpoints.save(state)
        assert path is not None
        size = (path / "rank-0.safetensors").stat().st_size
        assert str(warned[0].message) == (
            f"{tmp_path}: a copy of the state takes {size:,} bytes, {size - 900:,} more than may "
            "be taken; the loop waits for this save."
        )
        assert state_sha256(load_state(path)) == state_sha256(state)
        assert checkpoints.stats().background_saves == 0


def test_memory_that_is_held_already_always_fits(tmp_path: Path, monkeypatch):
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        checkpoints.save(state_at(1))
        monkeypatch.setattr("tapeline.checkpoint.snapshot.available_bytes", lambda: 0)
        checkpoints.save(state_at(2))
    assert checkpoints.stats().background_saves == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "max\n"}, None),
        ({}, None),
        ({"memory.max": "9000\n", "memory.current": "5000\n", "memory.stat": "anon 1\n"}, 4000),
        (
            {"memory.max": "9", "memory.current": "7", "memory.stat": "inactive_file 3\nx 1\n"},
            5,
        ),
        ({"memory.max": "1", "memory.current": "7", "memory.stat": ""}, 0),
    ],
)
def test_a_container_may_take_what_its_limit_leaves(tmp_path: Path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("tapeline.checkpoint.snapshot._CGROUP", tmp_path)
    total = psutil.virtual_memory().total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": total}))
    assert available_bytes() == (total if expected is None else expected)


def test_times_are_counted_where_they_are_spent(tmp_path: Path, monkeypatch):
    clock = FakeClock()

    def slow(path, source, about):
        clock.advance(2_000_000_000)
        return commit_source(path, source, about)

    monkeypatch.setattr(COMMIT, slow)
    with Checkpointer(tmp_path, clock=clock) as checkpoints:
        checkpoints.save(state_at(1))
    assert (checkpoints.stats().blocked_s, checkpoints.stats().background_s) == (2.0, 0.0)
    started = threading.Event()

    def later(path, source, about):
        assert started.wait(60)
        return slow(path, source, about)

    monkeypatch.setattr(COMMIT, later)
    checkpoints = Checkpointer(tmp_path, clock=clock, background_from_bytes=0)
    checkpoints.save(state_at(2))
    started.set()
    checkpoints.newest()  # waits, and isn't a cost of saving
    assert (checkpoints.stats().blocked_s, checkpoints.stats().background_s) == (0.0, 2.0)


def test_fifty_saves_take_no_more_memory_than_a_few(tmp_path: Path):
    num_bytes = 16 << 20
    model = nn.Linear(num_bytes // 4, 1, bias=False)
    resident = []
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        for step in range(1, 51):
            checkpoints.save(capture_state(model, None, step=step))
            resident.append(psutil.Process().memory_info().rss)
        assert checkpoints.stats().background_saves >= 49
    # Reading back takes 8 MB for a while; a copy too many would be all of it, a leak 45 times that.
    assert max(resident[5:]) - resident[4] < num_bytes


def saves_for_ever(folder: Path) -> None:
    run = Run(seed=1)
    with Checkpointer(folder, keep=2, background_from_bytes=0) as checkpoints:
        if checkpoints.newest().path:
            run.restore(checkpoints.load().state)
        while True:
            run.train(1 if run.num_steps < 90 else 0)  # the schedule ends at 100
            checkpoints.save(run.capture())


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_killed_at_random_moments_of_a_loop_of_background_saves(tmp_path: Path, kill):
    generator = random.Random(int(kill))
    for _ in range(10 if kill is signal.SIGKILL else 2):
        child = os.fork()
        if not child:
            try:
                saves_for_ever(tmp_path)
            except KeyboardInterrupt:
                os._exit(3)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        time.sleep(generator.uniform(0.05, 0.3))
        while not any(tmp_path.glob("step-*/manifest.json")):
            time.sleep(0.01)
        os.kill(child, kill)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (3 if kill is signal.SIGINT else -kill)
        checkpoints = Checkpointer(tmp_path)
        loaded = checkpoints.load()
        assert loaded.skipped == ()
        straight = Run(seed=1).train(loaded.state.step)
        assert state_sha256(loaded.state) == state_sha256(straight.capture())
    assert loaded.state.step > 2


ENDINGS = {  # what a program does with a write in flight, and the step that is left
    "": 2,
    "sys.exit(3)": 2,
    "raise ValueError": 2,
    "os.kill(os.getpid(), signal.SIGINT)": 2,
    "del checkpoints": 2,
    "os._exit(3)": 1,
}

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
from helpers_checkpoint import Run
from tapeline.checkpoint import Checkpointer
for number, ending in enumerate(sys.argv[4:]):  # the imports are done once for all programs
    if not os.fork():
        break
else:
    for _ in sys.argv[4:]:
        os.wait()
    os._exit(0)
fsync = os.fsync
def slow_fsync(descriptor):
    time.sleep(0.1)
    fsync(descriptor)
run = Run(seed=1).train(1)
checkpoints = Checkpointer(Path(sys.argv[1]) / str(number), background_from_bytes=0)
checkpoints.save(run.capture())
checkpoints.wait()
os.fsync = slow_fsync
checkpoints.save(run.train(1).capture())
exec(ending)
"""


def test_an_interpreter_that_ends_finishes_the_write(tmp_path: Path):
    here = Path(__file__).parent
    folders = [tmp_path, here.parent / "src", here]
    command = [sys.executable, "-c", PROGRAM, *folders, *ENDINGS]
    subprocess.run(command, capture_output=True, check=True)
    for number, newest in enumerate(ENDINGS.values()):
        found = Checkpointer(tmp_path / str(number)).load()
        assert (found.state.step, found.skipped) == (newest, ())
        assert state_sha256(found.state) == state_sha256(Run(seed=1).train(newest).capture())
