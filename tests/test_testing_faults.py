"""The fault file system: what each fault does; whole files and checkpoints survive all of them."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from helpers_checkpoint import Run, files_of

from tapeline.checkpoint import Checkpointer, state_sha256
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE, Journal, atomic_folder, atomic_write, read_journal
from tapeline.testing import Crash, Fault, FaultyDisk, FaultyObjects, crashes


def kinds(disk: FaultyDisk) -> list[str]:
    return [operation.kind for operation in disk.operations]


def recorded(root: Path, action: Callable[[], object]) -> FaultyDisk:
    with FaultyDisk(root) as disk:
        action()
    return disk


def test_a_recorder_lists_the_operations_in_order(tmp_path: Path):
    disk = recorded(tmp_path, lambda: atomic_write(tmp_path / "a", "text"))
    assert kinds(disk) == ["open", "write", "fsync", "rename", "fsync"]
    assert {operation.path[: len(ASIDE)] for operation in disk.operations[:3]} == {ASIDE}
    assert [operation.path for operation in disk.operations[3:]] == ["a", "."]
    assert (tmp_path / "a").read_text() == "text"
    assert not disk.struck


def test_every_way_to_change_a_disk_is_seen(tmp_path: Path):
    def change() -> None:
        (tmp_path / "d" / "e").mkdir(parents=True)
        (tmp_path / "d" / "f").touch()
        (tmp_path / "d" / "f").write_text("é\n", encoding="utf-8", newline="\n")
        with (tmp_path / "d" / "f").open("r+b") as stream:
            stream.seek(0, os.SEEK_END)
            stream.write(b"x")
            stream.truncate(1)
            os.ftruncate(stream.fileno(), 0)
            os.write(stream.fileno(), b"raw")
        os.rename(tmp_path / "d" / "f", tmp_path / "d" / "g")  # noqa: PTH104
        (tmp_path / "d" / "h").hardlink_to(tmp_path / "d" / "g")
        os.remove(tmp_path / "d" / "g")  # noqa: PTH107
        listed[:] = os.listdir(tmp_path / "d")  # noqa: PTH208
        shutil.rmtree(tmp_path / "d")

    listed: list[str] = []
    assert [(one.kind, one.path) for one in recorded(tmp_path, change).operations] == [
        *[("mkdir", "d/e"), ("mkdir", "d"), ("mkdir", "d/e")],  # `parents` tries the last first
        *[("open", "d/f"), ("open", "d/f"), ("write", "d/f")],
        *[("open", "d/f"), ("write", "d/f"), ("truncate", "d/f"), ("truncate", "d/f")],
        *[("write", "d/f"), ("rename", "d/g"), ("link", "d/h"), ("unlink", "d/g")],
        *sorted([("unlink", "d/h"), ("rmdir", "d/e")], key=lambda one: listed.index(one[1][-1])),
        ("rmdir", "d"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_outside_the_root_and_outside_the_block_nothing_is_touched(tmp_path: Path):
    before = (builtins.open, io.open, os.open, os.fsync, os.rename, threading.excepthook)
    with FaultyDisk(tmp_path / "in", Fault("io_error")) as disk:
        (tmp_path / "outside").write_text("x")
        (tmp_path / "in").with_name("inside").mkdir()
        atomic_write(tmp_path / "other", "x")
    assert disk.operations == []
    assert (builtins.open, io.open, os.open, os.fsync, os.rename, threading.excepthook) == before


def test_reading_is_no_operation(tmp_path: Path):
    (tmp_path / "a").write_text("text")
    with FaultyDisk(tmp_path, Fault("io_error")) as disk:
        assert (tmp_path / "a").read_text() == "text"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert disk.operations == []


def test_an_io_error_strikes_one_writer_once(tmp_path: Path):
    with FaultyDisk(tmp_path, Fault("io_error", 1, "rank-1*")) as disk:
        (tmp_path / "rank-0").write_bytes(b"a")
        with pytest.raises(OSError, match="Input/output error") as error:
            (tmp_path / "rank-1").write_bytes(b"b")
        (tmp_path / "rank-1").write_bytes(b"c")
    assert error.value.errno == errno.EIO
    assert kinds(disk) == ["open", "write", "open", "write", "open", "write"]
    assert (tmp_path / "rank-1").read_bytes() == b"c"
    assert disk.struck == [Fault("io_error", 1, "rank-1*")]


def test_a_full_disk_stays_full_but_lets_go(tmp_path: Path):
    with FaultyDisk(tmp_path, Fault("full_disk", 1)):
        for name in ("a", "b"):
            with pytest.raises(OSError, match="No space left on device"):
                (tmp_path / name).write_bytes(b"x")
        with pytest.raises(OSError, match="No space left on device"):
            (tmp_path / "d").mkdir()
        assert (tmp_path / "a").read_bytes() == b""
        (tmp_path / "a").rename(tmp_path / "c")
        (tmp_path / "c").unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [7, 4096, 3 * 4096, 100_000])
def test_a_short_write_is_told_and_made_good(tmp_path: Path, size: int):
    data = os.urandom(size)
    with FaultyDisk(tmp_path, Fault("short_write")) as disk:
        (tmp_path / "a").write_bytes(data)
        descriptor = os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
        assert os.write(descriptor, data) == size
        os.close(descriptor)
    assert kinds(disk).count("write") == 3
    assert (tmp_path / "a").read_bytes() == data
    with FaultyDisk(tmp_path, Fault("short_write")):
        descriptor = os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT)
        assert os.write(descriptor, data) == {7: 3, 4096: 0, 3 * 4096: 4096}.get(size, size // 2)
        os.close(descriptor)


def test_a_bit_flip_changes_one_bit_and_says_nothing(tmp_path: Path):
    with FaultyDisk(tmp_path, Fault("bit_flip", 1)):
        with (tmp_path / "a").open("wb", buffering=0) as stream:
            stream.write(b"abcd")
            stream.write(b"abcd")
        (tmp_path / "b").write_bytes(b"abcd")
    assert (tmp_path / "a").read_bytes() == b"abcdabbd"
    assert (tmp_path / "b").read_bytes() == b"abcd"


def test_a_truncated_write_loses_its_end_and_says_nothing(tmp_path: Path):
    with FaultyDisk(tmp_path, Fault("truncated", path_pattern="*manifest*")):
        atomic_write(tmp_path / "data", b"0123456789")
        atomic_write(tmp_path / "manifest.json", b"0123456789")
    assert (tmp_path / "data").read_bytes() == b"0123456789"
    assert (tmp_path / "manifest.json").read_bytes() == b"01234"


def test_a_slow_fsync_takes_its_time_and_does_its_work(tmp_path: Path, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with FaultyDisk(tmp_path, Fault("slow_fsync", 1, delay_s=3.0)) as disk:
        atomic_write(tmp_path / "a", "text")
    assert max(slept) == 3.0
    assert sum(slept) == 3.0
    assert disk.struck == [Fault("slow_fsync", 1, delay_s=3.0)]


def test_after_a_crash_nothing_changes_any_more(tmp_path: Path):
    cleaned = []
    with FaultyDisk(tmp_path, Fault("crash", 1)) as disk, pytest.raises(Crash):
        try:
            with (tmp_path / "a").open("wb") as stream:
                stream.write(b"0123456789")
        finally:
            for change in (
                lambda: (tmp_path / "a").unlink(missing_ok=True),
                lambda: shutil.rmtree(tmp_path, ignore_errors=True),
                (tmp_path / "b").touch,
            ):
                with pytest.raises(Crash):
                    change()
                cleaned.append(True)
    assert disk.crashed
    assert len(cleaned) == 3
    assert kinds(disk) == ["open", "write"]
    assert (tmp_path / "a").read_bytes() == b"01234"
    assert len(files_of(tmp_path)) == 1


def test_a_crash_ends_every_thread_without_a_word(tmp_path: Path):
    done = threading.Barrier(2)

    def write() -> None:
        done.wait()
        atomic_write(tmp_path / "b", "text")

    thread = threading.Thread(target=write)
    thread.start()
    with FaultyDisk(tmp_path, Fault("crash")) as disk:
        with pytest.raises(Crash):
            atomic_write(tmp_path / "a", "text")
        done.wait()
        thread.join()
    assert disk.crashed
    assert files_of(tmp_path) == []


def test_other_errors_of_threads_are_still_told(tmp_path: Path, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: told.append(arguments.exc_type))
    with FaultyDisk(tmp_path):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    assert told == [ZeroDivisionError]


def survivors(root: Path, action: Callable[[], object], reset: Callable[[], object]) -> Iterator:
    """Crash at every operation of `action` in turn; what is left is looked at in between."""
    reset()
    for fault in crashes(recorded(root, action).operations):
        reset()
        with FaultyDisk(root, fault) as disk, contextlib.suppress(Crash):
            action()
        assert disk.crashed
        yield fault


def test_a_file_written_aside_is_the_old_or_the_new_after_any_crash(tmp_path: Path):
    path = tmp_path / "a"
    crashed = survivors(
        tmp_path, lambda: atomic_write(path, "new one"), lambda: path.write_text("old")
    )
    assert [path.read_text() for _ in crashed] == ["old", "old", "old", "old", "new one"]


def test_a_folder_written_aside_is_whole_somewhere_after_any_crash(tmp_path: Path):
    path = tmp_path / "d"

    def reset() -> None:
        shutil.rmtree(tmp_path)
        path.mkdir(parents=True)
        (path / "a").write_text("old")

    def replace() -> None:
        with atomic_folder(path, replace=True) as fresh:
            (fresh / "a").write_text("new")

    count = 0
    for _ in survivors(tmp_path, replace, reset):
        texts = {file.read_text() for file in files_of(tmp_path) if file.name == "a"}
        assert texts & {"old", "new"}
        assert not path.exists() or (path / "a").read_text() in ("old", "new")
        count += 1
    assert count >= 9


# A process that ends closes nothing; here the interpreter lives on and misses it.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_journal_keeps_every_synced_record_after_any_crash(tmp_path: Path):
    path = tmp_path / "j"

    def append() -> None:
        with Journal(path) as journal:
            journal.append({"n": 2, "text": "x" * 100})

    def reset() -> None:
        path.write_text('{"n":1}\n{"torn')

    for _ in survivors(tmp_path, append, reset):
        assert read_journal(path) in ([{"n": 1}], [{"n": 1}, {"n": 2, "text": "x" * 100}])
        append()
        assert read_journal(path)[-1]["n"] == 2


@pytest.fixture(scope="module")
def states():
    return [Run(seed=1).train(steps).capture() for steps in (1, 2)]


@pytest.fixture
def folder(tmp_path: Path, states) -> Path:
    Checkpointer(tmp_path / "template").save(states[0])
    return tmp_path / "run"


def fresh(folder: Path) -> Checkpointer:
    """A run's folder with one checkpoint in it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.with_name("template"), folder)
    return Checkpointer(folder)


