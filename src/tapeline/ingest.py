"""From market data files to a store: read in order or by several processes, appended as read.

What a file means is decided in `tape`, how sessions lie on disk in `store`; this joins the two.
Ingesting the same files again changes nothing: a session that is there with the same content is
passed over, and one with another content is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from tapeline.configfile import Config
from tapeline.errors import TapeError
from tapeline.files import atomic_write
from tapeline.session import Session
from tapeline.store import append_shards, write_part, write_shards
from tapeline.store.layout import check_format
from tapeline.store.parts import PARTS
from tapeline.store.place import Root, place_of
from tapeline.tape import (
    Calendar,
    Gaps,
    GridOptions,
    LocalHours,
    Policy,
    Sessions,
    TapeReport,
    UtcDays,
    derivations,
    derive,
    detect,
    read_tape,
    reader_named,
)
from tapeline.tape.grid import Answer, to_ns

Files = Sequence[Path]
Progress = Callable[[int, int], None]
_WATCH_S: Final = 1.0
_POLICY: Final = ("crossed", "locked", "one_sided", "hold_s", "stale_cross_s")


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read; the fields are those of `read_tape`.

    Attributes:
        format: name of a reader; recognised by content if None.
        instrument: name in the sessions' keys; as the files say if None.
        sessions: makes the rule of where sessions begin and end, for each tape its own, since
            a rule remembers where it was; by UTC day if None.
        grid, policy: the format's own if None.
        options: of the reader.
        max_unreadable_share: largest share of lines that may be left out.
        max_lifted_share: largest share of events that may be out of the order of time.
        derive: names of derived columns, computed once, here.
    """

    format: str | None = None
    instrument: str | None = None
    sessions: Callable[[], Sessions] | None = None
    grid: GridOptions | None = None
    policy: Policy | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_unreadable_share: float = 0.001
    max_lifted_share: float = 0.01
    derive: tuple[str, ...] = ()


class IngestConfig(Config):
    """How files are read, as a TOML file and `--set` say it; `reading` gives the objects.

    Attributes:
        reader: name of a reader; recognised by content by default.
        sessions: `utc`, `gap:SECONDS`, `hours:HH:MM-HH:MM[,…]@ZONE` or `calendar:NAME`.
        pre, post: with a calendar, open with its pre-market, close with its post-market.
        night_from, weekends: with hours, as `LocalHours` takes them.
        step_s, depth, max_age_s, age_column: the grid, as `GridOptions` takes them; 0 seconds
            means none: each state of the file a row, any age.
        crossed, locked, one_sided, hold_s, stale_cross_s: as `Policy` takes them.
        options: of the reader.
        max_unreadable_share: largest share of lines that may be left out.
        max_lifted_share: largest share of events that may be out of the order of time.
        derive: derived columns: known names, or `module:function`.
    """

    reader: str | None = None
    instrument: str | None = None
    sessions: str = "utc"
    pre: bool = False
    post: bool = False
    night_from: str | None = None
    weekends: bool = True
    step_s: float | None = None
    depth: int | None = None
    max_age_s: float | None = None
    age_column: bool | None = None
    crossed: Answer | None = None
    locked: Answer | None = None
    one_sided: Answer | None = None
    hold_s: float | None = None
    stale_cross_s: float | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_unreadable_share: float = 0.001
    max_lifted_share: float = 0.01
    derive: list[str] = Field(default_factory=list)

    @field_validator("crossed", "locked", "one_sided", mode="before")
    @classmethod
    def _nan_is_a_word(cls, value: Any) -> Any:
        """TOML reads a bare nan as a number."""
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    def reading(self, files: Files) -> Reading:
        """The objects for files of one format; what isn't set is the format's own default.

        Raises:
            TapeError: a value is outside its range, or a name isn't known.
        """
        kind = reader_named(self.reader) if self.reader else detect(files[0])
        return Reading(
            format=kind.name,
            instrument=self.instrument,
            sessions=self._sessions(),
            grid=dataclasses.replace(kind.grid, **self._grid()),
            policy=dataclasses.replace(kind.policy, **self._given(*_POLICY)),
            options=self.options,
            max_unreadable_share=self.max_unreadable_share,
            max_lifted_share=self.max_lifted_share,
            derive=tuple(self.derive),
        )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _grid(self) -> dict[str, Any]:
        given = self._given("depth", "age_column")
        if self.step_s is not None:
            given["step_ns"] = to_ns("step_s", self.step_s) if self.step_s else None
        if self.max_age_s is not None:
            given["max_age_s"] = self.max_age_s or None
        return given

    def _sessions(self) -> Callable[[], Sessions]:
        kind, _, rest = self.sessions.partition(":")
        if self.sessions == "utc":
            return UtcDays
        if kind == "calendar" and rest:
            return partial(Calendar, rest, self.pre, self.post)
        hours, at, zone = rest.partition("@")
        if kind == "hours" and at:
            return partial(
                LocalHours, tuple(hours.split(",")), zone, self.night_from, self.weekends
            )
        with contextlib.suppress(ValueError):
            if kind == "gap":
                return partial(Gaps, float(rest))
        raise TapeError(
            "sessions",
            expected="utc, gap:SECONDS, hours:HH:MM-HH:MM@ZONE or calendar:NAME",
            found=repr(self.sessions),
            fix="Write one such as calendar:XNYS or hours:17:00-16:00@America/Chicago",
        )


