"""Several classes of failure, and a tier of checkpoints for each: cheap ones often, durable rarely.

Covers: the best intervals of any number of tiers, in whole multiples of each other as a loop can
keep them, against one interval for all, and the refusal of what can't be carried. Does not cover
background writes.

A checkpoint of tier i survives failures of class i and of all classes before it. It stands in for
the cheaper ones that were due at the same time, so it costs only the difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.plan.inputs import Quantity
from tapeline.plan.job import Bill, Job
from tapeline.plan.saving import S_PER_HOUR

_MAX_CLASSES = 8  # the search over whole multiples doubles with each
_MTBF_HOURS = Quantity("mtbf_hours", "Mean hours between failures of this class")
_SAVE_SECONDS = Quantity(
    "cost_seconds", "Seconds that a checkpoint blocks which survives this class"
)


@dataclass(frozen=True, slots=True)
class FailureClass:
    """Failures of one kind, and the cheapest checkpoint that survives them.

    Attributes:
        name: such as "process", "node", "site".
        mtbf_s: between failures of this class alone.
        save_s: the loop is blocked by such a checkpoint.
    """

    name: str
    mtbf_s: float
    save_s: float


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of checkpoint and when it is taken.

    Attributes:
        classes: of failures that fall back on it.
        ideal_s: its best interval by itself.
        interval_s: the one chosen, a whole multiple of the tier's before.
        every: each so many saves of the first tier is one of this.
    """

    classes: tuple[str, ...]
    save_s: float
    ideal_s: float
    interval_s: float
    every: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Tiers against one interval for all; shares of time by the first-order model.

    Attributes:
        tiers: the cheapest first.
        ideal_overhead: with intervals that needn't be multiples of each other.
        overhead: with those chosen.
        restart: share that restarts take, the same for both.
        single_interval_s: one checkpoint that survives everything, at its best interval.
        single_overhead: with it.
        bill, single_bill: of the whole job; None if it never ends.
    """

    tiers: tuple[Tier, ...]
    ideal_overhead: float
    overhead: float
    restart: float
    single_interval_s: float
    single_overhead: float
    bill: Bill | None = None
    single_bill: Bill | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring classes that share a tier: their extra cost, their rate."""

    classes: tuple[FailureClass, ...]
    extra_s: float
    rate: float

    @property
    def ideal_s(self) -> float:
        return math.sqrt(2 * self.extra_s / self.rate)

    def joined(self, other: _Block) -> _Block:
        return _Block(
            self.classes + other.classes, self.extra_s + other.extra_s, self.rate + other.rate
        )


def parse_class(text: str) -> FailureClass:
    """A class from `NAME:MTBF_HOURS:COST_SECONDS`.

    Raises:
        TapelineError: it is not of that form, or a number is out of range.
    """
    name, *rest = text.split(":")
    try:
        hours, save_s = (float(part) for part in rest)
    except ValueError:
        raise TapelineError(
            f"--class {text}",
            expected="NAME:MTBF_HOURS:COST_SECONDS",
            found=f"{len(rest) + 1} parts" if len(rest) != 2 else "no numbers after the name",
            fix="Write for example node:72:60",
        ) from None
    where = f"--class {text}"
    mtbf_s = _MTBF_HOURS.checked(hours, where) * S_PER_HOUR
    return FailureClass(name, mtbf_s, _SAVE_SECONDS.checked(save_s, where))


