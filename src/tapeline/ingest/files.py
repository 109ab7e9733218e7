"""From market data files to a store: read in order, appended as read, whole or as one part.

What a file means is decided in `tape`, how sessions lie on disk in `store`; this joins the two.
Ingesting the same files again changes nothing: a session that is there with the same content is
passed over, and one with another content is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tapeline.errors import TapeError
from tapeline.files import atomic_write
from tapeline.ingest.config import Files, Reading
from tapeline.session import Session
from tapeline.store import append_shards, write_part, write_shards
from tapeline.store.layout import check_format
from tapeline.store.parts import PARTS
from tapeline.store.place import Root, folder_of, is_remote, place_of
from tapeline.tape import TapeReport, derivations, derive, read_tape, reader_named

Progress = Callable[[int, int], None]


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
    tapes: Sequence[Files],
    root: Root,
    fmt: str,
    reading: Reading,
    part: int,
    num_parts: int,
    *,
    progress: Progress | None = None,
) -> Ingested:
    """Read one of `num_parts` contiguous shares of the tapes; the last part to end joins all.

    For array jobs: each process is given the same tapes and its own `part`, from 1. `progress` is
    called as `ingest` does.

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
    sessions = _read(mine, reading, reports, progress)
    joined = write_part(sessions, root, fmt, part=part, num_parts=num_parts)
    return Ingested(tuple(reports), is_complete=joined is not None)


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
    if is_remote(root):
        return  # objects behind a URL can't be compared and kept in one step
    names = [[file.name for file in files] for files in tapes]
    told = hashlib.sha256(repr((names, reading)).encode()).hexdigest()
    job = folder_of(root) / PARTS / f"job-of-{num_parts}"
    job.parent.mkdir(parents=True, exist_ok=True)
    if not job.exists():
        atomic_write(job, told)
    if job.read_text() != told:
        raise TapeError(
            f"{root}, parts of {num_parts}",
            expected="the files and settings of the parts that are there",
            found="others",
            fix=f"Give every part the same, or delete {job.parent}",
        )


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
        yield from derive(tape, wanted, tape.counts) if wanted else tape
        reports.append(tape.report)