@dataclass(frozen=True, slots=True)
class Ingested:
    """What became of the files.

    Attributes:
        reports: one for each tape, in order.
        is_complete: whether the store is whole; False while other parts are still being written.
    """

    reports: tuple[TapeReport, ...]
    is_complete: bool = True


def ingest(
    tapes: Sequence[Files],
    root: Root,
    fmt: str,
    reading: Reading,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Ingested:
    """Read tapes one after the other and append their sessions to a store.

    Args:
        tapes: the files of each tape; those of one tape continue each other.
        root: the store, made if it isn't there.
        fmt: "mmap", "npy", "csv" or "zarr".
        reading: how the files are read.
        replace: write over what the store holds in this format.
        progress: called with the bytes read and the bytes of each file.

    Raises:
        TapelineError: a file can't be read, or its sessions don't fit the store, which is then
            as it was.
    """
    check_out(root, fmt)
    reports: list[TapeReport] = []
    sessions = _read(tapes, reading, reports, progress)
    if replace:
        write_shards(sessions, root, fmt, replace=True)
    else:
        append_shards(sessions, root, fmt)
    return Ingested(tuple(reports))


def ingest_part(
    tapes: Sequence[Files], root: Root, fmt: str, reading: Reading, part: int, num_parts: int
) -> Ingested:
    """Read one of `num_parts` contiguous shares of the tapes; the last part to end joins all.

    For array jobs: each process is given the same tapes and its own `part`, from 1.

    Raises:
        TapelineError: as `ingest` does, or there are more parts than tapes.
    """
    if num_parts > len(tapes):
        raise TapeError(
            f"part {part}/{num_parts}",
            expected=f"at most {len(tapes)} parts, one for each tape",
            found=str(num_parts),
            fix="Use fewer parts, or give more files",
        )
    bounds = [len(tapes) * i // num_parts for i in range(num_parts + 1)]
    mine = tapes[bounds[part - 1] : bounds[part]] if 1 <= part <= num_parts else ()
    _check_same_job(tapes, root, reading, num_parts)
    reports: list[TapeReport] = []
    sessions = _read(mine, reading, reports, None)
    joined = write_part(sessions, root, fmt, part=part, num_parts=num_parts)
    return Ingested(tuple(reports), is_complete=joined is not None)


def ingest_parallel(
    tapes: Sequence[Files], root: Root, fmt: str, reading: Reading, num_jobs: int
) -> Ingested:
    """Read tapes in `num_jobs` processes; the store is the one that a single process writes.

    Raises:
        TapelineError: as `ingest` does; parts that were whole are kept for the next try.
    """
    check_out(root, fmt)
    if isinstance(root, str):
        raise TapeError(
            "--jobs",
            expected="a store in a folder",
            found=root,
            fix="Use --part in several processes, or ingest into a folder and convert it",
        )
    num = min(num_jobs, len(tapes))
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads can hang it
    with ProcessPoolExecutor(
        num, mp_context=spawn, initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        share = itertools.repeat
        done = list(
            pool.map(
                ingest_part,
                share(tapes),
                share(root),
                share(fmt),
                share(reading),
                range(1, num + 1),
                share(num),
            )
        )
    shutil.rmtree(Path(root) / PARTS)
    return Ingested(tuple(itertools.chain.from_iterable(part.reports for part in done)))


def distinct(tapes: Sequence[Files], reading: Reading) -> list[Files]:
    """The tapes, each once: of files that come in pairs, either or both may have been named.

    Raises:
        TapeError: a file's partner is missing.
    """
    if reading.format is None:
        return list(tapes)
    kind = reader_named(reading.format)
    return list({tuple(kind.tape_of(file) for file in files): files for files in tapes}.values())


def _check_same_job(tapes: Sequence[Files], root: Root, reading: Reading, num_parts: int) -> None:
    """Parts of one number of parts must be of the same files, read alike, to be one store."""
    if isinstance(root, str):
        return  # objects behind a URL can't be compared and kept in one step
    names = [[file.name for file in files] for files in tapes]
    told = hashlib.sha256(repr((names, reading)).encode()).hexdigest()
    job = root / PARTS / f"job-of-{num_parts}"
    job.parent.mkdir(parents=True, exist_ok=True)
    if not job.exists():
        atomic_write(job, told)
    if job.read_text() != told:
        raise TapeError(
            f"{root}, parts of {num_parts}",
            expected="the files and settings of the parts that are there",
            found="others",
            fix=f"Give every part the same, or delete {root / PARTS}",
        )


def _end_with(parent: int) -> None:
    """End this worker when the process that started it is gone, however it ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="tapeline-parent", daemon=True).start()


def check_out(root: Root, fmt: str) -> None:
    """Refuse, before any file is read, what no store can be written as or where none can lie.

    Raises:
        StoreError: an unknown format, or a place that can't be made or written to.
    """
    check_format(fmt)
    place_of(root, fmt).check_writable()


def _read(
    tapes: Sequence[Files],
    reading: Reading,
    reports: list[TapeReport],
    progress: Progress | None,
) -> Iterator[Session]:
    wanted = derivations(reading.derive)
    for files in tapes:
        tape = read_tape(
            list(files),
            format=reading.format,
            instrument=reading.instrument,
            sessions=reading.sessions() if reading.sessions else None,
            grid=reading.grid,
            policy=reading.policy,
            options=reading.options,
            max_unreadable_share=reading.max_unreadable_share,
            max_lifted_share=reading.max_lifted_share,
            progress=progress,
        )
        yield from derive(tape, wanted) if wanted else tape
        reports.append(tape.report)
