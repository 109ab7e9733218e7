"""Large files between page-aligned memory and the disk, hashed on the way.

Covers: writing and reading past the page cache. Copying 1.2 GB into it took 0.5 to 2 s of a
core that the training loop wants; past it the disk fetches the bytes itself (0.01 s). Reading
back past it also asks the disk instead of the copy that was just written. Where a file system
refuses (tmpfs, some network ones), the same calls go through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

LARGE_BYTES = 1_000_000  # below, the cache and a write in the loop are faster than any detour
_BLOCK_BYTES = 4096  # what disks and file systems ask of addresses, offsets and lengths
_READERS = 4  # at once: touching fresh memory takes as long as the disk does
_CHUNK_BYTES = 8 << 20  # stays in the processor's cache between hashing and writing


def host_memory(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Page-aligned bytes on the host, uint8 [num_bytes rounded up to whole blocks].

    Args:
        num_bytes: how many at least.
        pinned: page-locked, for copies from a CUDA device that don't block.
    """
    size = max(1, -(-num_bytes // _BLOCK_BYTES)) * _BLOCK_BYTES
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the first touch of small pages is 5 to 20 times slower
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def write_hashed(descriptor: int, memory: torch.Tensor, num_bytes: int) -> str:
    """Write the first bytes of `memory` to an empty file; returns their xxh3-128.

    Args:
        descriptor: of the file, open for writing. It is not fsynced here.
        memory: from `host_memory`.
        num_bytes: size of the file.
    """
    _pass_cache(descriptor)
    digest = xxhash.xxh3_128()
    view = memory.numpy().data
    end = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES  # whole blocks; cut to size afterwards
    for start in range(0, end, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, end)
        digest.update(view[start : min(stop, num_bytes)])
        while start < stop:
            start += os.write(descriptor, view[start:stop])
    os.ftruncate(descriptor, num_bytes)
    return digest.hexdigest()


def read_hashed(path: Path, num_bytes: int) -> tuple[torch.Tensor, str]:
    """Read a file of `num_bytes` into fresh memory.

    Returns:
        The bytes, uint8 [num_bytes], and their xxh3-128.
    """
    memory = host_memory(num_bytes)
    view = memory.numpy().data
    digest = xxhash.xxh3_128()
    starts = range(0, num_bytes, _CHUNK_BYTES)

    with _opened(path, num_bytes) as descriptor:

        def fill(start: int) -> memoryview:
            stop = min(start + _CHUNK_BYTES, num_bytes)
            at = start
            while at < stop:
                at += _read_at(descriptor, view[at : start + _CHUNK_BYTES], at)
            return view[start:stop]

        with ThreadPoolExecutor(_READERS) as pool:  # starts a thread only for what it is given
            for chunk in pool.map(fill, starts):
                digest.update(chunk)
    return memory[:num_bytes], digest.hexdigest()


def hash_file(path: Path, num_bytes: int) -> str:
    """The xxh3-128 of a file of `num_bytes`, in bounded memory."""
    view = host_memory(min(num_bytes, _CHUNK_BYTES)).numpy().data
    digest = xxhash.xxh3_128()
    start = 0
    with _opened(path, num_bytes) as descriptor:
        while start < num_bytes:
            got = _read_at(descriptor, view, start)
            digest.update(view[:got])
            start += got
    return digest.hexdigest()


def _read_at(descriptor: int, view: memoryview, start: int) -> int:
    got = os.preadv(descriptor, [view], start)
    if got == 0:
        raise OSError(errno.EIO, "it became shorter while it was read")
    return got


@contextlib.contextmanager
def _opened(path: Path, num_bytes: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if num_bytes >= LARGE_BYTES:
            _pass_cache(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _pass_cache(descriptor: int) -> None:
    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        with contextlib.suppress(OSError):  # refused: through the cache, then
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
