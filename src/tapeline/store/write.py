"""Writing a store: one session in memory at a time, aside, and renamed when whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from tapeline.errors import StoreError
from tapeline.files import atomic_folder
from tapeline.session import BoolArray, Session, SessionKey, as_session
from tapeline.store.formats import WRITERS, parts
from tapeline.store.layout import SessionEntry, StoreIndex, check_format

NanPolicy = Literal["refuse", "mark"]


def write_shards(
    sessions: Iterable[Session | npt.ArrayLike],
    root: Path | str,
    fmt: str,
    *,
    nan: NanPolicy = "refuse",
    replace: bool = False,
) -> Path:
    """Write sessions as shards of one format into the store at `root`.

    Args:
        sessions: sessions, or plain arrays `[rows, columns]`; read one at a time.
        root: the store's folder; the shards go to its subfolder `fmt`.
        fmt: "mmap" (one float32 file), "npy" (a file per session) or "csv" (to look at).
        nan: what to do with a row that holds NaN or infinity and isn't marked invalid:
            "refuse" the whole, or "mark" the row invalid, so that no window touches it.
        replace: write over shards of this format that are already there.

    Returns:
        The folder written.

    Raises:
        StoreError: no sessions, an unknown format, columns or keys that don't fit together, a
            value that isn't finite, or shards already there. Nothing is left behind.
    """
    check_format(fmt)
    if nan not in get_args(NanPolicy):
        raise StoreError(
            f"nan={nan!r}",
            expected=f"one of {', '.join(get_args(NanPolicy))}",
            found="another name",
            fix="Refuse rows that aren't finite, or mark them invalid",
        )
    folder = Path(root) / fmt
    with contextlib.ExitStack() as stack:
        try:
            unfinished = stack.enter_context(atomic_folder(folder, replace=replace))
        except (FileExistsError, NotADirectoryError):
            raise StoreError(
                folder,
                expected="a place for new shards",
                found="files already there",
                fix="Choose another folder, or replace them with `--replace` (`replace=True`)",
            ) from None
        _write(sessions, unfinished, fmt, nan)
    return folder


def _write(
    sessions: Iterable[Session | npt.ArrayLike], folder: Path, fmt: str, nan: NanPolicy
) -> None:
    writer = WRITERS[fmt](folder)
    entries: list[SessionEntry] = []
    seen: set[SessionKey] = set()
    first: Session | None = None
    offset = 0
    try:
        for number, value in enumerate(sessions):
            session = as_session(value, number)
            first = session if first is None else first  # a session without rows is falsy
            _check_fits(session, first, seen)
            seen.add(session.key)
            valid = _valid_rows(session, nan)
            session = _with_one_nan(session)
            writer.add(number, session)
            entries.append(_entry(session, offset, valid))
            offset += len(session)
    finally:
        writer.close()
    if first is None:
        raise StoreError(
            folder.parent,
            expected="at least one session",
            found="none",
            fix="Check that the input holds rows, and what the reader's report says was dropped",
        )
    index = StoreIndex(
        fmt=fmt,
        columns=list(first.columns),
        beside=[name for name in parts(first) if name != "values"],
        sessions=entries,
        files=dict(sorted(writer.files.items())),
    )
    index.save(folder)


def _check_fits(session: Session, first: Session, seen: set[SessionKey]) -> None:
    """One store has one list of columns, the same arrays beside, and each key once."""
    if session.columns != first.columns:
        raise StoreError(
            f"session {session.key}",
            expected=f"the {len(first.columns)} columns of {first.key}: {_some(first.columns)}",
            found=f"{len(session.columns)}: {_some(session.columns)}",
            fix="Write sessions of other columns to a store of their own",
        )
    if list(parts(session)) != list(parts(first)):
        raise StoreError(
            f"session {session.key}",
            expected=f"{', '.join(parts(first))}, as {first.key} has",
            found=", ".join(parts(session)),
            fix="Give all sessions times and ages, or none",
        )
    if session.key in seen:
        raise StoreError(
            f"session {session.key}",
            expected="a key that no other session has",
            found="the same instrument, date and segment twice",
            fix="Number the segments of a date, or drop the repeated session",
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _valid_rows(session: Session, nan: NanPolicy) -> BoolArray:
    valid = np.ones(len(session), np.bool_) if session.valid is None else session.valid
    finite = np.isfinite(session.values).all(axis=1)
    bad = valid & ~finite
    if nan == "refuse" and bad.any():
        row = int(np.argmax(bad))
        column = int(np.argmax(~np.isfinite(session.values[row])))
        raise StoreError(
            f"session {session.key}, row {row}, column {session.columns[column]}",
            expected="finite values",
            found=f"{session.values[row, column]}, the first of {int(bad.sum())} such rows",
            fix='Mend the values, or keep windows off such rows with nan="mark"',
        )
    return valid & finite


def _with_one_nan(session: Session) -> Session:
    """The same session with every NaN of the same bits: text can't keep a NaN's payload."""
    missing = np.isnan(session.values)
    if not missing.any():
        return session
    values = np.where(missing, np.float32(np.nan), session.values)
    return Session(
        session.key, values, session.columns, session.times, session.age_ns, origin=session.origin
    )


def _entry(session: Session, offset: int, valid: BoolArray) -> SessionEntry:
    return SessionEntry(
        instrument=session.key.instrument,
        date=session.key.date,
        segment=session.key.segment,
        rows=len(session),
        offset=offset,
        origin=session.origin,
        xxh3={name: content_hash(array) for name, array in parts(session).items()},
        invalid=ranges(~valid),
    )


def content_hash(array: npt.NDArray[Any]) -> str:
    """The xxh3-128 of an array's bytes in C order."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)


def ranges(mask: BoolArray) -> list[tuple[int, int]]:
    """The runs of True in `mask` as `[start, stop)` pairs."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
