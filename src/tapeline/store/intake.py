"""What a session has to be to come into a store: checked one by one, by every writer.

Covers: one list of columns, the same arrays beside, each key once, finite values, one NaN.
Does not cover how the session is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from tapeline.errors import StoreError
from tapeline.session import BoolArray, Int64Array, Session, SessionKey
from tapeline.store.formats import arrays_of, content_hash
from tapeline.store.layout import SessionEntry, StoreIndex

NanPolicy = Literal["refuse", "mark"]


class Intake:
    """Admits sessions to a store, after those of `index`.

    Args:
        nan: what to do with a row that isn't finite and isn't marked invalid.
        index: what the store holds already; None for a new one.
    """

    def __init__(self, nan: NanPolicy, index: StoreIndex | None = None) -> None:
        if nan not in get_args(NanPolicy):
            raise StoreError(
                f"nan={nan!r}",
                expected=f"one of {', '.join(get_args(NanPolicy))}",
                found="another name",
                fix="Refuse rows that aren't finite, or mark them invalid",
            )
        self.nan = nan
        self.entries: list[SessionEntry] = [] if index is None else list(index.sessions)
        self.columns: list[str] = [] if index is None else index.columns
        self.beside: list[str] = [] if index is None else index.beside
        self.derived: dict[str, str] = {} if index is None else index.derived
        self.made: dict[str, str] = {} if index is None else index.made
        self._held = {entry.key: entry for entry in self.entries}
        self._new: set[SessionKey] = set()
        self._num_rows = 0 if index is None else index.num_rows

    def admit(self, session: Session) -> tuple[Session, SessionEntry] | None:
        """The session as it is to be written and its entry; None if the store holds just that.

        Raises:
            StoreError: it doesn't fit the sessions before it.
        """
        if not self.entries:
            self.columns = list(session.columns)
            self.beside = [name for name in arrays_of(session) if name != "values"]
            self.derived, self.made = dict(session.derived), dict(session.made)
        self._check_fits(session)
        valid = self._valid_rows(session)
        session = _with_one_nan(session)
        entry = _entry(session, self._num_rows, valid)
        held = self._held.get(session.key)
        if held is not None:
            self._check_same(entry, held)
            return None
        self._new.add(session.key)
        self.entries.append(entry)
        self._num_rows += entry.rows
        return session, entry

    def _check_fits(self, session: Session) -> None:
        """One store has one list of columns, the same arrays beside, and each key once."""
        first = self.entries[0].key if self.entries else session.key
        if list(session.columns) != self.columns:
            raise StoreError(
                f"session {session.key}",
                expected=f"the {len(self.columns)} columns of {first}: {some(self.columns)}",
                found=f"{len(session.columns)}: {some(session.columns)}",
                fix="Write sessions of other columns to a store of their own",
            )
        wanted = ["values", *self.beside]
        if list(arrays_of(session)) != wanted:
            raise StoreError(
                f"session {session.key}",
                expected=f"{', '.join(wanted)}, as {first} has",
                found=", ".join(arrays_of(session)),
                fix="Give all sessions times and ages, or none",
            )
        if dict(session.derived) != self.derived:
            raise StoreError(
                f"session {session.key}, derived columns",
                expected=f"{_versions(self.derived)}, as {first} has",
                found=_versions(session.derived),
                fix="Derive all sessions of a store alike, or write the store anew",
            )
        if dict(session.made) != self.made:
            expected, found = _differing(self.made, session.made)
            raise StoreError(
                f"session {session.key}, how its rows are made",
                expected=f"{expected}, as {first} has",
                found=found,
                fix="Give it the options of this store, or a store of its own",
            )
        if session.key in self._new:
            raise StoreError(
                f"session {session.key}",
                expected="a key that no other session has",
                found="the same instrument, date and segment twice",
                fix="Number the segments of a date, or drop the repeated session",
            )

    def _check_same(self, entry: SessionEntry, held: SessionEntry) -> None:
        found, written = entry.digest(self.columns), held.digest(self.columns)
        if found != written:
            raise StoreError(
                f"session {entry.key}",
                expected=f"what the store holds under that key, content {written}",
                found=f"content {found}",
                fix="Write the store anew with `replace`, or give the session another segment",
            )

    def _valid_rows(self, session: Session) -> BoolArray:
        valid = np.ones(len(session), np.bool_) if session.valid is None else session.valid
        finite = np.isfinite(session.values).all(axis=1)
        bad = valid & ~finite
        if self.nan == "refuse" and bad.any():
            row = int(np.argmax(bad))
            column = int(np.argmax(~np.isfinite(session.values[row])))
            raise StoreError(
                f"session {session.key}, row {row}, column {session.columns[column]}",
                expected="finite values",
                found=f"{session.values[row, column]}, the first of {int(bad.sum())} such rows",
                fix='Mend the values, or keep windows off such rows with nan="mark"',
            )
        return valid & finite


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str]:
    """What two have differently, each as words."""
    names = [name for name in sorted({**one, **other}) if one.get(name) != other.get(name)]
    first, second = (
        ", ".join(f"{name} {side.get(name, 'not given')}" for name in names)
        for side in (one, other)
    )
    return first, second


def _versions(derived: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in derived.items()) or "none"


def _with_one_nan(session: Session) -> Session:
    """The same session with every NaN of the same bits: text can't keep a NaN's payload."""
    missing = np.isnan(session.values)
    if not missing.any():
        return session
    values = np.where(missing, np.float32(np.nan), session.values)
    return replace(session, values=values)


def _entry(session: Session, offset: int, valid: BoolArray) -> SessionEntry:
    return SessionEntry(
        instrument=session.key.instrument,
        date=session.key.date,
        segment=session.key.segment,
        rows=len(session),
        offset=offset,
        origin=session.origin,
        xxh3={name: content_hash(array) for name, array in arrays_of(session).items()},
        invalid=list(zip(*(edge.tolist() for edge in runs_of(~valid)), strict=True)),
    )


def runs_of(mask: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Where the runs of True in a mask start and stop."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2]
