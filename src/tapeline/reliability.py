"""How often to checkpoint, what it costs, and when no interval helps: pure formulas.

Covers: the best interval, also for background writes, its overhead, the mean time between
failures from counts, and the regimes to refuse. Does not cover measuring any of the inputs, nor
several tiers, which `plan` has.

Symbols of the literature: C seconds that the loop is blocked by one checkpoint (`blocking_s`),
M mean time between job-killing failures (`mtbf_s`), R seconds to detect, respawn and reload
(`restart_s`), T useful work between two checkpoints, without C (`interval_s`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tapeline.errors import TapelineError
from tapeline.quantiles import chi_square_quantile

CONFIDENCE = 0.95
_PERCENT = 100


def young_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """The interval of least first-order overhead, `sqrt(2 C M)`; good where C is far below M.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    _check_seconds(blocking_s=blocking_s)
    _check_positive(mtbf_s=mtbf_s)
    return math.sqrt(2 * blocking_s) * math.sqrt(mtbf_s)


def daly_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """Young's interval with two more terms; M itself from `C = 2 M` on.

    Source: Daly 2006, doi 10.1016/j.future.2004.11.016, equation 37.
    """
    young_s = young_interval_s(blocking_s=blocking_s, mtbf_s=mtbf_s)
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    x = blocking_s / mtbf_s / 2
    return young_s * (1 + math.sqrt(x) / 3 + x / 9) - blocking_s


def exact_interval_s(*, blocking_s: float, mtbf_s: float) -> float:
    """The best interval under exponential failures: `T = y M` with `(1 − y) e^y = e^(−C/M)`.

    Source: the maximum of `efficiency` in T; the model of Daly 2006, solved by bisection.
    """
    _check_seconds(blocking_s=blocking_s)
    _check_positive(mtbf_s=mtbf_s)
    x = blocking_s / mtbf_s
    young = math.sqrt(2 * x)
    # −ln(1−y) − y = x. Its series y²/2 + y³/3 + … puts y between these two.
    low, high = max(0.0, young - x), min(1.0, young)
    while low < (middle := (low + high) / 2) < high:
        if -math.log1p(-middle) - middle < x:
            low = middle
        else:
            high = middle
    return high * mtbf_s


