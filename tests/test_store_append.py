"""Appending: equal to one write, idempotent, seen whole or not at all, whenever it is killed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import helpers_checkpoint
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import StoreError
from tapeline.session import Session, SessionKey
from tapeline.store import EVERY_FORMAT, Shards, append_shards, stream_sessions, write_shards

each_format = pytest.mark.parametrize("fmt", EVERY_FORMAT)


def session(name: str, rows: int = 4, add: float = 0.0, **changes) -> Session:
    arguments = {
        "key": SessionKey(name, "2024-01-02"),
        "values": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + ord(name[0]) + add,
        "columns": ("mid", "size"),
        "times": np.arange(rows) + 10**18,
        "age_ns": np.arange(rows) + 5,
    }
    return Session(**{**arguments, **changes})


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def told(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


@each_format
@settings(max_examples=10)
@given(data=st.data())
def test_any_sequence_of_appends_is_one_write(tmp_path_factory, fmt: str, data) -> None:
    root = tmp_path_factory.mktemp("store")
    rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    written = [session(chr(65 + i), n) for i, n in enumerate(rows)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {len(rows)})
    first, prints = 0, {}
    for cut in cuts:
        again = data.draw(st.integers(0, first))  # some that are there already come along
        assert append_shards(written[again:cut], root / "appended", fmt) == cut - first
        first = cut
        grown = Shards(root / "appended", fmt)
        prints[frozenset(map(str, grown.keys))] = grown.fingerprint
    write_shards(written, root / "written", fmt)
    one, other = Shards(root / "appended", fmt), Shards(root / "written", fmt)
    assert one.fingerprint == other.fingerprint
    assert {keys: one.index.fingerprint_of(keys) for keys in prints} == prints
    assert one.mm.tobytes() == other.mm.tobytes()
    assert one.verify() == []
    assert files_of(one.folder) == files_of(other.folder)


def test_the_fingerprint_of_some_sessions_is_that_of_a_store_of_them_alone(tmp_path: Path) -> None:
    sessions = [session("A", 3), session("B"), session("C", 5)]
    write_shards(sessions, tmp_path / "all", "mmap")
    write_shards([sessions[0], sessions[2]], tmp_path / "some", "npy")
    some, index = Shards(tmp_path / "some"), Shards(tmp_path / "all").index
    assert index.fingerprint_of([str(key) for key in some.keys]) == some.fingerprint
    assert index.fingerprint() != some.fingerprint


@each_format
def test_appending_what_is_there_changes_nothing(tmp_path: Path, fmt: str) -> None:
    sessions = [session("A"), session("B", valid=np.array([True, False, True, True]))]
    assert append_shards(sessions, tmp_path, fmt) == 2
    before = {p: p.stat() for p in tmp_path.rglob("*")}
    assert append_shards(sessions, tmp_path, fmt) == 0
    assert append_shards(sessions[1:], tmp_path, fmt) == 0
    assert append_shards([], tmp_path, fmt) == 0
    after = {p: p.stat() for p in tmp_path.rglob("*")}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in before.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in after.items()
    }


@each_format
@pytest.mark.parametrize(
    "change",
    [
        {"add": 1.0},
        {"rows": 5},
        {"origin": 3.0},
        {"times": np.arange(4)},
        {"valid": np.array([True, True, True, False])},
    ],
    ids=str,
)
def test_another_content_under_a_key_is_refused_with_both_hashes(
    tmp_path: Path, fmt: str, change
) -> None:
    append_shards([session("A"), session("B")], tmp_path, fmt)
    before = files_of(tmp_path)
    said = told(lambda: append_shards([session("C"), session("B", **change)], tmp_path, fmt))
    match = re.fullmatch(
        r"session B/2024-01-02: expected what the store holds under that key, content (\w{32}), "
        r"found content (\w{32})\. "
        r"Write the store anew with `replace`, or give the session another segment\.",
        said,
    )
    assert match
    assert match[1] != match[2]
    assert files_of(tmp_path) == before  # C, which was written before the refusal, is gone too


@each_format
def test_what_does_not_fit_the_store_is_refused(tmp_path: Path, fmt: str) -> None:
    append_shards([session("A")], tmp_path, fmt)
    before = files_of(tmp_path)
    assert told(lambda: append_shards([session("B", columns=("a", "b"))], tmp_path, fmt)) == (
        "session B/2024-01-02: expected the 2 columns of A/2024-01-02: mid, size, found 2: a, b. "
        "Write sessions of other columns to a store of their own."
    )
    assert told(lambda: append_shards([session("B", times=None)], tmp_path, fmt)) == (
        "session B/2024-01-02: expected values, times, age_ns, as A/2024-01-02 has, "
        "found values, age_ns. Give all sessions times and ages, or none."
    )
    assert told(lambda: append_shards([session("B"), session("B")], tmp_path, fmt)) == (
        "session B/2024-01-02: expected a key that no other session has, "
        "found the same instrument, date and segment twice. "
        "Number the segments of a date, or drop the repeated session."
    )
    nan = session("B", values=np.full((4, 2), np.nan))
    assert "expected finite values" in told(lambda: append_shards([nan], tmp_path, fmt))
    assert files_of(tmp_path) == before
    assert append_shards([nan], tmp_path, fmt, nan="mark") == 1
    assert not Shards(tmp_path, fmt).valid(1).any()


@each_format
def test_plain_arrays_are_numbered_on(tmp_path: Path, fmt: str) -> None:
    for _ in range(2):
        append_shards([np.ones((2, 3))], tmp_path, fmt)
    assert Shards(tmp_path, fmt).keys == [SessionKey("array-0"), SessionKey("array-1")]


@each_format
def test_a_store_of_no_sessions_is_not_made_by_appending_none(tmp_path: Path, fmt: str) -> None:
    said = told(lambda: append_shards([], tmp_path / "s", fmt))
    assert said.startswith(f"{tmp_path / 's'}: expected at least one session, found none.")
    assert list(tmp_path.iterdir()) == []


@each_format
def test_a_reader_keeps_the_sessions_it_opened_with(tmp_path: Path, fmt: str) -> None:
    append_shards([session("A"), session("B")], tmp_path, fmt)
    before = Shards(tmp_path, fmt)
    values, times = before.mm.tobytes(), before.times(1)
    streamed = stream_sessions(tmp_path, fmt)
    append_shards([session("C")], tmp_path, fmt)
    assert (len(before), before.mm.tobytes()) == (2, values)
    assert np.array_equal(before.times(1), times)
    assert [str(s.key)[0] for s in streamed] == ["A", "B"]
    assert len(Shards(tmp_path, fmt)) == 3


@each_format
def test_a_store_opened_while_an_append_is_under_way_is_the_old_one(
    tmp_path: Path, fmt: str
) -> None:
    append_shards([session("A")], tmp_path, fmt)
    seen = []

    def source():
        for name in "BCD":
            yield session(name, rows=20_000)
            shards = Shards(tmp_path, fmt)
            seen.append((len(shards), shards.verify()))

    append_shards(source(), tmp_path, fmt)
    assert seen == [(1, [])] * 3
    assert len(Shards(tmp_path, fmt)) == 4


@each_format
def test_an_error_of_the_source_takes_everything_back(tmp_path: Path, fmt: str) -> None:
    append_shards([session("A")], tmp_path, fmt)
    before = files_of(tmp_path)

    def source():
        yield session("B", rows=20_000)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        append_shards(source(), tmp_path, fmt)
    assert files_of(tmp_path) == before


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@each_format
@pytest.mark.parametrize("fault", [die, full])
def test_a_crash_at_any_file_operation_leaves_a_whole_store(
    tmp_path: Path, fmt: str, fault
) -> None:
    """Killed, or out of disk, at the n-th operation for every n: then read, then appended to."""
    new = session("B", rows=3000)
    write_shards([session("A")], tmp_path / "old", fmt)
    whole = write_shards([session("A"), new], tmp_path / "whole", fmt)
    lengths, outcome = [], None
    while outcome != helpers_checkpoint.UNREACHED:
        root = tmp_path / str(len(lengths))
        shutil.copytree(tmp_path / "old", root)
        outcome = helpers_checkpoint.in_child(
            lambda root=root: append_shards([new], root, fmt), len(lengths), fault
        )
        shards = Shards(root, fmt)
        assert shards.verify() == []
        lengths.append(len(shards))
        if len(shards) == 1:  # over the leftovers goes another content, which is shorter
            shutil.copytree(root, tmp_path / "other")
            append_shards([session("D")], tmp_path / "other", fmt)
            assert Shards(tmp_path / "other", fmt).verify() == []
            shutil.rmtree(tmp_path / "other")
        append_shards([new], root, fmt)
        (root / fmt / "append.json").unlink(missing_ok=True)  # killed between commit and clean-up
        assert files_of(root / fmt) == files_of(whole)
        shutil.rmtree(root)
    assert set(lengths) == {1, 2}
    assert len(lengths) > 6
    if fault is die:  # the old store up to the commit, the new one from there on
        assert lengths == sorted(lengths)


def test_a_longer_mapped_file_is_refused_unless_an_append_left_it(tmp_path: Path) -> None:
    """The note names one index: with another, or none, the file is foreign."""
    write_shards([session("A")], tmp_path, "mmap")
    folder = tmp_path / "mmap"
    whole = files_of(folder)
    path = folder / "values.f32"
    path.write_bytes(whole["values.f32"] + b"\0" * 8)
    refused = (
        f"{path}: expected 32 bytes, as the store's index says, found 40 bytes. "
        "Copy the file again, or write the store again."
    )
    assert told(lambda: Shards(tmp_path)) == refused
    for note in (b"", b"{}", b'{"index":"0123"}', b"\xff"):
        (folder / "append.json").write_bytes(note)
        assert told(lambda: Shards(tmp_path)) == refused
    digest = Shards(write_shards([session("A")], tmp_path / "t", "mmap").parent).index.digest()
    (folder / "append.json").write_text(f'{{"index":"{digest}"}}')
    assert Shards(tmp_path).verify() == []
    path.write_bytes(whole["values.f32"][:-1])  # a shorter one always is
    assert told(lambda: Shards(tmp_path)) == refused.replace("40 bytes", "31 bytes")


READER = """
import sys
from pathlib import Path
from tapeline.store import Shards
most = 0
while not (Path(sys.argv[1]) / "stop").exists():
    shards = Shards(sys.argv[1], sys.argv[2])
    assert shards.verify() == [], shards.verify()
    assert len(shards) >= most
    most = len(shards)
    if most == 1:
        print("reading", flush=True)
