"""Writing a store and appending to one: one session in memory at a time, the index last.

Nothing is a store until it is whole. In a folder the whole is written aside and renamed. Behind a
URL, where nothing can be renamed, the objects are written under names that no other content has.

An append writes the data first, then replaces the index in one step: a reader has the old index and
the old rows, or the new index and all rows. A crash leaves the old store and, behind or beside its
data, leftovers that no index names; the next append goes over them. Writers of one folder wait for
each other; behind a URL the second is refused at its commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy.typing as npt

from tapeline.errors import StoreError
from tapeline.files import atomic_folder
from tapeline.session import Session, as_session
from tapeline.store.formats import WRITERS
from tapeline.store.intake import Intake, NanPolicy
from tapeline.store.layout import INDEX, FileEntry, StoreIndex, check_format
from tapeline.store.place import Folder, Place, Root, is_remote, place_of
from tapeline.store.recover import mark_replaced, recover

Sessions = Iterable[Session | npt.ArrayLike]


def write_shards(
    sessions: Sessions,
    root: Root,
    fmt: str,
    *,
    nan: NanPolicy = "refuse",
    replace: bool = False,
) -> Path | str:
    """Write sessions as shards of one format into the store at `root`.

    Args:
        sessions: sessions, or plain arrays `[rows, columns]`; read one at a time.
        root: the store's folder; the shards go to its subfolder `fmt`. With zarr also a URL that
            fsspec knows (`s3://bucket/prefix`); one writer at a time there.
        fmt: "mmap" (one float32 file), "npy" (a file per session), "zarr" (compressed; needs the
            `remote` extra) or "csv" (to look at).
        nan: what to do with a row that holds NaN or infinity and isn't marked invalid:
            "refuse" the whole, or "mark" the row invalid, so that no window touches it.
        replace: write over shards of this format that are already there. Behind a URL every
            object under the old shards' prefix is deleted after the new ones are whole.

    Returns:
        The folder or URL written.

    Raises:
        StoreError: no sessions, an unknown format, columns or keys that don't fit together, a
            value that isn't finite, or shards already there. Nothing is left behind in a folder;
            objects behind a URL stay, without an index that names them.
    """
    with _locked(root, fmt):
        return _write(sessions, root, fmt, nan, replace=replace)


def check_out(root: Root, fmt: str) -> None:
    """Refuse, before anything is read, what no store can be written as or where none can lie.

    Raises:
        StoreError: an unknown format, or a place that can't be made or written to.
    """
    check_format(fmt)
    place_of(root, fmt).check_writable()


@contextlib.contextmanager
def _locked(root: Root, fmt: str) -> Iterator[None]:
    check_out(root, fmt)
    with place_of(root, fmt).locked():
        yield


def _write(
    sessions: Sessions, root: Root, fmt: str, nan: NanPolicy, *, replace: bool = False
) -> Path | str:
    intake = Intake(nan)
    place = place_of(root, fmt)
    if is_remote(root):
        _write_objects(sessions, root, fmt, intake, replace=replace)
        return str(place)
    recover(place)
    with contextlib.ExitStack() as stack:
        try:
            unfinished = stack.enter_context(atomic_folder(place.folder, replace=replace))
        except (FileExistsError, NotADirectoryError):
            raise _occupied(place) from None
        index = _write_all(sessions, Folder(unfinished), fmt, intake, root)
        index.save(Folder(unfinished))
        if replace:
            mark_replaced(Folder(place.folder))
    return place.folder


def _write_objects(
    sessions: Sessions, root: Root, fmt: str, intake: Intake, *, replace: bool
) -> None:
    place = place_of(root, fmt)
    before = _raw_index(place)
    if before is not None and not replace:
        raise _occupied(place)
    index = _write_all(sessions, place, fmt, intake, root)
    _check_unchanged(place, before)
    index.save(place)
    if replace:
        place.remove([name for name in place.sizes() if name not in {INDEX, *index.files}])


def _write_all(
    sessions: Sessions, place: Place, fmt: str, intake: Intake, root: Root
) -> StoreIndex:
    writer = WRITERS[fmt](place, None)
    try:
        for number, value in enumerate(sessions):
            admitted = intake.admit(as_session(value, number))
            assert admitted is not None, "a new store holds nothing"
            writer.add(number, *admitted)
    finally:
        writer.close()
    if not intake.entries:
        raise StoreError(
            root,
            expected="at least one session",
            found="none",
            fix="Check that the input holds rows, and what the reader's report says was dropped",
        )
    return _index_of(fmt, intake, writer.files)


def append_shards(sessions: Sessions, root: Root, fmt: str, *, nan: NanPolicy = "refuse") -> int:
    """Append sessions to the shards of one format at `root`; write them new if there are none.

    A session whose key the store holds with the same content is passed over, so that appending
    the same sessions again changes nothing. Plain arrays have no key: they are numbered on.

    Args:
        sessions: sessions, or plain arrays `[rows, columns]`; read one at a time.
        root: the store's folder, or with zarr a URL.
        fmt: the format, as `write_shards` takes it.
        nan: what to do with rows that aren't finite, as `write_shards` takes it.

    Returns:
        How many sessions were new.

    Raises:
        StoreError: a session doesn't fit those in the store, or the store holds another content
            under its key (both hashes are shown). None of the sessions is appended then.
    """
    with _locked(root, fmt):
        return append_unlocked(sessions, root, fmt, nan)


def append_unlocked(sessions: Sessions, root: Root, fmt: str, nan: NanPolicy) -> int:
    """What `append_shards` does once it holds the lock."""
    place = place_of(root, fmt)
    recover(place)
    before = _raw_index(place)
    if before is None:
        _write(sessions, root, fmt, nan)
        return len(StoreIndex.load(place, fmt).sessions)
    index = StoreIndex.load(place, fmt)
    intake = Intake(nan, index)
    writer = None
    try:
        for value in sessions:
            admitted = intake.admit(as_session(value, len(intake.entries)))
            if admitted is None:
                continue
            if writer is None:
                writer = WRITERS[fmt](place, index)
            writer.add(len(intake.entries) - 1, *admitted)
        if writer is None:
            return 0
        writer.close()
        writer.sync()
        _check_unchanged(place, before)
        _index_of(fmt, intake, writer.files).save(place)
        writer.committed()
    except BaseException:
        if writer is not None:
            with contextlib.suppress(OSError):  # a full disk fails here once more
                writer.close()
            # The index as it is: the error may have come after it was replaced.
            writer.abandon(StoreIndex.load(place, fmt))
        raise
    return len(intake.entries) - len(index.sessions)


def _index_of(fmt: str, intake: Intake, files: dict[str, FileEntry]) -> StoreIndex:
    return StoreIndex(
        fmt=fmt,
        columns=intake.columns,
        beside=intake.beside,
        derived=intake.derived,
        made=intake.made,
        sessions=intake.entries,
        files=dict(sorted(files.items())),
    )


def _raw_index(place: Place) -> bytes | None:
    """The bytes of the index as it is; None where there is no store."""
    try:
        return place.read([INDEX])[0]
    except (FileNotFoundError, NotADirectoryError):
        return None


def _check_unchanged(place: Place, before: bytes | None) -> None:
    """Refuse to commit over the work of another writer, where no lock held it off."""
    if _raw_index(place) != before:
        raise StoreError(
            place,
            expected="one writer at a time",
            found="an index that another one wrote meanwhile",
            fix="Start again: what the other one wrote is kept",
        )


def _occupied(place: Place) -> StoreError:
    return StoreError(
        place,
        expected="a place for new shards",
        found="files already there",
        fix="Choose another folder, or replace them with `--replace` (`replace=True`)",
    )
