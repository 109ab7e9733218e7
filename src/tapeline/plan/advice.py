"""Before an accelerator is bought: what each lever would give a step at most.

Covers: Amdahl's law with where a step's time goes now, a lever at a time, the most first. Does not
cover measuring, nor levers together: take the first one, measure, and ask again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from tapeline.plan.accelerator import Link
from tapeline.plan.inputs import Quantity

BF16_COMPUTE_MS = Quantity(
    "bf16_compute_ms", "Milliseconds that compute takes in bfloat16; unknown unless measured"
)
State = Literal["possible", "in use", "unknown"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the milliseconds of a step go, one after another.

    Attributes:
        data: waiting for the batch.
        compute: forward, backward and update.
        communication: in collectives, where that is told apart from compute.
        checkpoint: as long as the loop stands still for them, spread over the steps.
        rest: evaluation, logging and what else no lever shortens.
    """

    data: float
    compute: float
    communication: float = 0.0
    checkpoint: float = 0.0
    rest: float = 0.0

    @property
    def step(self) -> float:
        """All of them."""
        return sum(ms for _, ms in self._terms())

    def _terms(self) -> list[tuple[str, float]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def __str__(self) -> str:
        return " + ".join(f"{ms:.3g} {name}" for name, ms in self._terms() if ms) or "0"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the levers beside the step itself.

    Attributes:
        faster: times, of the other device's compute.
        num_devices: now; the lever is twice as many.
        link: between devices; None if what passes over it isn't known.
        prefetch: whether batches are made while the device computes.
        loader_ms: of one batch by itself, where a prefetching loader makes it; None if unknown.
        looped: whether batches are made window by window.
        gathered_data_ms: the data's time by one gather a batch; None if not measured.
        bfloat16: whether the step computes in 16 bits already.
        bf16_compute_ms: None if not measured.
        saves: whether the step has a share in saving a checkpoint.
        in_background: whether that share is only the copy, written behind the loop.
    """

    faster: float
    num_devices: int = 1
    link: Link | None = None
    prefetch: bool = False
    loader_ms: float | None = None
    looped: bool = False
    gathered_data_ms: float | None = None
    bfloat16: bool = False
    bf16_compute_ms: float | None = None
    saves: bool = True
    in_background: bool = False


@dataclass(frozen=True, slots=True)
class Lever:
    """One change, everything else as it is.

    Attributes:
        change: what it does to the step.
        state: whether it can still be pulled, and whether its effect is known.
        buys: whether it is an accelerator.
        speedup: the step now over the step with it; None unless it is possible.
        limit: the same if the part that it shortens took no time at all, which nothing exceeds;
            None if nothing would be left of the step, or the lever is in use or that part unknown.
        formula: the speed-up with its numbers put in, in milliseconds, or why it isn't known.
    """

    name: str
    change: str
    state: State
    buys: bool
    speedup: float | None
    limit: float | None
    formula: str


def advise(spent: Spent, known: Known) -> tuple[Lever, ...]:
    """Every lever: the possible ones by what they give, then those in use and the unknown.

    Source: Amdahl 1967, "Validity of the single processor approach to achieving large scale
        computing capabilities"; the all-reduce of `accelerator.Link`.
    """
    levers = (*_data(spent, known), *_compute(spent, known), _checkpoint(spent, known))
    order = ("possible", "in use", "unknown")
    return tuple(sorted(levers, key=lambda one: (order.index(one.state), -(one.speedup or 0))))


def _data(spent: Spent, known: Known) -> list[Lever]:
    none = replace(spent, data=0.0)
    gathered_ms = known.gathered_data_ms
    gathered = None if gathered_ms is None else replace(spent, data=gathered_ms)
    ahead = replace(spent, data=max(0.0, spent.data - spent.compute))
    levers = [
        _lever(
            "gather",
            "one gather a batch in place of a loop over windows",
            (spent, gathered, none),
            in_use=not known.looped,
            why="the gather wasn't timed on this store",
        ),
        _lever(
            "prefetch",
            "the next batch is made during the compute: max(data, compute)",
            (spent, ahead, none),
            in_use=known.prefetch,
        ),
    ]
    if known.prefetch:
        change = "a loader as fast as the steps: a nearer or uncompressed store, a free core"
        levers.append(_lever("no wait for data", change, (spent, none, none)))
    return levers


def _compute(spent: Spent, known: Known) -> list[Lever]:
    def at(compute: float, more_communication: float = 0.0) -> Spent:
        return _computing(spent, known, compute, spent.communication + more_communication)

    none = at(0.0)
    twice, bf16_ms = 2 * known.num_devices, known.bf16_compute_ms
    doubled = None
    if known.link:
        more_ms = known.link.all_reduce_ms(twice) - known.link.all_reduce_ms(known.num_devices)
        doubled = at(spent.compute / 2, more_ms)
    return [
        _lever(
            "bfloat16",
            "forward and backward in 16 bits",
            (spent, None if bf16_ms is None else at(bf16_ms), none),
            in_use=known.bfloat16,
            why="compute in bfloat16 wasn't timed: give --bf16-compute-ms",
        ),
        _lever(
            "second device" if twice == 2 else f"{twice} devices",
            "compute / 2, and the ring all-reduce of the gradients after it",
            (spent, doubled, none),
            buys=True,
            why="the number of parameters isn't known: give --parameters",
        ),
        _lever(
            "faster device",
            f"compute / {known.faster:g}",
            (spent, at(spent.compute / known.faster), none),
            buys=True,
        ),
    ]


def _computing(spent: Spent, known: Known, compute: float, communication: float) -> Spent:
    """The step if computing took so long: a loader that is waited for takes as long as before."""
    data = spent.data
    if known.loader_ms is not None:
        data = max(0.0, known.loader_ms - compute - communication)
    return replace(spent, data=data, compute=compute, communication=communication)


def _checkpoint(spent: Spent, known: Known) -> Lever:
    none = replace(spent, checkpoint=0.0)
    return _lever(
        "async checkpoint",
        "checkpoints are written behind the loop; what blocks of them is counted as nothing",
        (spent, none if known.saves else None, none),
        in_use=known.in_background,
        why="no checkpoint was saved here: ask a run, `tapeline advise RUN`",
    )


def _lever(
    name: str,
    change: str,
    steps: tuple[Spent, Spent | None, Spent],
    *,
    in_use: bool = False,
    buys: bool = False,
    why: str = "",
) -> Lever:
    """A lever from the step now, with it (None: unknown), and without the part that it shortens."""
    now, after, none = steps
    if in_use:
        return Lever(name, change, "in use", buys, None, None, "in the step already")
    limit = now.step / none.step if none.step and none != now else None
    if after is None or not after.step:
        return Lever(name, change, "unknown", buys, None, limit, why)
    speedup = now.step / after.step
    formula = f"{now.step:.3g} / ({after}) = {speedup:.2f}"
    return Lever(name, change, "possible", buys, speedup, limit, formula)
