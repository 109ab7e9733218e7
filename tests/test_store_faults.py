"""Damaged stores: sizes told at open, bytes by `verify`, the index always. And killed writers."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import StoreError
from tapeline.files import ASIDE, canonical_json
from tapeline.session import Session, SessionKey
from tapeline.store import EVERY_FORMAT, Shards, append_shards, write_shards
from tapeline.store.place import locked

INDEX_FIX = "Write the store again with this version of tapeline."
FILES = {
    "mmap": ["age_ns.i64", "times.i64", "values.f32"],
    "npy": [
        f"session-0000{number}.{name}.npy"
        for number in (0, 1)
        for name in ("age_ns", "times", "values")
    ],
    "zarr": [
        *(
            f"data/session-0000{number}-{digest}/{name}"
            for number, digest in ((0, "65f3e264dd82ea18"), (1, "79fc8e14df428da3"))
            for name in (
                "age_ns/c/0",
                "age_ns/zarr.json",
                "times/c/0",
                "times/zarr.json",
                "values/c/0/0",
                "values/zarr.json",
                "zarr.json",
            )
        ),
        "data/zarr.json",
    ],
    "csv": ["session-00000.csv", "session-00001.csv"],
}
EACH_FILE = [(fmt, name) for fmt in EVERY_FORMAT for name in FILES[fmt]]


def sessions() -> list[Session]:
    return [
        Session(
            SessionKey(name),
            np.linspace(1, 2, 3 * rows).reshape(rows, 3),
            ("mid", "bid", "ask"),
            np.arange(rows) + 10**18,
            np.arange(rows) + 10**6,
        )
        for name, rows in (("A", 5), ("B", 3))
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The bytes of a whole store: format, then file."""
    root = tmp_path_factory.mktemp("whole")
    for fmt in EVERY_FORMAT:
        write_shards(sessions(), root, fmt)
    return {
        fmt: {
            path.relative_to(root / fmt).as_posix(): path.read_bytes()
            for path in (root / fmt).rglob("*")
            if path.is_file()
        }
        for fmt in EVERY_FORMAT
    }


def lay(root: Path, fmt: str, files: dict[str, bytes]) -> Path:
    folder = root / fmt
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def flipped(content: bytes, at: int, mask: int = 1) -> bytes:
    return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


