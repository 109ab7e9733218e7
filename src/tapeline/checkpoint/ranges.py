"""Parts of a commit's files, each byte checked before it is used.

Covers: reading byte ranges by the blocks that they touch, against the hashes of these blocks; a
file without block hashes is one block. Does not cover what the bytes mean.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from tapeline.checkpoint.commit import damaged, unreadable
from tapeline.checkpoint.direct import read_blocks
from tapeline.checkpoint.manifest import FileEntry


class CheckedFile:
    """A data file of a commit.

    Args:
        path: of the file.
        entry: what the manifest says about it.

    Raises:
        CheckpointError: it is missing, or of another size.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.num_bytes = entry.bytes
        self._path = path
        self._hashes = entry.blocks_xxh3_128 or [entry.xxh3_128]
        self._block_bytes = entry.block_bytes or max(1, entry.bytes)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise unreadable(path, f"a file of {entry.bytes:,} bytes", error) from error
        if size != entry.bytes:
            raise damaged(path, f"{entry.bytes:,} bytes", f"{size:,}")
        if len(self._hashes) != self._num_blocks():
            found = f"{len(self._hashes)} in the manifest"
            raise damaged(path, f"{self._num_blocks()} hashes of its blocks", found)

    def read(self, start: int, num_bytes: int) -> bytes:
        """A few bytes.

        Raises:
            CheckpointError: as `read_into`.
        """
        sink = torch.empty(num_bytes, dtype=torch.uint8)
        self.read_into([(start, sink)])
        return sink.numpy().tobytes()

    def read_into(self, ranges: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Fill tensors, each uint8 [bytes] from a start on; every block is read once.

        Raises:
            CheckpointError: a block that they touch is damaged, or can't be read. The tensors
                then hold nothing that may be used.
        """
        ranges = sorted(((start, sink) for start, sink in ranges if len(sink)), key=lambda r: r[0])
        assert all(s + len(sink) <= self.num_bytes for s, sink in ranges), "beyond the file's end"
        size = self._block_bytes
        touched = {
            number
            for start, sink in ranges
            for number in range(start // size, (start + len(sink) - 1) // size + 1)
        }
        starts = [start for start, _ in ranges]
        longest = max((len(sink) for _, sink in ranges), default=0)

        def use(start: int, block: memoryview) -> None:
            digest = xxhash.xxh3_128_hexdigest(block)
            expected = self._hashes[start // size]
            if digest != expected:
                where = f"bytes {start:,} to {start + len(block):,}"
                raise damaged(self._path, f"{where} with xxh3-128 {expected}", digest)
            source = torch.frombuffer(block, dtype=torch.uint8)
            end = start + len(block)
            first = bisect.bisect_left(starts, start - longest)
            for at, sink in ranges[first : bisect.bisect_left(starts, end)]:
                low, high = max(at, start), min(at + len(sink), end)
                if low < high:
                    sink[low - at : high - at] = source[low - start : high - start]

        try:
            read_blocks(self._path, self.num_bytes, size, sorted(touched), use)
        except OSError as error:
            raise unreadable(self._path, f"a file of {self.num_bytes:,} bytes", error) from error

    def _num_blocks(self) -> int:
        return max(1, -(-self.num_bytes // self._block_bytes))
