"""Tensors that ranks hold in parts: boxes, who writes which, and back to any other cut.

Covers: arithmetic of rectangular parts, and DTensors (FSDP2, tensor parallelism) as such parts.
Does not cover files, nor ranks talking to each other.

A DTensor is known by its attributes: importing the module that makes them takes half as long as
importing torch, and whoever has one has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapeline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins and how far it goes, for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """How many elements it holds; 1 for a scalar."""
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """What both hold; None for nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The index of this part in a tensor that holds `outer`."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.sizes, strict=True))

    def _ends(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a tensor that a rank holds; `shape` is of the whole."""

    shape: tuple[int, ...]
    box: Box

    def __str__(self) -> str:
        return f"{list(self.box.sizes)} at {list(self.box.offsets)} of {list(self.shape)}"


def is_split(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "device_mesh")


def share_of(tensor: Any) -> Share:
    """What this rank holds of a DTensor.

    Raises:
        CheckpointError: it holds a summand of the tensor.
    """
    # The method for this, `__create_chunk_list__`, is these lines after an import of 0.8 s.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            "state",
            expected="tensors of which each rank holds a part",
            found=f"one that is still to be summed over ranks, {tensor.placements}",
            fix="Save between two steps",
        )
    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        shape, tensor.device_mesh, tensor.placements
    )
    assert tuple(sizes) == tuple(tensor.to_local().shape), "another part than torch says"
    return Share(shape, Box(tuple(offsets), tuple(sizes)))


def owned(shares_of_ranks: Sequence[Mapping[str, Share]]) -> list[set[str]]:
    """For each rank the names of the tensors whose part it writes: every part once.

    Of the ranks that hold the same part, the one that writes least so far takes it. A pure
    function: equal on every rank.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, shares in enumerate(shares_of_ranks):
        for name, share in shares.items():
            if share.box.num_elements or not math.prod(share.shape):
                holders.setdefault((name, share.box), []).append(rank)
    written = [0] * len(shares_of_ranks)
    names: list[set[str]] = [set() for _ in shares_of_ranks]
    for (name, box), ranks in holders.items():
        rank = min(ranks, key=lambda one: (written[one], one))
        written[rank] += box.num_elements
        names[rank].add(name)
    return names


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether boxes cover a tensor without gap or overlap, as a grid: cuts that run through."""
    boxes = list(boxes)
    if not math.prod(shape):
        return not boxes
    count = 1
    for dim, size in enumerate(shape):
        spans = sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        end = 0
        for start, length in spans:
            if start != end or length <= 0:
                return False
            end += length
        if end != size:
            return False
        count *= len(spans)
    return len(boxes) == len(set(boxes)) == count


def wanted_by(name: str, shape: Sequence[int], shares: Mapping[str, Share]) -> str | None:
    """The tensor, of those a rank holds `shares` of, that a saved one is cut like; None for none.

    An optimiser that has not stepped holds nothing yet: its state will be cut as the parameter
    it belongs to, where the shapes agree.
    """
    parts = name.split("/")
    of_parameter = parts[:2] == ["optimizer", "state"] and len(parts) > 3
    candidates = [name, f"model/{parts[2]}"] if of_parameter else [name]
    fits = (c for c in candidates if c in shares and shares[c].shape == tuple(shape))
    return next(fits, None)


def as_live(value: torch.Tensor, share: Share | None, live: Any) -> Any:
    """A tensor of a state as a DTensor that is cut as `live` is.

    Args:
        value: this rank's part, which the result takes over, or all of the tensor.
        share: which part it is; None for all.
        live: a DTensor of the whole's shape.
    """
    if share is None:
        mine = share_of(live)
        value = value[mine.box.within(Box.whole(mine.shape))].clone().contiguous()
    return type(live).from_local(
        value.to(live.device),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )
