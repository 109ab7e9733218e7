"""An index over a folder of runs: SQLite, built on read from the plain files.

Training never writes it. What is listed is always what the files say: a run whose files have
another size or time than when they were read is read again, one that is gone is dropped, and an
index that is damaged or of another version is made anew. It lies in the user's cache folder:
locks on network filesystems can't be trusted, and a folder of runs may be read-only.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic_core import from_json

from tapeline.errors import RunError
from tapeline.runs.folder import RECORD
from tapeline.runs.summary import summary

_VERSION = 2
_DEPTH = 4  # replicates and trials lie in folders of their own
_FILES = ("attempts.jsonl", "metrics/rank-0.jsonl", "ledger/rank-0.jsonl")
_LOCK_S = 10.0


@dataclass(frozen=True, slots=True)
class Indexed:
    """What the index holds now.

    Attributes:
        summaries: of every run, see `summary`; in no order.
        num_read: runs whose files had to be read for it.
    """

    summaries: list[dict[str, Any]]
    num_read: int


def indexed(
    root: Path,
    *,
    place: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Indexed:
    """The runs below a folder, as they are now.

    Args:
        root: the folder of runs; they may lie four levels deep.
        place: of the index; by default a file of its own for each root in the cache folder.
        progress: called with the runs read and to be read.

    Raises:
        RunError: there is no such folder.
    """
    if not root.is_dir():
        raise RunError(
            root,
            expected="a folder of runs",
            found="no folder",
            fix="Give the folder that holds the runs, such as runs",
        )
    there = dict(_runs(str(root.absolute()), _DEPTH))
    try:
        return _indexed(there, place or _place(root), progress)
    except (sqlite3.OperationalError, OSError):
        # It can't be written here, or someone holds it for long. The files are what counts.
        return _indexed(there, None, progress)


def _indexed(
    there: dict[str, str], place: Path | None, progress: Callable[[int, int], None] | None
) -> Indexed:
    with _opened(place) as database:
        known = dict(database.execute("SELECT path, signature FROM runs"))
        stale = [path for path, signature in there.items() if known.get(path) != signature]
        for number, path in enumerate(stale, 1):
            content = json.dumps(summary(Path(path)), allow_nan=False)
            database.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (path, there[path], content)
            )
            if progress:
                progress(number, len(stale))
        gone = [(path,) for path in known if path not in there]
        database.executemany("DELETE FROM runs WHERE path = ?", gone)
        rows = database.execute("SELECT summary FROM runs").fetchall()
    # Of ten thousand runs, `json` takes half a second.
    return Indexed([from_json(content) for (content,) in rows], len(stale))


def _place(root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = xxhash.xxh3_64_hexdigest(str(root.resolve()).encode())
    return cache / "tapeline" / f"runs-{name}.sqlite"


@contextlib.contextmanager
def _opened(place: Path | None) -> Iterator[sqlite3.Connection]:
    """The database, in memory without a place; committed at the end."""
    if place:
        place.parent.mkdir(parents=True, exist_ok=True)
    database = _connected(place)
    try:
        yield database
        database.commit()
    finally:
        database.close()


def _connected(place: Path | None) -> sqlite3.Connection:
    for _ in range(2):
        database = sqlite3.connect(place or ":memory:", timeout=_LOCK_S)
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version != _VERSION:
                database.execute("DROP TABLE IF EXISTS runs")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            database.execute(
                "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, signature TEXT, "
                "summary TEXT) WITHOUT ROWID"
            )
        except sqlite3.OperationalError:  # not writable, or locked
            database.close()
            raise
        except sqlite3.DatabaseError:  # not a database
            database.close()
            assert place, "in memory there is nothing to be damaged"
            place.unlink(missing_ok=True)
            continue
        return database
    raise sqlite3.OperationalError("it can't be made anew")


def _runs(folder: str, depth: int) -> Iterator[tuple[str, str]]:
    """Each run below a folder, with sizes and times of what is read of it."""
    try:
        entries = [e for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        first = _signature(f"{entry.path}/{RECORD}")
        if first:
            others = (_signature(f"{entry.path}/{name}") for name in _FILES)
            yield entry.path, " ".join([first, *others])
        elif depth > 1:
            yield from _runs(entry.path, depth - 1)


def _signature(path: str) -> str:
    try:
        about = os.stat(path)  # noqa: PTH116 - ten thousand Path objects take longer than the disk
    except OSError:
        return ""
    return f"{about.st_size}:{about.st_mtime_ns}"
