"""When to save next, from what the run itself measures: `checkpoint.every = "auto"`.

Covers: measuring cost and step time, the best interval under the failure rate, its range, the
phase, and a record of each change. Does not cover saving, nor reading a clock: every number is
handed in, so that the same numbers give the same steps.

On many ranks one controller decides, fed on rank 0, and its steps are broadcast: ranks measure
different times.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tapeline.reliability import Mtbf, async_interval_s, async_overhead

# Until a save was measured there is no interval. A minute of work is cheap to lose, and a run
# shorter than that has nothing to protect.
FIRST_SAVE_S = 60.0
_NUM_SAVES, _NUM_STEPS = 5, 200  # medians over so many: one hiccup must not move the interval


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured on the run: medians over the last few.

    Attributes:
        blocking_s: the loop stands still for one save.
        write_s: the background write goes on for so long; 0 for synchronous saves.
        slowdown: steps are longer by this fraction meanwhile.
        step_s: one step while nothing is written.
    """

    blocking_s: float
    write_s: float
    slowdown: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A chosen interval with everything it was chosen from.

    Attributes:
        at_step: steps done when it was chosen.
        next_step: the next save.
        num_steps: steps between saves from then on.
        range_steps: the same for both ends of the MTBF's range; the second is None before the
            first failure, when the MTBF has no upper end.
        overhead: share of time that saving and failing are expected to cost, without restarts.
        costs: as measured.
        mtbf: as stated or observed.
        why: in words.
    """

    at_step: int
    next_step: int
    num_steps: int
    range_steps: tuple[int, int | None]
    overhead: float
    costs: Costs
    mtbf: Mtbf
    why: str

    def as_record(self) -> dict[str, Any]:
        """The fields as JSON can hold them: an infinite MTBF as None."""
        mtbf = {k: v if math.isfinite(v) else None for k, v in asdict(self.mtbf).items()}
        return {**asdict(self), "range_steps": list(self.range_steps), "mtbf": mtbf}


class IntervalController:
    """Chooses the steps to save at.

    The loop calls `step_done` after each step, asks `due`, and calls `saved` after a save and
    `written` when its background write has ended.

    Args:
        first_step: where this life of the run begins.
        total_steps: where it ends; the last save is there.
        job: what is particular to this run (folder, host): its hash shifts the phase, so that
            jobs that start together don't write together.
        mtbf_s: stated by somebody; None to take it from the failures.
        num_failures: of all earlier lives of the run that ended by a failure.
        exposure_s: their supervised time. This life's own time is added as it goes.
        log: called with each change.

    Raises:
        TapelineError: `mtbf_s` is not a finite number above 0.
    """

    def __init__(
        self,
        *,
        first_step: int,
        total_steps: int,
        job: str,
        mtbf_s: float | None = None,
        num_failures: int = 0,
        exposure_s: float = 0.0,
        log: Callable[[Decision], None],
    ) -> None:
        self._known = None if mtbf_s is None else Mtbf.known(mtbf_s)
        self._num_failures = num_failures
        self._exposure_s = exposure_s
        self._total_steps = total_steps
        self._log = log
        self._phase = _phase(job)
        self._decision: Decision | None = None
        self._num_saved = 0
        self._in_flight = False
        self._saved_at = first_step
        self._unsaved_s = 0.0
        self._blocking_s: deque[float] = deque(maxlen=_NUM_SAVES)
        self._write_s: deque[float] = deque(maxlen=_NUM_SAVES)
        self._quiet_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._writing_s: deque[float] = deque(maxlen=_NUM_STEPS)

    @property
    def decision(self) -> Decision | None:
        """The interval in force; None until a save was measured."""
        return self._decision

    def step_done(self, seconds: float, *, writing: bool = False) -> None:
        """Note a step, and whether a background write went on during it."""
        (self._writing_s if writing else self._quiet_s).append(seconds)
        self._exposure_s += seconds
        self._unsaved_s += seconds

    def due(self, step: int) -> bool:
        """Whether to save now that `step` steps are done; not during a write, but at the end."""
        if step >= self._total_steps:
            return True
        if self._in_flight:
            return False
        if self._decision is None:
            return self._unsaved_s >= FIRST_SAVE_S
        return step >= self._decision.next_step

    def saved(self, step: int, blocking_s: float, *, writing: bool = False) -> None:
        """Note a save after `step` steps, whether its write goes on, and choose the next one."""
        self._in_flight = writing
        self._blocking_s.append(blocking_s)
        self._exposure_s += blocking_s
        self._num_saved += 1
        self._saved_at = step
        self._unsaved_s = 0.0
        self._choose(step)

    def written(self, step: int, seconds: float) -> None:
        """Note after `step` steps that the background write has ended, and choose anew."""
        self._in_flight = False
        self._write_s.append(seconds)
        self._choose(step)

    def _choose(self, step: int) -> None:
        if not (self._quiet_s or self._writing_s):
            return  # saved before any step: nothing to weigh the cost against
        costs = self._costs()
        mtbf = self._known or Mtbf.observed(self._num_failures, self._exposure_s)
        num_steps = _num_steps(costs, mtbf.middle_s)
        # The first interval alone is cut short; those after it keep the shift.
        share = self._phase if self._num_saved == 1 else 1.0
        ahead = max(math.ceil(num_steps * share), math.ceil(costs.write_s / costs.step_s))
        next_step = max(self._saved_at + ahead, step)  # `due` is still to be asked about `step`
        why = "the best interval for these costs and this MTBF"
        if self._saved_at + num_steps >= self._total_steps:
            next_step = self._total_steps
            why = "the rest of the run is shorter than the best interval: saved once, at its end"
        high_steps = _num_steps(costs, mtbf.high_s) if math.isfinite(mtbf.high_s) else None
        before = self._decision
        self._decision = Decision(
            at_step=step,
            next_step=min(next_step, self._total_steps),
            num_steps=num_steps,
            range_steps=(_num_steps(costs, mtbf.low_s), high_steps),
            overhead=_overhead(costs, num_steps, mtbf.middle_s),
            costs=costs,
            mtbf=mtbf,
            why=why,
        )
        if before is None or (before.num_steps, before.why) != (num_steps, why):
            self._log(self._decision)

    def _costs(self) -> Costs:
        step_s = median(self._quiet_s or self._writing_s)
        slower_s = median(self._writing_s or self._quiet_s) - step_s
        return Costs(
            blocking_s=median(self._blocking_s),
            write_s=median(self._write_s) if self._write_s else 0.0,
            slowdown=max(0.0, slower_s / step_s),
            step_s=step_s,
        )


def _num_steps(costs: Costs, mtbf_s: float) -> int:
    interval_s = async_interval_s(
        snapshot_s=costs.blocking_s,
        write_s=costs.write_s,
        slowdown=costs.slowdown,
        mtbf_s=mtbf_s,
    )
    in_flight = math.ceil(costs.write_s / costs.step_s)  # rounding down would break the bound
    return max(1, round(interval_s / costs.step_s), in_flight)


def _overhead(costs: Costs, num_steps: int, mtbf_s: float) -> float:
    return async_overhead(
        num_steps * costs.step_s,
        snapshot_s=costs.blocking_s,
        write_s=costs.write_s,
        slowdown=costs.slowdown,
        mtbf_s=mtbf_s,
    )


def _phase(job: str) -> float:
    """A share above 0 and up to 1, evenly spread over jobs."""
    digest = hashlib.sha256(f"checkpoint phase of {job}".encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 1) / 2**48
