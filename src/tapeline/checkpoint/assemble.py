"""Tensors put together from the pieces in a commit's files: all of them, or one rank's parts.

Covers: which byte ranges are needed and where they go. Does not cover which tensors make up a
state (`load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tapeline.checkpoint.encoding import DTYPES, Place
from tapeline.checkpoint.manifest import SplitEntry
from tapeline.checkpoint.ranges import CheckedFile
from tapeline.checkpoint.sharded import Box, Share, tiles, wanted_by


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor and where it is stored, from byte `start` of a file on."""

    file: str
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor as it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of_split(cls, entry: SplitEntry) -> Source:
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
    def of_place(cls, place: Place, file: str) -> Source:
        """One that lies whole in a file."""
        shape = tuple(place.shape)
        pieces = (Piece(file, place.start, Box.whole(shape)),) if math.prod(shape) else ()
        return cls(place.dtype, shape, pieces)


def assembled(
    sources: Mapping[str, Source],
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