def num_operations(folder: Path, states) -> int:
    checkpoints = fresh(folder)
    return len(recorded(folder, lambda: checkpoints.save(states[1])).operations)


def test_a_save_that_crashes_anywhere_leaves_the_newest_committed_one(folder: Path, states):
    steps = []
    for number in range(num_operations(folder, states)):
        checkpoints = fresh(folder)
        with FaultyDisk(folder, Fault("crash", number)) as disk, contextlib.suppress(Crash):
            checkpoints.save(states[1])
        assert disk.crashed
        state = Checkpointer(folder).load().state
        assert state_sha256(state) == state_sha256(states[state.step - 1])
        steps.append(state.step)
        Checkpointer(folder).save(states[1])
        assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000002"}
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


@pytest.mark.parametrize("kind", ["io_error", "full_disk"])
def test_a_save_that_fails_anywhere_says_so_and_counts_nothing(folder: Path, states, kind):
    outcomes = set()
    for number in range(num_operations(folder, states)):
        checkpoints = fresh(folder)
        with FaultyDisk(folder, Fault(kind, number)) as disk:
            try:
                checkpoints.save(states[1])
            except CheckpointError as error:
                assert "room and permission to write a checkpoint" in str(error)
                outcomes.add("refused")
            else:
                outcomes.add("saved")
                assert Checkpointer(folder).load().state.step == 2
        if not disk.struck:
            break
        state = Checkpointer(folder).load().state
        assert state_sha256(state) == state_sha256(states[state.step - 1])
        Checkpointer(folder).save(states[1])
    assert "refused" in outcomes