def plan_tiers(
    classes: Sequence[FailureClass], restart_s: float, job: Job, *, floor: float
) -> TierPlan:
    """The best intervals for several failure classes.

    `sum (d_i − d_{i−1}) / t_i + l_i t_i / 2` over tiers, least at
    `t_i = sqrt(2 (d_i − d_{i−1}) / l_i)`; where a later tier would be due more often than the one
    before, the two are one tier. Then the t_i are made whole multiples, and the first is chosen
    anew for them.

    Args:
        classes: two or more, in any order.
        restart_s: after a failure of any class.
        floor: the least share of useful time, above 0 and below 1.

    Raises:
        TapelineError: too few or too many classes, a name twice, or no intervals that leave
            `floor`.

    Source: the first-order model of Young 1974, a term for each class; merging by pooling
        adjacent violators (Barlow et al. 1972).
    """
    _check_classes(classes)
    blocks = _blocks(sorted(classes, key=lambda one: one.save_s))
    restart = restart_s * sum(block.rate for block in blocks)
    first_s, every = _whole_multiples(blocks)
    overhead = _overhead(blocks, first_s, every)
    _check_carried(overhead, restart, floor)
    costs = list(itertools.accumulate(block.extra_s for block in blocks))
    single_s = math.sqrt(2 * costs[-1] / sum(block.rate for block in blocks))
    single = 2 * costs[-1] / single_s
    return TierPlan(
        tuple(
            Tier(
                tuple(one.name for one in block.classes),
                cost,
                block.ideal_s,
                first_s * count,
                count,
            )
            for block, cost, count in zip(blocks, costs, every, strict=True)
        ),
        sum(math.sqrt(2 * block.extra_s * block.rate) for block in blocks),
        overhead,
        restart,
        single_s,
        single,
        job.bill(1 - overhead - restart),
        job.bill(1 - single - restart),
    )


def _blocks(classes: Sequence[FailureClass]) -> list[_Block]:
    """One block a tier, with intervals that grow from tier to tier."""
    blocks: list[_Block] = []
    before_s = 0.0
    for one in classes:
        block = _Block((one,), one.save_s - before_s, 1 / one.mtbf_s)
        before_s = one.save_s
        while blocks and blocks[-1].ideal_s >= block.ideal_s:
            block = blocks.pop().joined(block)
        blocks.append(block)
    return blocks


def _whole_multiples(blocks: Sequence[_Block]) -> tuple[float, tuple[int, ...]]:
    """The interval of the first tier, and how many of it each tier's interval holds."""
    ratios = [b.ideal_s / a.ideal_s for a, b in itertools.pairwise(blocks)]
    choices = [sorted({max(1, math.floor(ratio)), math.ceil(ratio)}) for ratio in ratios]
    found = []
    for steps in itertools.product(*choices):
        every = tuple(itertools.accumulate((1, *steps), lambda a, b: a * b))
        cost = sum(block.extra_s / n for block, n in zip(blocks, every, strict=True))
        rate = sum(block.rate * n for block, n in zip(blocks, every, strict=True))
        first_s = math.sqrt(2 * cost / rate)
        found.append((_overhead(blocks, first_s, every), first_s, every))
    _, first_s, every = min(found)
    return first_s, every


def _overhead(blocks: Sequence[_Block], first_s: float, every: Sequence[int]) -> float:
    return sum(
        block.extra_s / (first_s * n) + block.rate * first_s * n / 2
        for block, n in zip(blocks, every, strict=True)
    )


def _check_classes(classes: Sequence[FailureClass]) -> None:
    names = [one.name for one in classes]
    if not 2 <= len(names) <= _MAX_CLASSES or len(set(names)) < len(names):
        raise TapelineError(
            "--class",
            expected=f"2 to {_MAX_CLASSES} classes of different names",
            found=", ".join(names) or "none",
            fix="Give each class once; for one class, --mtbf-hours and --checkpoint-seconds",
        )


def _check_carried(overhead: float, restart: float, floor: float) -> None:
    most = 1 - floor
    if overhead + restart <= most:
        return
    # Failures f times rarer divide the first part by sqrt(f), the second by f.
    root = (overhead + math.sqrt(overhead**2 + 4 * restart * most)) / (2 * most)
    raise TapelineError(
        "--class",
        expected=f"intervals that leave {100 * floor:g} % of the time useful",
        found=f"{100 * (overhead + restart):.0f} % lost at the best ones",
        fix=f"All failures would have to be {root**2:.3g} times rarer, or checkpoints and restarts "
        "that much cheaper",
    )
