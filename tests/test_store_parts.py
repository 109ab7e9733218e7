"""Parts: written by processes that know nothing of each other, joined once, the same store."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tapeline.errors import StoreError
from tapeline.session import Session, SessionKey
from tapeline.store import (
    EVERY_FORMAT,
    Shards,
    join_parts,
    join_shards,
    parts,
    write_part,
    write_shards,
)

each_format = pytest.mark.parametrize("fmt", EVERY_FORMAT)


def session(number: int, add: float = 0.0) -> Session:
    values = np.arange(6, dtype=np.float32).reshape(3, 2) + number + add
    return Session(SessionKey("X", f"2024-01-{number + 1:02d}"), values, times=np.arange(3))


def told(call) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of each file: what changes when one is written again."""
    return {
        str(path): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


PART = """
import sys
sys.path.insert(0, sys.argv[1])
from test_store_parts import session
from tapeline.store import write_part
root, fmt, part, num_parts = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
mine = range((part - 1) * 10 // num_parts, part * 10 // num_parts)
print(write_part(map(session, mine), root, fmt, part=part, num_parts=num_parts))
"""


def run_parts(root: Path, fmt: str, num_parts: int) -> list[str]:
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PART, here, str(root), fmt, str(part), str(num_parts)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(1, num_parts + 1)
    ]
    said = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * num_parts
    return said


@pytest.mark.parametrize("fmt", ["mmap", "zarr"])
def test_processes_write_parts_and_the_last_one_joins_them(tmp_path: Path, fmt: str) -> None:
    root = tmp_path / "store"
    said = run_parts(root, fmt, 3)
    assert str(root / fmt) in said  # the last one always; two that end together both do
    assert set(said) <= {str(root / fmt), "None"}
    write_shards(map(session, range(10)), tmp_path / "one", fmt)
    shards = Shards(root, fmt)
    assert shards.fingerprint == Shards(tmp_path / "one", fmt).fingerprint
    assert shards.mm.tobytes() == Shards(tmp_path / "one", fmt).mm.tobytes()
    assert shards.verify() == []
    before = stamps(root / fmt)
    run_parts(root, fmt, 3)
    join_parts(root, fmt)
    assert stamps(root / fmt) == before  # a second run changes nothing


@each_format
def test_nothing_is_joined_before_every_part_is_complete(tmp_path: Path, fmt: str) -> None:
    def killed():
        yield session(1)
        raise KeyboardInterrupt

    assert write_part([session(2)], tmp_path, fmt, part=3, num_parts=3) is None
    assert write_part([session(0)], tmp_path, fmt, part=1, num_parts=3) is None
    with pytest.raises(KeyboardInterrupt):
        write_part(killed(), tmp_path, fmt, part=2, num_parts=3)
    assert not (tmp_path / fmt).exists()
    assert told(lambda: join_parts(tmp_path, fmt)) == (
        f"{tmp_path / 'parts'}: expected 3 parts that are complete, found 1 that aren't: 2. "
        "Run those parts, again if they were interrupted, then join."
    )
    assert write_part([session(1)], tmp_path, fmt, part=2, num_parts=3) == tmp_path / fmt
    assert [key.date[-2:] for key in Shards(tmp_path, fmt).keys] == ["01", "02", "03"]


@each_format
def test_a_part_may_be_empty_but_not_all_of_them(tmp_path: Path, fmt: str) -> None:
    assert write_part([], tmp_path / "s", fmt, part=1, num_parts=2) is None
    assert write_part([session(0)], tmp_path / "s", fmt, part=2, num_parts=2)
    assert len(Shards(tmp_path / "s", fmt)) == 1
    assert write_part([], tmp_path / "t", fmt, part=1, num_parts=2) is None
    said = told(lambda: write_part([], tmp_path / "t", fmt, part=2, num_parts=2))
    assert said.startswith(f"{tmp_path / 't'}: expected at least one session, found none.")


