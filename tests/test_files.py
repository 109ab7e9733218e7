"""Files whole or absent, under a failure at every operation; journals with every torn tail."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.errors import RunError
from tapeline.files import (
    ASIDE,
    Journal,
    aside,
    atomic_folder,
    atomic_open,
    atomic_write,
    canonical_json,
    meant,
    read_journal,
    xxh3_file,
)

MANY = 100  # more operations than any call makes


class Failures:
    """Lets the first `passes` system calls through and fails the next one, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
        self.left = passes
        self.failed = False
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name)))

    def _wrap(self, real):
        def call(*args, **kwargs):
            self.left -= 1
            if self.left == -1:
                self.failed = True
                raise OSError(5, "Input/output error")
            return real(*args, **kwargs)

        return call


def tree(folder: Path) -> dict[str, str | None]:
    """Everything below `folder`: the text of files, None for folders."""
    return {
        p.relative_to(folder).as_posix(): p.read_text() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("old", [None, "old"])
def test_a_write_that_fails_anywhere_leaves_old_or_new(tmp_path: Path, old: str | None) -> None:
    outcomes = []
    for passes in range(MANY):
        folder = tmp_path / str(passes)
        folder.mkdir()
        if old:
            (folder / "a").write_text(old)
        before = tree(folder)
        with pytest.MonkeyPatch.context() as patch:
            failures = Failures(patch, passes)
            try:
                atomic_write(folder / "a", "new")
            except OSError:
                assert failures.failed
        after = tree(folder)
        assert after in (before, {"a": "new"})
        outcomes.append(after == before)
        if not failures.failed:
            assert after == {"a": "new"}
            break
    # fsync of the file, the rename, fsync of the folder: three failures, then none
    assert outcomes == [True, True, False, False]


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_open(tmp_path / "a") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert tree(tmp_path) == {"a": "old"}


def test_text_is_written_as_utf8_and_bytes_as_they_are(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "é\n")
    atomic_write(tmp_path / "b", b"\xff\r\n")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa9\n"
    assert (tmp_path / "b").read_bytes() == b"\xff\r\n"


def test_nothing_is_at_the_path_before_the_block_ends(tmp_path: Path) -> None:
    with atomic_open(tmp_path / "a") as stream:
        stream.write(b"half")
        assert [name.startswith(ASIDE) for name in tree(tmp_path)] == [True]
    with atomic_folder(tmp_path / "f") as folder:
        assert folder.name.startswith(ASIDE)
        assert not (tmp_path / "f").exists()


def test_bytes_reach_the_disk_before_the_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def named(descriptor: int) -> str:
        return re.sub(
            rf"{ASIDE}(\w+)\.\w+", r"~\1", Path(f"/proc/self/fd/{descriptor}").readlink().name
        )

    monkeypatch.setattr(os, "fsync", lambda d: (order.append(f"fsync {named(d)}"), fsync(d))[1])
    monkeypatch.setattr(
        Path, "replace", lambda s, t: (order.append(f"rename {t.name}"), replace(s, t))[1]
    )
    monkeypatch.setattr(
        Path, "rename", lambda s, t: (order.append(f"rename {t.name}"), rename(s, t))[1]
    )
    root = tmp_path / "root"
    root.mkdir()
    atomic_write(root / "a", "x")
    assert order == ["fsync ~a", "rename a", "fsync root"]
    order.clear()
    with atomic_folder(root / "new" / "f") as folder:
        (folder / "b").write_text("x")
    assert order == ["fsync b", "fsync ~f", "rename f", "fsync new", "fsync root"]


def fill(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "b").write_text("new")
    (folder / "sub" / "c").write_text("new")


NEW = {"f": None, "f/b": "new", "f/sub": None, "f/sub/c": "new"}


@pytest.mark.parametrize("old", ["nothing", "empty", "folder", "file"])
def test_a_folder_that_fails_anywhere_leaves_old_or_new(tmp_path: Path, old: str) -> None:
    for passes in range(MANY):
        root = tmp_path / str(passes)
        path = root / "f"
        if old == "file":
            root.mkdir()
            path.write_text("old")
        elif old != "nothing":
            path.mkdir(parents=True)
        if old == "folder":
            (path / "a").write_text("old")
        before, stood = tree(root), root.exists()
        with pytest.MonkeyPatch.context() as patch:
            failures = Failures(patch, passes)
            try:
                with atomic_folder(path, replace=True) as folder:
                    fill(folder)
            except OSError:
                assert failures.failed
        after = tree(root)
        if not failures.failed:
            assert after == NEW
            assert passes >= 6
            break
        if old in ("folder", "file"):
            assert after == before  # what was there is given back even after the last rename
        else:
            assert after in (before, NEW)
        assert root.exists() == (stood or bool(after))


def test_an_error_in_the_block_leaves_no_folder_behind_not_even_parents(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "x" / "y" / "f") as folder:
        fill(folder)
        raise ZeroDivisionError
    assert tree(tmp_path) == {}


def test_parents_that_someone_else_uses_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "x" / "f"):
        (tmp_path / "x" / "other").write_text("kept")
        raise ZeroDivisionError
    assert tree(tmp_path) == {"x": None, "x/other": "kept"}


