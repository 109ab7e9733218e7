"""A state as one safetensors file: the tensors, and the rest as JSON in its header.

Covers: the layout of the bytes, and tensors as views of bytes that were read. Does not cover
where the bytes go. One file, since each file of a commit has to be flushed for itself.

The format (https://github.com/huggingface/safetensors#format): an eight-byte length, a JSON
header padded with blanks, and the tensors without a gap. They are ordered by the largest power of
two that divides their size, so that each is aligned to that power, or to 64 bytes beyond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tapeline.checkpoint.state import ALIGNMENT_BYTES, State, tensor_bytes
from tapeline.checkpoint.tree import DTYPE_NAMES
from tapeline.files import canonical_json

_METADATA = "__metadata__"
_VALUES = "tapeline_values"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the bytes of a state stand in its file.

    Attributes:
        header: the first bytes of the file.
        starts: offset of each tensor, in the order of the file.
        num_bytes: size of the file.
    """

    header: bytes
    starts: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, state: State) -> Layout:
        """Lay out a state."""
        tensors = state.tensors
        names = sorted(tensors, key=lambda name: (-_alignment(tensors[name].nbytes), name))
        fields: dict[str, Any] = {_METADATA: {_VALUES: canonical_json(state.values)}}
        end = 0
        starts = {}
        for name in names:
            tensor = tensors[name]
            starts[name] = end
            end += tensor.nbytes
            fields[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)
        header = len(text).to_bytes(8, "little") + text
        return cls(header, {name: len(header) + s for name, s in starts.items()}, len(header) + end)


def encode(state: State, layout: Layout) -> Iterator[bytes | memoryview]:
    """The file in chunks, one per tensor, so that a large state is never held twice."""
    yield layout.header
    for name in layout.starts:
        yield tensor_bytes(state.tensors[name])


def decode(data: torch.Tensor) -> State:
    """The state in the bytes of a file, uint8 [bytes]: its tensors are views of `data`.

    Raises:
        ValueError: these aren't bytes that `encode` makes.
    """
    raw = data.numpy().data
    start = body_start(bytes(raw[:8]), len(raw))
    header = Header.parse(bytes(raw[8:start]), start, len(raw))
    tensors = {
        name: data[extent.start : extent.end].view(extent.dtype).view(extent.shape)
        for name, extent in header.extents.items()
    }
    return State(tensors, header.values)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor stands in a file: from byte `start` to `end`."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: the values of a state, and where its tensors stand."""

    values: dict[str, Any]
    extents: dict[str, Extent]

    @classmethod
    def parse(cls, text: bytes, start: int, num_bytes: int) -> Header:
        """Read a header.

        Args:
            text: its JSON.
            start: of the tensors, in bytes from the file's beginning.
            num_bytes: size of the file.

        Raises:
            ValueError: these aren't bytes that `encode` makes.
        """
        fields = json.loads(text)
        try:
            values = json.loads(fields.pop(_METADATA)[_VALUES])
            extents = {name: _extent(start, num_bytes, **field) for name, field in fields.items()}
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"another header ({type(error).__name__}: {error})") from error
        if not isinstance(values, dict):
            raise ValueError("no values in the header")
        return cls(values, extents)


def body_start(first: bytes, num_bytes: int) -> int:
    """Where the tensors begin in a file of `num_bytes`, from its first eight bytes.

    Raises:
        ValueError: beyond its end.
    """
    start = 8 + int.from_bytes(first, "little")
    if len(first) < 8 or start > num_bytes:
        raise ValueError("a header that is longer than the file")
    return start


def _alignment(num_bytes: int) -> int:
    return min(ALIGNMENT_BYTES, num_bytes & -num_bytes) if num_bytes else ALIGNMENT_BYTES


def _extent(
    start: int, num_bytes: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Extent:
    first, end = data_offsets
    kind = DTYPES[dtype]
    if (
        not 0 <= first <= end <= num_bytes - start
        or not isinstance(shape, list)
        or min(shape, default=0) < 0
        or end - first != math.prod(shape) * kind.itemsize
    ):
        length = num_bytes - start
        raise ValueError(f"a tensor of shape {shape} at bytes {first} to {end} of {length}")
    return Extent(kind, shape, start + first, start + end)