def overhead(
    interval_s: float, *, blocking_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """Share of time lost, first order: `C/T + (T/2 + R)/M`. May exceed 1: see `check_feasible`.

    Source: Young 1974.
    """
    _check_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    _check_seconds(blocking_s=blocking_s, restart_s=restart_s)
    return blocking_s / interval_s + (interval_s / 2 + restart_s) / mtbf_s


def efficiency(
    interval_s: float, *, blocking_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """Share of time that is useful under exponential failures: `T / (M e^(R/M) (e^((T+C)/M) − 1))`.

    Source: Daly 2006, equation 20, in renewal form.
    """
    _check_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    _check_seconds(blocking_s=blocking_s, restart_s=restart_s)
    segment = (interval_s + blocking_s) / mtbf_s
    # e^x − 1 = e^x (1 − e^−x): nothing overflows for an interval of many MTBFs.
    succeeds = math.exp(-segment - restart_s / mtbf_s)
    return min(1.0, interval_s / mtbf_s * succeeds / -math.expm1(-segment))


def effective_training_time(
    interval_s: float, *, blocking_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """ETTR, first order: `(1 − (R + T/2)/M) / (1 + C/T)`; 0 where no work would get done.

    For N nodes that fail at a rate r each, M is `1 / (N r)`.

    Source: arXiv 2410.21680, with `u0 = R` and `w = C`.
    """
    _check_positive(interval_s=interval_s, mtbf_s=mtbf_s)
    _check_seconds(blocking_s=blocking_s, restart_s=restart_s)
    kept = 1 - (restart_s + interval_s / 2) / mtbf_s
    return max(0.0, kept) / (1 + blocking_s / interval_s)


def async_interval_s(*, snapshot_s: float, write_s: float, slowdown: float, mtbf_s: float) -> float:
    """The best interval when the write goes on in the background: `max(p, sqrt(2 C_eff M))`.

    `C_eff = s + a p`, with the loop slower by the fraction a (`slowdown`) for the p seconds of a
    write. One write is in flight at a time, hence T ≥ p.

    Source: Young 1974 with C_eff in place of C.
    """
    _check_seconds(snapshot_s=snapshot_s, write_s=write_s, slowdown=slowdown)
    effective_s = snapshot_s + slowdown * write_s
    return max(write_s, young_interval_s(blocking_s=effective_s, mtbf_s=mtbf_s))


def async_overhead(
    interval_s: float,
    *,
    snapshot_s: float,
    write_s: float,
    slowdown: float,
    mtbf_s: float,
    restart_s: float = 0.0,
) -> float:
    """Share of time lost with background writes: `C_eff/T + (T/2 + p + R)/M`.

    A failure during the write falls back to the checkpoint before.

    Source: Young 1974 with C_eff in place of C.
    """
    _check_seconds(snapshot_s=snapshot_s, write_s=write_s, slowdown=slowdown, restart_s=restart_s)
    return overhead(
        interval_s,
        blocking_s=snapshot_s + slowdown * write_s,
        mtbf_s=mtbf_s,
        restart_s=write_s + restart_s,
    )


@dataclass(frozen=True, slots=True)
class Mtbf:
    """A mean time between failures, with what is known of its error.

    Attributes:
        low_s: the one-sided 95 % lower bound.
        middle_s: as likely too high as too low. Finite before the first failure, and, unlike
            `high_s`, never raised by one: this is the one to plan with.
        high_s: exposure over failures; infinite while there was none.
    """

    low_s: float
    middle_s: float
    high_s: float

    @classmethod
    def known(cls, mtbf_s: float) -> Mtbf:
        """One that somebody states, without an error."""
        _check_positive(mtbf_s=mtbf_s)
        return cls(mtbf_s, mtbf_s, mtbf_s)

    @classmethod
    def observed(cls, num_failures: int, exposure_s: float) -> Mtbf:
        """From k failures in t seconds of supervised uptime: `2t / chi2(p; 2k + 2)`, and `t/k`.

        Source: the exact Poisson bound, Garwood 1936; p = 0.95 for the lower bound, 0.5 for the
        middle.
        """
        _check_positive(exposure_s=exposure_s)
        _check_seconds(num_failures=num_failures)
        low, middle = (
            2 * exposure_s / chi_square_quantile(p, 2 * num_failures + 2) for p in (CONFIDENCE, 0.5)
        )
        return cls(low, middle, exposure_s / num_failures if num_failures else math.inf)


def num_saves_before_end(interval_s: float, run_s: float) -> int:
    """How many checkpoints of an interval fall before a run's end; 0: only the one at the end.

    Source: an interval longer than the run costs more to hold than the run can lose.
    """
    _check_positive(interval_s=interval_s)
    _check_seconds(run_s=run_s)
    return max(0, math.ceil(run_s / interval_s) - 1)


def check_feasible(
    *, blocking_s: float, mtbf_s: float, restart_s: float = 0.0, floor: float = 0.5
) -> None:
    """Refuse a workload that this infrastructure can't carry, whatever the interval.

    Args:
        blocking_s, mtbf_s, restart_s: as in `overhead`.
        floor: the least share of useful time that is worth its price, above 0 and below 1.

    Raises:
        TapelineError: the first-order overhead reaches 100 % at the best interval, or the
            efficiency stays below `floor`. Says what each input would have to be instead.

    Source: `overhead` at Young's interval, `efficiency` at the exact one.
    """
    if not 0 < floor < 1:
        raise TapelineError(
            "floor", expected="a share above 0 and below 1", found=f"{floor:g}", fix="Correct it"
        )

    def carries(blocking: float, mtbf: float, restart: float) -> bool:
        best = _best_efficiency(blocking, mtbf, restart)
        return _least_overhead(blocking, mtbf, restart) < 1 and best >= floor

    if carries(blocking_s, mtbf_s, restart_s):
        return
    least = _edge(lambda m: carries(blocking_s, m, restart_s), mtbf_s)
    ways = [f"raise the MTBF to about {least:.4g} s"]
    if carries(0.0, mtbf_s, restart_s):
        most = _edge(lambda c: not carries(c, mtbf_s, restart_s), 0.0, blocking_s)
        ways.append(f"lower the blocking time to about {most:.4g} s")
    if carries(blocking_s, mtbf_s, 0.0):
        most = _edge(lambda r: not carries(blocking_s, mtbf_s, r), 0.0, restart_s)
        ways.append(f"lower the restart time to about {most:.4g} s")
    raise TapelineError(
        f"blocking {blocking_s:g} s, MTBF {mtbf_s:g} s, restart {restart_s:g} s",
        expected=f"an overhead below 100 % and an efficiency of {_PERCENT * floor:g} % or more",
        found=f"{_PERCENT * _least_overhead(blocking_s, mtbf_s, restart_s):.0f} % and "
        f"{_PERCENT * _best_efficiency(blocking_s, mtbf_s, restart_s):.1f} % at the best interval",
        fix=f"This workload can't run on this infrastructure: {', or '.join(ways)}",
    )


def _least_overhead(blocking_s: float, mtbf_s: float, restart_s: float) -> float:
    _check_seconds(restart_s=restart_s)
    return young_interval_s(blocking_s=blocking_s, mtbf_s=mtbf_s) / mtbf_s + restart_s / mtbf_s


def _best_efficiency(blocking_s: float, mtbf_s: float, restart_s: float) -> float:
    interval_s = exact_interval_s(blocking_s=blocking_s, mtbf_s=mtbf_s)
    if interval_s == 0:  # a checkpoint that costs nothing is taken all the time
        return math.exp(-restart_s / mtbf_s)
    return efficiency(interval_s, blocking_s=blocking_s, mtbf_s=mtbf_s, restart_s=restart_s)


def _edge(holds: Callable[[float], bool], low: float, high: float | None = None) -> float:
    """Where a condition that holds from some number on begins to hold."""
    if high is None:
        high = 2 * low
        while not holds(high):
            low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise _refused(name, "a finite number above 0", value)


def _check_seconds(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise _refused(name, "a finite number, 0 or more", value)


def _refused(name: str, expected: str, value: float) -> TapelineError:
    return TapelineError(
        name, expected=expected, found=f"{value:g}", fix="Give a measured or a planned number"
    )
