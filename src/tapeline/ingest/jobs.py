"""Tapes read by several processes of this machine, as parts of one store."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from typing import Any, Final

from tapeline.errors import TapeError
from tapeline.ingest.config import Files, Reading
from tapeline.ingest.files import Ingested, Progress, check_out, ingest_part
from tapeline.store.parts import PARTS
from tapeline.store.place import Root, folder_of, is_remote

_WATCH_S: Final = 1.0
_read_by_part: Any = None  # in a worker: where its part tells how many bytes it has read


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