def test_a_part_that_grew_is_joined_again(tmp_path: Path) -> None:
    for part in (1, 2):
        write_part([session(part)], tmp_path, "mmap", part=part, num_parts=2)
    write_part([session(1), session(5)], tmp_path, "mmap", part=1, num_parts=2)
    shards = Shards(tmp_path)
    assert [key.date[-2:] for key in shards.keys] == ["02", "03", "06"]
    assert shards.verify() == []
    assert "content" in told(
        lambda: write_part([session(1, add=1)], tmp_path, "mmap", part=1, num_parts=2)
    )
    assert Shards(tmp_path).fingerprint == shards.fingerprint


def test_parts_can_be_deleted_and_written_again(tmp_path: Path) -> None:
    for _ in range(2):
        for part in (1, 2):
            write_part([session(part)], tmp_path, "npy", part=part, num_parts=2)
        before = stamps(tmp_path / "npy")
        shutil.rmtree(tmp_path / "parts")
    assert stamps(tmp_path / "npy") == before
    assert Shards(tmp_path).verify() == []


def test_parts_of_one_session_with_two_contents_are_refused(tmp_path: Path) -> None:
    write_part([session(1)], tmp_path, "mmap", part=1, num_parts=2)
    said = told(lambda: write_part([session(1, add=1)], tmp_path, "mmap", part=2, num_parts=2))
    assert "the same instrument, date and segment twice" in said
    assert not (tmp_path / "mmap").exists()


def test_what_is_no_part_is_refused(tmp_path: Path) -> None:
    for part in (0, 3):
        assert told(lambda part=part: write_part([], tmp_path, "mmap", part=part, num_parts=2)) == (
            f"part {part}/2: expected a part from 1 to 2, found {part}. Count the parts from 1."
        )
    assert told(lambda: join_parts(tmp_path, "mmap")) == (
        f"{tmp_path / 'parts'}: expected the parts of one run, <i>-of-<n>, found none. "
        "Write them with `--part i/n`."
    )
    write_part([session(0)], tmp_path, "mmap", part=1, num_parts=2)
    write_part([session(0)], tmp_path, "mmap", part=1, num_parts=3)
    assert told(lambda: join_parts(tmp_path, "mmap")) == (
        f"{tmp_path / 'parts'}: expected the parts of one run, <i>-of-<n>, found those of [2, 3]. "
        "Delete the parts of other runs."
    )


def test_stores_of_any_formats_are_joined_in_order(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    write_shards([session(3)], folders[0], "csv")
    write_shards([session(1), session(2)], folders[1], "zarr")
    assert join_shards(folders, tmp_path, "mmap") == tmp_path / "mmap"
    assert [key.date[-2:] for key in Shards(tmp_path).keys] == ["04", "02", "03"]
    before = stamps(tmp_path / "mmap")
    join_shards(folders[::-1], tmp_path, "mmap")
    assert stamps(tmp_path / "mmap") == before


def test_two_joins_at_the_same_time_behind_a_url_are_one(monkeypatch) -> None:
    """The other one commits while this one writes: its index is as good."""
    root = "memory://joined/twice"
    write_shards([session(0)], f"{root}/a", "zarr")
    really_append = parts.append_shards
    joined = []

    def append(sessions, *arguments, **options):
        if not joined:
            joined.append(True)
            sessions = list(sessions)
            join_shards([f"{root}/a"], root, "zarr")
            raise StoreError(root, expected="one", found="another", fix="Wait")
        return really_append(sessions, *arguments, **options)

    monkeypatch.setattr(parts, "append_shards", append)
    assert join_shards([f"{root}/a"], root, "zarr") == f"{root}/zarr"
    assert len(Shards(root)) == 1


def test_parts_behind_a_url(tmp_path: Path) -> None:
    root = "memory://parts/store"
    assert write_part([session(0)], root, "zarr", part=1, num_parts=2) is None
    assert write_part([session(1)], root, "zarr", part=2, num_parts=2) == f"{root}/zarr"
    write_shards(map(session, range(2)), tmp_path, "mmap")
    assert Shards(root).fingerprint == Shards(tmp_path).fingerprint
