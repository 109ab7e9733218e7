"""From market data files to a store: read in order or by several processes, appended as read.

What a file means is decided in `tape`, how sessions lie on disk in `store`; this joins the two.
Ingesting the same files again changes nothing: a session that is there with the same content is
passed over, and one with another content is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

from tapeline.errors import TapeError
from tapeline.files import atomic_write
from tapeline.ingest.config import Files, Reading
from tapeline.session import Session
from tapeline.store import append_shards, write_part, write_shards
from tapeline.store.parts import PARTS
from tapeline.store.place import Root, folder_of, is_remote
from tapeline.store.write import check_out
from tapeline.tape import TapeReport, derivations, derive, read_tape, reader_named

Progress = Callable[[int, int], None]
_WATCH_S: Final = 1.0
_read_by_part: Any = None  # in a worker: where its part tells how many bytes it has read


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


def ingest_parallel(
    tapes: Sequence[Files],
    root: Root,
    fmt: str,
    reading: Reading,
    num_jobs: int,
    *,
    progress: Progress | None = None,
) -> Ingested:
    """Read tapes in `num_jobs` processes; the store is the one that a single process writes.

    Args:
        tapes, root, fmt, reading: as `ingest` takes them.
        num_jobs: how many processes, at most.
        progress: called now and then with the bytes read and the bytes of all files.

    Raises:
        TapelineError: as `ingest` does; parts that were whole are kept for the next try.
    """
    check_out(root, fmt)
    if is_remote(root):
        raise TapeError(
            "--jobs",
            expected="a store in a folder",
            found=str(root),
            fix="Use --part in several processes, or ingest into a folder and convert it",
        )
    num = min(num_jobs, len(tapes))
    num_bytes = sum(file.stat().st_size for files in tapes for file in files)
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads can hang it
    read = spawn.Array("q", num, lock=False)  # by each part, and written by it alone
    with ProcessPoolExecutor(
        num, mp_context=spawn, initializer=_begin_worker, initargs=(os.getpid(), read)
    ) as pool:
        futures = [
            pool.submit(_ingest_told, tapes, root, fmt, reading, part, num)
            for part in range(1, num + 1)
        ]
        while wait(futures, timeout=_WATCH_S, return_when=FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                break
            if progress is not None:
                progress(sum(read), num_bytes)
        done = [future.result() for future in futures]
    shutil.rmtree(folder_of(root) / PARTS)
    return Ingested(tuple(itertools.chain.from_iterable(part.reports for part in done)))


def _begin_worker(parent: int, read: Any) -> None:
    """Keep where to tell what was read, and end when the process that began this one is gone."""
    global _read_by_part  # noqa: PLW0603  # what is shared can only be handed over here
    _read_by_part = read

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="tapeline-parent", daemon=True).start()


def _ingest_told(
    tapes: Sequence[Files], root: Root, fmt: str, reading: Reading, part: int, num_parts: int
) -> Ingested:
    """`ingest_part` in a worker."""
    before = 0

    def tell(done: int, total: int) -> None:
        nonlocal before
        _read_by_part[part - 1] = before + done
        if done >= total:
            before += total

    return ingest_part(tapes, root, fmt, reading, part, num_parts, progress=tell)


def distinct(tapes: Sequence[Files], reading: Reading) -> list[Files]:
    """The tapes, each once: of files that come in pairs, either or both may have been named.

    Raises:
        TapeError: a file's partner is missing.
    """
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
            sessions=reading.sessions(),
            grid=reading.grid,
            policy=reading.policy,
            options=reading.options,
            max_unreadable_share=reading.max_unreadable_share,
            max_lifted_share=reading.max_lifted_share,
            progress=progress,
        )
        yield from derive(tape, wanted, tape.counts) if wanted else tape
        reports.append(tape.report)
