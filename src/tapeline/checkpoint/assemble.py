"""Tensors put together from the pieces in a commit's files: all of them, or one rank's parts.

Covers: which byte ranges are needed and where they go, and reading them by the blocks that they
touch, each checked before it is used; a file without block hashes is one block. Does not cover
which tensors make up a state (`load`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from tapeline.checkpoint.commit import damaged, unreadable
from tapeline.checkpoint.direct import read_blocks
from tapeline.checkpoint.encoding import DTYPES, Extent
from tapeline.checkpoint.manifest import FileEntry, SplitEntry
from tapeline.checkpoint.sharded import Box, Share, tiles, wanted_by


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor and where it is stored, from byte `start` of a file on."""

    file: str
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of_split(cls, entry: SplitEntry) -> StoredTensor:
        """One that several ranks hold parts of.

        Raises:
            ValueError: the pieces don't make up the tensor.
        """
        boxes = [Box(tuple(piece.offsets), tuple(piece.sizes)) for piece in entry.pieces]
        shape = tuple(entry.shape)
        if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
            raise ValueError(f"pieces of another number of dimensions than {list(shape)}")
        if entry.dtype not in DTYPES or not tiles(shape, boxes):
            raise ValueError(f"pieces that don't make up a tensor {entry.dtype} {list(shape)}")
        pieces = (Piece(p.file, p.start, b) for p, b in zip(entry.pieces, boxes, strict=True))
        return cls(DTYPES[entry.dtype], shape, tuple(pieces))

    @classmethod
    def whole(cls, extent: Extent, file: str) -> StoredTensor:
        """One that lies whole in a file."""
        shape = tuple(extent.shape)
        pieces = (Piece(file, extent.start, Box.whole(shape)),) if math.prod(shape) else ()
        return cls(extent.dtype, shape, pieces)


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


def assembled(
    sources: Mapping[str, StoredTensor],
    files: Mapping[str, CheckedFile],
    wanted: Mapping[str, Share],
) -> tuple[dict[str, torch.Tensor], dict[str, Share]]:
    """Read tensors, each byte checked.

    Args:
        sources: by the tensors' names.
        files: of the commit.
        wanted: the parts that live objects hold; what fits none of them is read whole.

    Returns:
        The tensors, and of those read in part, which part.

    Raises:
        CheckpointError: a byte that is needed is damaged.
        ValueError: a piece lies beyond its file's end.
    """
    tensors: dict[str, torch.Tensor] = {}
    shares: dict[str, Share] = {}
    ranges: dict[str, list[tuple[int, torch.Tensor]]] = {}
    moves: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, source in sources.items():
        place = wanted_by(name, source.shape, wanted)
        if place:
            shares[name] = wanted[place]
        box = wanted[place].box if place else Box.whole(source.shape)
        tensors[name] = torch.empty(box.sizes, dtype=source.dtype)
        for piece in source.pieces:
            common = piece.box.meet(box)
            if common is None:
                continue
            start, rows, move = _request(tensors[name], box, piece, common)
            if start + rows.nbytes > files[piece.file].num_bytes:
                raise ValueError(f"a piece of {name} beyond the end of {piece.file}")
            ranges.setdefault(piece.file, []).append((start, rows.view(-1).view(torch.uint8)))
            if move:
                moves.setdefault(piece.file, []).append(move)
    for file, wanted_bytes in ranges.items():
        files[file].read_into(wanted_bytes)
        for to, read in moves.pop(file, ()):
            to.copy_(read)
    return tensors, shares


def _request(
    tensor: torch.Tensor, box: Box, piece: Piece, common: Box
) -> tuple[int, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """The bytes of the rows of a piece that are needed.

    Returns:
        Where they begin in the file; the tensor to read them into, which is the target itself
        where they lie there in one stretch; and otherwise what to copy then, from where to where.
    """
    target = tensor[common.within(box)]
    sizes = piece.box.sizes
    if not sizes:
        return piece.start, target, None
    first = common.offsets[0] - piece.box.offsets[0]
    row_bytes = math.prod(sizes[1:]) * tensor.itemsize
    start = piece.start + first * row_bytes
    if common.sizes[1:] == sizes[1:] and target.is_contiguous():
        return start, target, None
    rows = torch.empty((common.sizes[0], *sizes[1:]), dtype=tensor.dtype)
    here = Box((common.offsets[0], *piece.box.offsets[1:]), tuple(rows.shape))
    return start, rows, (target, rows[common.within(here)])