def told(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


def test_the_files_of_each_format_are_these(whole) -> None:
    assert {fmt: sorted({*files} - {"index.json"}) for fmt, files in whole.items()} == FILES


@pytest.mark.parametrize(("fmt", "name"), EACH_FILE)
@pytest.mark.parametrize("damage", ["truncated", "extended", "emptied", "deleted", "a folder"])
def test_a_size_that_differs_is_told_at_open(tmp_path, whole, fmt, name, damage) -> None:
    folder = lay(tmp_path, fmt, whole[fmt])
    path, content = folder / name, whole[fmt][name]
    if damage in ("deleted", "a folder"):
        path.unlink()
        if damage == "a folder":
            path.mkdir()
        found = "no file"
    else:
        changed = {"truncated": content[:-1], "extended": content + b"\0", "emptied": b""}[damage]
        path.write_bytes(changed)
        found = f"{len(changed):,} bytes"
    assert told(lambda: Shards(tmp_path, fmt)) == (
        f"{path}: expected {len(content):,} bytes, as the store's index says, found {found}. "
        "Copy the file again, or write the store again."
    )


@pytest.mark.parametrize("name", FILES["mmap"])
@pytest.mark.parametrize(("row", "key"), [(0, "A"), (4, "A"), (5, "B"), (7, "B")])
def test_a_flipped_byte_of_a_mapped_file_is_found_in_its_session(
    tmp_path, whole, name: str, row: int, key: str
) -> None:
    folder = lay(tmp_path, "mmap", whole["mmap"])
    content = whole["mmap"][name]
    (folder / name).write_bytes(flipped(content, row * len(content) // 8, 0x80))
    assert Shards(tmp_path).verify() == [
        f"{folder}: session {key}, {name.partition('.')[0]}: the content differs from what was "
        "written"
    ]


@pytest.mark.parametrize("name", FILES["npy"])
def test_a_flipped_byte_of_an_npy_file_is_found(tmp_path, whole, name: str) -> None:
    folder = lay(
        tmp_path,
        "npy",
        {**whole["npy"], name: flipped(whole["npy"][name], -1 + len(whole["npy"][name]))},
    )
    key = "AB"[int(name[12])]
    assert Shards(tmp_path).verify() == [
        f"{folder / name}: the bytes differ from those written",
        f"{folder}: session {key}, {name.split('.')[1]}: the content differs from what was written",
    ]


def test_a_flipped_digit_of_a_csv_file_is_found(tmp_path, whole) -> None:
    name = "session-00001.csv"
    content = whole["csv"][name]
    digit = content.index(b"\n") + 1  # the first of a time
    folder = lay(tmp_path, "csv", {**whole["csv"], name: flipped(content, digit, 2)})
    assert Shards(tmp_path).verify() == [
        f"{folder / name}: the bytes differ from those written",
        f"{folder}: session B, times: the content differs from what was written",
    ]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_flipped_byte_of_any_file_goes_unnoticed(tmp_path_factory, whole, data) -> None:
    """Wherever it is: told at open in our words, or found by `verify`."""
    fmt, name = data.draw(st.sampled_from(EACH_FILE))
    content = whole[fmt][name]
    at = data.draw(st.integers(0, len(content) - 1))
    root = tmp_path_factory.mktemp("flipped")
    lay(root, fmt, {**whole[fmt], name: flipped(content, at, data.draw(st.integers(1, 255)))})
    try:
        found = Shards(root, fmt).verify()
    except StoreError as error:
        found = [str(error)]
    assert found
    assert all(sentence.startswith(str(root / fmt)) for sentence in found)


def test_no_flipped_bit_of_an_npy_header_escapes_our_words(tmp_path, whole) -> None:
    name = "session-00000.values.npy"
    path, content = lay(tmp_path, "npy", whole["npy"]) / name, whole["npy"][name]
    for at in range(0, 8 * 128, 3):
        path.write_bytes(flipped(content, at // 8, 1 << at % 8))
        try:
            assert Shards(tmp_path).verify()
        except StoreError as error:
            assert str(error).endswith("Copy the file again, or write the store again.")


def test_rows_that_no_longer_parse_are_told_at_open(tmp_path, whole) -> None:
    name = "session-00000.csv"
    content = whole["csv"][name]
    comma = content.rindex(b",")
    folder = lay(tmp_path, "csv", {**whole["csv"], name: flipped(content, comma, 2)})
    said = told(lambda: Shards(tmp_path))
    assert said.startswith(
        f"{folder / name}: expected the rows and columns that the store's index lists, found CSV "
    )
    assert said.endswith(". Copy the file again, or write the store again.")


def test_a_changed_byte_of_another_shape_is_told_at_open(tmp_path, whole) -> None:
    name = "session-00000.values.npy"
    content = whole["npy"][name].replace(b"(5, 3)", b"(3, 5)")
    folder = lay(tmp_path, "npy", {**whole["npy"], name: content})
    assert told(lambda: Shards(tmp_path)) == (
        f"{folder / name}: expected the rows and columns that the store's index lists, "
        "found float32 of shape [3, 5]. Copy the file again, or write the store again."
    )


# the index


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_flipped_byte_of_the_index_goes_unnoticed(tmp_path_factory, whole, data) -> None:
    fmt = data.draw(st.sampled_from(EVERY_FORMAT))
    content = whole[fmt]["index.json"]
    changed = flipped(
        content, data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    )
    root = tmp_path_factory.mktemp("flipped")
    folder = lay(root, fmt, {**whole[fmt], "index.json": changed})
    said = told(lambda: Shards(root, fmt))
    assert re.fullmatch(
        rf"{re.escape(str(folder))}/index\.json: expected an unchanged index of version 1, "
        rf"found (damaged bytes|another version)\. {re.escape(INDEX_FIX)}",
        said,
    )


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b"{}",
        b'{"xxh3":3}',
        b"[" * 100_000,
        b"\0" * 99,
    ],
    ids=lambda b: repr(b[:12]),
)
def test_an_index_of_garbage_is_refused(tmp_path, whole, garbage: bytes) -> None:
    folder = lay(tmp_path, "mmap", {**whole["mmap"], "index.json": garbage})
    assert told(lambda: Shards(tmp_path)) == (
        f"{folder / 'index.json'}: expected an unchanged index of version 1, "
        f"found damaged bytes. {INDEX_FIX}"
    )


@pytest.mark.parametrize("cut", [1, 100, -1])
def test_an_index_cut_short_is_refused(tmp_path, whole, cut: int) -> None:
    folder = lay(
        tmp_path, "mmap", {**whole["mmap"], "index.json": whole["mmap"]["index.json"][:cut]}
    )
    assert told(lambda: Shards(tmp_path)).startswith(f"{folder / 'index.json'}: expected an unch")


def reindexed(content: bytes, **changes: object) -> bytes:
    """An index with other contents and the right hash over itself, as another program writes it."""
    values = json.loads(content) | changes
    values.pop("xxh3")
    digest = xxhash.xxh3_128_hexdigest(canonical_json(values).encode())
    return canonical_json({**values, "xxh3": digest}).encode()


@pytest.mark.parametrize("changes", [{"version": 2}, {"version": 2, "codec": "zstd"}])
def test_an_index_of_another_version_is_told_as_such(tmp_path, whole, changes) -> None:
    content = reindexed(whole["mmap"]["index.json"], **changes)
    folder = lay(tmp_path, "mmap", {**whole["mmap"], "index.json": content})
    assert told(lambda: Shards(tmp_path)) == (
        f"{folder / 'index.json'}: expected an unchanged index of version 1, "
        f"found another version. {INDEX_FIX}"
    )


def test_an_index_of_another_format_is_refused(tmp_path, whole) -> None:
    """A folder renamed by hand: its files would be read by the wrong reader."""
    lay(tmp_path, "mmap", whole["npy"])
    assert told(lambda: Shards(tmp_path, "mmap")) == (
        f"{tmp_path / 'mmap'}: expected shards in mmap format, found those in npy format. "
        "Rename the folder to npy."
    )


def test_an_index_that_can_no_longer_be_read_is_told(tmp_path, whole) -> None:
    folder = lay(tmp_path, "mmap", whole["mmap"])
    (folder / "index.json").unlink()
    assert told(lambda: Shards(tmp_path)).startswith(f"{tmp_path}: expected a store in mmap or ")


# writers that die

WRITER = """
import sys, numpy as np
from tapeline.store import write_shards

def source():
    for number in range(40):
        print(number, flush=True)
        sys.stdin.readline()
        yield np.full((200, 3), number, np.float32)

write_shards(source(), sys.argv[1], sys.argv[2], replace=True)
print("done", flush=True)
"""


def kill_after(root: Path, fmt: str, sessions_written: int) -> None:
    """Start a writer and kill it for good while it waits to make a session."""
    arguments = [sys.executable, "-c", WRITER, str(root), fmt]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for number in range(sessions_written):
            assert writer.stdout.readline() == f"{number}\n"
            writer.stdin.write("\n")
            writer.stdin.flush()
        assert writer.stdout.readline() == f"{sessions_written}\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL


@pytest.mark.parametrize("fmt", EVERY_FORMAT)
@pytest.mark.parametrize("sessions_written", [1, 39])
def test_a_killed_writer_leaves_no_store_and_no_hindrance(
    tmp_path: Path, fmt: str, sessions_written: int
) -> None:
    kill_after(tmp_path, fmt, sessions_written)
    left = [p.name for p in tmp_path.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(f"{ASIDE}{fmt}.")
    assert told(lambda: Shards(tmp_path)).startswith(f"{tmp_path}: expected a store in mmap or ")
    write_shards([np.ones((2, 2))], tmp_path, fmt)
    assert Shards(tmp_path).verify() == []


@pytest.mark.parametrize("fmt", EVERY_FORMAT)
def test_a_killed_replacement_leaves_the_old_store(tmp_path: Path, fmt: str) -> None:
    write_shards(sessions(), tmp_path, fmt)
    before = Shards(tmp_path, fmt).fingerprint
    kill_after(tmp_path, fmt, 5)
    assert Shards(tmp_path, fmt).fingerprint == before
    assert Shards(tmp_path, fmt).verify() == []


def killed_at(point: int, calls: list[tuple[Any, str]], write: Callable[[], object]) -> bool:
    """Whether a process was killed at the n-th of these calls; otherwise it wrote to the end."""
    child = os.fork()
    if not child:
        left = itertools.count(point, -1)

        def deadly(real):
            def call(*arguments, **options):
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for owner, name in calls:
            setattr(owner, name, deadly(getattr(owner, name)))
        try:
            write()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_store_killed_before_its_last_rename_never_opens(tmp_path: Path) -> None:
    """At every rename and fsync of the writer: the process ends there, without a clean-up."""
    calls = [(os, "fsync"), (Path, "replace"), (Path, "rename")]
    opened = []
    for point in range(20):
        root = tmp_path / str(point)
        write = functools.partial(write_shards, [np.ones((3, 2))], root, "mmap")
        killed = killed_at(point, calls, write)
        try:
            opened.append(Shards(root).verify())
        except StoreError as error:
            assert str(error).startswith(f"{root}: expected a store in mmap or npy or zarr or csv")
        if not killed:
            break
    # whole only once renamed: killed at the sync of the folder above, or not at all
    assert opened == [[], []]


@pytest.mark.parametrize("fmt", ["mmap", "npy"])
def test_a_replacement_killed_at_any_rename_leaves_the_old_shards_or_the_new(
    tmp_path: Path, fmt: str
) -> None:
    """Between the two renames nothing is in place; the old shards are found aside, once."""
    write_shards([np.ones((3, 2))], tmp_path / "new", fmt)
    write_shards(sessions(), tmp_path / "old", fmt)
    old, new = (Shards(tmp_path / name).fingerprint for name in ("old", "new"))
    found, was_gone = [], 0
    calls = [(os, "rmdir"), (os, "unlink"), (Path, "rename")]
    for point in range(20):
        root = tmp_path / f"s{point}"
        write_shards(sessions(), root, fmt)
        again = functools.partial(write_shards, [np.ones((3, 2))], root, fmt, replace=True)
        if not killed_at(point, calls, again):
            break
        was_gone += not (root / fmt).exists()
        shards = Shards(root)
        assert shards.verify() == []
        found.append(shards.fingerprint)
        write_shards([np.ones((3, 2))], root, fmt, replace=True)
        assert [path.name for path in root.iterdir()] == [fmt], "nothing is left aside"
        assert Shards(root).fingerprint == new
    assert was_gone == 1
    assert found[:2] == [old, old]
    assert set(found[2:]) == {new}


@pytest.mark.parametrize("write", [write_shards, append_shards])
def test_shards_that_lie_aside_are_put_back_by_a_write_too(tmp_path: Path, write: Any) -> None:
    write_shards(sessions(), tmp_path, "mmap")
    before = Shards(tmp_path).fingerprint
    (tmp_path / "mmap" / "replaced").touch()
    (tmp_path / "mmap").rename(tmp_path / f"{ASIDE}mmap.0123456789ab")
    other = tmp_path / f"{ASIDE}mmap.ffffffffffff"
    other.mkdir()
    if write is append_shards:
        assert append_shards(sessions(), tmp_path, "mmap") == 0
    else:
        with pytest.raises(StoreError, match="found files already there"):
            write_shards(sessions(), tmp_path, "mmap")
    assert Shards(tmp_path).fingerprint == before
    assert [path.name for path in tmp_path.iterdir()] == ["mmap"]
    assert not (tmp_path / "mmap" / "replaced").exists()


def test_a_replacement_waits_for_an_append_that_goes_on(tmp_path: Path) -> None:
    write_shards(sessions(), tmp_path, "mmap")
    replaced = threading.Event()

    def replace() -> None:
        write_shards([np.ones((3, 2))], tmp_path, "mmap", replace=True)
        replaced.set()

    with locked(tmp_path):
        writer = threading.Thread(target=replace)
        writer.start()
        assert not replaced.wait(0.2)
        assert len(Shards(tmp_path)) == 2
    writer.join()
    assert len(Shards(tmp_path)) == 1