print(most)
"""


@each_format
def test_readers_of_another_process_see_whole_stores_only(tmp_path: Path, fmt: str) -> None:
    append_shards([session("A")], tmp_path, fmt)
    arguments = [sys.executable, "-c", READER, str(tmp_path), fmt]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        for number in range(30):
            append_shards([session(f"B{number}", rows=50)], tmp_path, fmt)
        (tmp_path / "stop").touch()
        last = reader.stdout.read().split()[-1]
    assert reader.returncode == 0
    assert 1 <= int(last) <= 31


APPENDER = """
import sys, numpy as np
from tapeline.session import Session, SessionKey
from tapeline.store import append_shards
for number in range(8):
    append_shards([Session(SessionKey(f"{sys.argv[3]}{number}"), np.full((50, 2), number))],
                  sys.argv[1], sys.argv[2])
"""


@each_format
def test_appends_of_several_processes_wait_for_each_other(tmp_path: Path, fmt: str) -> None:
    root = tmp_path / "new"
    processes = [
        subprocess.Popen([sys.executable, "-c", APPENDER, str(root), fmt, name]) for name in "ABC"
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    shards = Shards(root, fmt)
    assert sorted(map(str, shards.keys)) == sorted(f"{n}{i}" for n in "ABC" for i in range(8))
    assert shards.verify() == []
    assert {path.name for path in root.iterdir()} == {fmt}


def test_rows_made_otherwise_are_refused_with_both_sides(tmp_path: Path) -> None:
    made = {"step_s": "0.5", "crossed": "nan", "max_age_s": "60"}
    write_shards([session("A", made=made)], tmp_path, "mmap")
    assert Shards(tmp_path).index.made == made
    assert dict(Shards(tmp_path).session(0).made) == made
    before = files_of(tmp_path)
    for other, expected, found in (
        ({**made, "step_s": "1"}, "step_s 0.5", "step_s 1"),
        (
            {"step_s": "0.5", "crossed": "hold", "max_age_s": "60", "hold_s": "1"},
            "crossed nan, hold_s not given",
            "crossed hold, hold_s 1",
        ),
        (
            {},
            "crossed nan, max_age_s 60, step_s 0.5",
            "crossed not given, max_age_s not given, step_s not given",
        ),
    ):
        new = session("B", made=other)
        assert told(lambda new=new: append_shards([new], tmp_path, "mmap")) == (
            f"session B/2024-01-02, how its rows are made: expected {expected}, as A/2024-01-02 "
            f"has, found {found}. Give it the options of this store, or a store of its own."
        )
    assert files_of(tmp_path) == before
    assert append_shards([session("B", made=made)], tmp_path, "mmap") == 1