@pytest.mark.parametrize("old", ["folder", "file"])
def test_an_occupied_place_is_refused_before_the_block(tmp_path: Path, old: str) -> None:
    path = tmp_path / "f"
    if old == "file":
        path.write_text("old")
    else:
        path.mkdir()
        (path / "a").write_text("old")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=re.escape(str(path))), atomic_folder(path):
        pytest.fail("the block was entered")
    assert tree(tmp_path) == before


def test_two_writers_of_one_folder_leave_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with pytest.raises(OSError, match="not empty"), atomic_folder(path) as mine:
        with atomic_folder(path) as theirs:
            fill(theirs)
        (mine / "z").write_text("mine")
    assert tree(tmp_path) == NEW


def test_a_name_aside_stands_for_the_path_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    assert meant(str(aside(path))) == str(path)
    assert meant(str(aside(path) / "values.f32")) == str(path / "values.f32")
    assert meant(str(path)) == str(path)


def test_names_aside_differ_each_time_and_stay_in_the_folder(tmp_path: Path) -> None:
    names = {aside(tmp_path / "a") for _ in range(50)}
    assert len(names) == 50
    assert {name.parent for name in names} == {tmp_path}
    assert all(name.name.startswith(f"{ASIDE}a.") for name in names)


def test_equal_values_are_equal_text() -> None:
    assert canonical_json({"b": [1, 2.5], "a": None}) == '{"a":null,"b":[1,2.5]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_file_is_hashed_whole(tmp_path: Path, size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "a").write_bytes(data)
    assert xxh3_file(tmp_path / "a") == xxhash.xxh3_128_hexdigest(data)


RECORDS = [{"step": 1, "loss": 0.5}, {"note": "é\nsecond line"}, {}, {"step": 2}]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "a.jsonl"
    with Journal(path) as journal:
        journal.append(*RECORDS)
    return path.read_bytes()


def test_a_journal_cut_at_any_byte_goes_on(tmp_path: Path, written: bytes) -> None:
    """At every length: whole lines stay, the torn one goes, the next record is intact."""
    path = tmp_path / "a.jsonl"
    for cut in range(len(written) + 1):
        path.write_bytes(written[:cut])
        whole = RECORDS[: written[:cut].count(b"\n")]
        assert read_journal(path) == whole
        with Journal(path) as journal:
            journal.append({"new": cut})
        assert read_journal(path) == [*whole, {"new": cut}]
        assert path.read_bytes().endswith(
            b'\n{"new":%d}\n' % cut if whole else b'{"new":%d}\n' % cut
        )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_the_records_and_the_cuts_no_whole_line_is_lost(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("journal") / "a.jsonl"
    kept: list[dict] = []
    for _ in range(data.draw(st.integers(1, 4))):
        records = data.draw(
            st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=3)
        )
        with Journal(path) as journal:
            journal.append(*records)
        kept += records
        assert read_journal(path) == kept
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        kept = kept[: content[:cut].count(b"\n")]


@pytest.mark.parametrize("torn", [1, (1 << 20) - 2, 1 << 20, 3 * (1 << 20) + 5])
def test_a_torn_line_of_many_chunks_is_cut_at_its_start(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n' + b"x" * torn)
    Journal(path).close()
    assert path.read_bytes() == b'{"step":1}\n'
    path.write_bytes(b"x" * torn)
    Journal(path).close()
    assert path.read_bytes() == b""


def test_a_whole_line_of_many_chunks_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    long = {"text": "x" * (3 << 20)}
    with Journal(path) as journal:
        journal.append(long)
    with Journal(path) as journal:
        journal.append({"step": 2})
    assert read_journal(path) == [long, {"step": 2}]


def test_a_new_journal_makes_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "x" / "y" / "a.jsonl"
    assert read_journal(path) == []
    Journal(path).close()
    assert path.read_bytes() == b""
    assert read_journal(path) == []


def test_flushed_records_can_be_read_by_others_while_the_journal_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        journal.append({"step": 1})
        assert read_journal(path) == []
        journal.flush()
        assert read_journal(path) == [{"step": 1}]


def test_a_record_that_is_not_json_leaves_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Journal(path) as journal:
        with pytest.raises(TypeError):
            journal.append({"step": 1}, {"bad": object()})
        journal.append({"step": 2})
    assert read_journal(path) == [{"step": 1}, {"step": 2}]


def test_a_failing_sync_still_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        Failures(patch, passes=0)
        with pytest.raises(OSError, match="Input/output error"):
            journal.close()
    assert journal._stream.closed


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b'{"step":', "'{\"step\":'"),
        (b"", "''"),
        (b"\x00" * 50, repr("\x00" * 40)),
        (b"\xff", "'\ufffd'"),
    ],
)
def test_a_damaged_whole_line_is_named(tmp_path: Path, line: bytes, shown: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n' + line + b"\n" + b'{"step":3}\n')
    with pytest.raises(RunError) as caught:
        read_journal(path)
    assert str(caught.value) == (
        f"{path}, line 2: expected a record in JSON, found {shown}. "
        "Restore the file from a copy, or delete that line."
    )


def test_a_journal_can_be_read_line_by_line_with_any_tool(written: bytes) -> None:
    assert [json.loads(line) for line in written.decode("ascii").splitlines()] == RECORDS
