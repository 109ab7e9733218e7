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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

LARGE_BYTES = 1_000_000  # below, the cache and a write in the loop are faster than any detour
_BLOCK_BYTES = 4096  # what disks and file systems ask of addresses, offsets and lengths
_READERS = 4  # at once: touching fresh memory takes as long as the disk does
_CHUNK_BYTES = 8 << 20  # stays in the processor's cache between hashing and writing
HASHED_BYTES = 4 << 20  # of a file that are hashed by themselves, too


class Hashes:
    """The xxh3-128 of bytes that come in turn: over all, and over each `HASHED_BYTES`."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self.num_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._whole.update(data)
        view = memoryview(data)
        while len(view):
            part = view[: HASHED_BYTES - self.num_bytes % HASHED_BYTES]
            self._block.update(part)
            self.num_bytes += len(part)
            view = view[len(part) :]
            if self.num_bytes % HASHED_BYTES == 0:
                self._end_block()

    @property
    def whole(self) -> str:
        """Over all bytes so far."""
        return self._whole.hexdigest()

    def blocks(self) -> list[str]:
        """Over each block, at the end; none where there is one only."""
        if self.num_bytes % HASHED_BYTES:
            self._end_block()
        return self._blocks if len(self._blocks) > 1 else []

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()


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


def write_hashed(descriptor: int, memory: torch.Tensor, num_bytes: int) -> Hashes:
    """Write the first bytes of `memory` to an empty file; returns their hashes.

    Args:
        descriptor: of the file, open for writing. It is not fsynced here.
        memory: from `host_memory`.
        num_bytes: size of the file.
    """
    _pass_cache(descriptor)
    hashes = Hashes()
    view = memory.numpy().data
    end = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES  # whole blocks; cut to size afterwards
    for start in range(0, end, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, end)
        hashes.update(view[start : min(stop, num_bytes)])
        while start < stop:
            start += os.write(descriptor, view[start:stop])
    os.ftruncate(descriptor, num_bytes)
    return hashes


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


def read_blocks(
    path: Path,
    num_bytes: int,
    block_bytes: int,
    numbers: Sequence[int],
    use: Callable[[int, memoryview], None],
) -> None:
    """Read some blocks of a file, several at once; memory is bounded by the size of a block.

    Args:
        path: of the file.
        num_bytes: its size.
        block_bytes: of each block but the last.
        numbers: of the blocks, from 0.
        use: called with the start and the bytes of each, in several threads.
    """
    with _opened(path, num_bytes) as descriptor:

        def read(mine: Sequence[int]) -> None:
            view = host_memory(min(num_bytes, block_bytes)).numpy().data
            for number in mine:
                start = number * block_bytes
                length = min(block_bytes, num_bytes - start)
                got = 0
                while got < length:
                    got += _read_at(descriptor, view[got:], start + got)
                use(start, view[:length])

        shares = [numbers[i::_READERS] for i in range(_READERS) if numbers[i:]]
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(read, shares):
                pass


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
