"""Where two runs of one configuration part: the first loss, checkpoint and tensor that differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tapeline.checkpoint import Shelf, State, part_sha256
from tapeline.checkpoint.state import tensor_bytes
from tapeline.runs.history import Metrics, read_metrics


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs part.

    Attributes:
        step: the first step that is known to differ.
        losses: of that step in both runs; None where they are equal and the state after it isn't.
        equal_up_to: the last step before it at which both saved the same bits; 0 is the beginning.
        checkpoint: the first step at which they saved different ones; None: they never did.
        part: of the state, the first that differs there: "model", "optimizer", ….
        tensor: the first that differs there, by its path; None where no tensor does.
        num_differing: tensors that differ there.
        distance: the largest difference within `tensor`.
    """

    step: int
    losses: tuple[float, float] | None
    equal_up_to: int
    checkpoint: int | None
    part: str | None = None
    tensor: str | None = None
    num_differing: int = 0
    distance: float | None = None


def journalled(run: Path) -> Metrics:
    """What rank 0 journalled of a run."""
    return read_metrics(run / "metrics" / "rank-0.jsonl")


def first_parting(one: Path, other: Path) -> Parting | None:
    """Compare two run folders; None if losses and checkpoints are the same bits.

    Losses are compared at every step that both journalled, also those that a kill took back: they
    were computed from the same state. Of the checkpoints that both kept the first that differs is
    searched by bisection, since what has parted doesn't meet again.
    """
    loss = _first_loss(journalled(one), journalled(other))
    shelves = Shelf(one / "checkpoints"), Shelf(other / "checkpoints")
    steps = sorted(set(shelves[0].steps()) & set(shelves[1].steps()))
    equal, parted = _bisect(shelves, steps)
    if loss is None and parted is None:
        return None
    if parted is None or (loss and loss[0] < parted):
        assert loss is not None, "one of the two was found"
        step, losses = loss[0], loss[1:]
    else:
        step, losses = parted, None
    if parted is None:
        return Parting(step, losses, equal, None)
    states = [shelf.load_step(parted) for shelf in shelves]
    return Parting(step, losses, equal, parted, *_first_difference(*states))


def final_hashes(run: Path, step: int) -> dict[str, str]:
    """A hash of each part of the state that a run saved at `step`, put together from all ranks."""
    return part_sha256(Shelf(run / "checkpoints").load_step(step))


def _first_loss(one: Metrics, other: Metrics) -> tuple[int, float, float] | None:
    """The first step whose losses differ, with both."""
    reference = dict(_losses(one))
    differing = [
        (step, reference[step], value)
        for step, value in _losses(other)
        if step in reference and reference[step] != value
    ]
    return min(differing, default=None)


def _losses(metrics: Metrics) -> Iterable[tuple[int, float]]:
    for named in (metrics.snapshot.series, metrics.given_up):
        if "loss" in named:
            series = named["loss"]
            yield from zip(series.steps.tolist(), series.values.tolist(), strict=True)


def _bisect(shelves: tuple[Shelf, Shelf], steps: list[int]) -> tuple[int, int | None]:
    """The last common step with equal states, and the first with different ones."""
    if steps and _equal(shelves, steps[-1]):
        return steps[-1], None
    first = bisect_left(steps, True, key=lambda step: not _equal(shelves, step))
    return steps[first - 1] if first else 0, steps[first] if first < len(steps) else None


def _equal(shelves: tuple[Shelf, Shelf], step: int) -> bool:
    one, other = (part_sha256(shelf.load_step(step)) for shelf in shelves)
    return one == other


def _first_difference(one: State, other: State) -> tuple[str, str | None, int, float | None]:
    """Part, tensor, number of tensors and distance; the model's before the rest."""
    hashes = part_sha256(one), part_sha256(other)
    parts = [part for part in hashes[0] if hashes[0][part] != hashes[1].get(part)]
    part = min(parts, key=lambda name: name != "model")
    names = [name for name in one.tensors if not _same(name, one.tensors, other.tensors)]
    first = next((name for name in names if name.split("/")[0] == part), None)
    if first is None or first not in other.tensors:
        return part, first, len(names), None
    gap = (one.tensors[first].double() - other.tensors[first].double()).abs().max()
    return part, first, len(names), float(gap)


def _same(name: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    if name not in other or one[name].shape != other[name].shape:
        return False
    return tensor_bytes(one[name]) == tensor_bytes(other[name])