@pytest.mark.parametrize("kind", ["bit_flip", "truncated"])
def test_a_save_damaged_in_silence_is_found_and_fallen_back_from(folder: Path, states, kind):
    for number in range(50):
        checkpoints = fresh(folder)
        with FaultyDisk(folder, Fault(kind, number)) as disk, contextlib.suppress(CheckpointError):
            checkpoints.save(states[1])
        if not disk.struck:
            break
        loaded = Checkpointer(folder).load()
        assert loaded.state.step == 1
        assert state_sha256(loaded.state) == state_sha256(states[0])
        assert [skipped.path.name for skipped in loaded.skipped] == ["step-00000002"]
    assert number >= 2


@pytest.mark.parametrize(
    "fault", [Fault("short_write"), Fault("short_write", 1), Fault("slow_fsync", delay_s=0.05)]
)
def test_a_save_that_is_only_hindered_is_whole(folder: Path, states, fault: Fault):
    checkpoints = fresh(folder)
    with FaultyDisk(folder, fault) as disk:
        checkpoints.save(states[1])
    assert disk.struck == [fault]
    assert state_sha256(Checkpointer(folder).load().state) == state_sha256(states[1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 kB, where this user may mount one."""
    where = tmp_path / "small"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    if (
        not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount a tmpfs")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_disk_that_is_really_full_keeps_what_was_committed(small_disk: Path):
    checkpoints = Checkpointer(small_disk / "run", keep=100)
    run = Run(seed=1)
    with pytest.raises(CheckpointError) as error:
        for _ in range(1000):
            checkpoints.save(run.train(1).capture())
    assert error.value.expected == "room and permission to write a checkpoint"
    assert error.value.found == "No space left on device"
    again = Checkpointer(small_disk / "run", keep=100)
    loaded = again.load()
    assert (loaded.state.step, loaded.skipped) == (run.num_steps - 1, ())
    straight = Run(seed=1).train(loaded.state.step).capture()
    assert state_sha256(loaded.state) == state_sha256(straight)
    assert [entry.step for entry in again.entries()] == list(range(run.num_steps - 1, 0, -1))
    assert {path.name[:5] for path in again.folder.iterdir()} == {"step-"}


@pytest.fixture
def objects():
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()


def test_an_object_store_with_faults(objects, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"abcd")
    faults = [
        *(Fault("io_error", 0, "*bad"), Fault("bit_flip", 0, "*flip")),
        *(Fault("truncated", 0, "*cut"), Fault("crash", 0, "*last")),
    ]
    with FaultyObjects(objects, *faults) as store:
        objects.put_file(str(tmp_path / "f"), "/b/whole")
        with pytest.raises(OSError, match="Input/output error"):
            objects.pipe_file("/b/bad", b"abcd")
        objects.put_file(str(tmp_path / "f"), "/b/flip")
        objects.pipe_file("/b/cut", b"abcd")
        objects.rm("/b/whole")
        for change in (
            lambda: objects.pipe_file("/b/last", b"abcd"),
            lambda: objects.rm(["/b/flip"]),
        ):
            with pytest.raises(Crash):
                change()
    assert [(one.kind, one.path) for one in store.operations] == [
        *[("put", "/b/whole"), ("put", "/b/bad"), ("put", "/b/flip"), ("put", "/b/cut")],
        *[("delete", "/b/whole"), ("put", "/b/last")],
    ]
    assert store.struck == faults
    assert {path: objects.cat_file(path) for path in objects.find("/b")} == {
        "/b/flip": b"abbd",
        "/b/cut": b"ab",
    }
    objects.pipe_file("/b/last", b"now")
    assert objects.cat_file("/b/last") == b"now"
