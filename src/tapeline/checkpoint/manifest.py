"""What a manifest says: the files of a commit, and which parts of which tensors lie where.

Covers: the fields and their text. Does not cover reading one from a disk (`commit`).

A commit by one process has one data file. One by several ranks has a file for each rank that had
something to write: the parts of tensors that it owns, and what of its state differs from rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tapeline.files import xxh3_json

FORMAT: Final = "tapeline checkpoint"
VERSION: Final = 1
SELF_HASH = "manifest_xxh3_128"
METRIC = "metric"  # in the metadata: what "best" compares
_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")

Count = Annotated[int, Field(ge=0)]


class FileEntry(BaseModel):
    """One data file.

    Attributes:
        bytes: its size.
        xxh3_128: over all of it.
        block_bytes: of each block but the last; 0 for a file of one block.
        blocks_xxh3_128: over each block, so that a part can be checked by itself.
    """

    model_config = _STRICT

    bytes: Count
    xxh3_128: str
    block_bytes: Count = 0
    blocks_xxh3_128: list[str] = []


class PieceEntry(BaseModel):
    """A part of a tensor: elements in row-major order, from byte `start` of a file on."""

    model_config = _STRICT

    file: str
    start: Count
    offsets: list[Count]
    sizes: list[Count]


class SplitEntry(BaseModel):
    """A tensor that lies in pieces; `dtype` as safetensors names it, `shape` of the whole."""

    model_config = _STRICT

    dtype: str
    shape: list[Count]
    pieces: list[PieceEntry]


class RankEntry(BaseModel):
    """A rank of the save: its file, if it wrote one, and the parts of its state that are in it.

    Rank 0 has every part. Another one has those that differ from rank 0's.
    """

    model_config = _STRICT

    file: str | None
    parts: list[str]


class About(NamedTuple):
    """What a manifest says of a save as a whole."""

    step: int
    created_ns: int
    metadata: dict[str, Any]


class Manifest(BaseModel):
    """What a commit consists of and what it belongs to.

    `ranks` and `split` are empty for a commit by one process.
    """

    model_config = _STRICT

    format: Literal["tapeline checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    step: Count
    created_ns: int
    files: dict[str, FileEntry]
    metadata: dict[str, Any]
    ranks: list[RankEntry] = []
    split: dict[str, SplitEntry] = {}

    def render(self) -> str:
        """The text of `manifest.json`: the fields and a hash over them."""
        fields = self.model_dump()
        for entry in (fields, *fields["files"].values()):
            for key in ("ranks", "split", "block_bytes", "blocks_xxh3_128"):
                if not entry.get(key, True):
                    del entry[key]
        return text_of({**fields, SELF_HASH: xxh3_json(fields)})

    @property
    def total_bytes(self) -> int:
        """Size of all data files."""
        return sum(entry.bytes for entry in self.files.values())


def text_of(fields: Mapping[str, Any]) -> str:
    """Fields as the text of a manifest."""
    return json.dumps(fields, indent=1, sort_keys=True, allow_nan=False) + "\n"
