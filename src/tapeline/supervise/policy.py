"""What to do after an attempt: a pure function of the history of all of them.

Covers: the budget over the whole run, the delay before a restart, the stop of a run that makes no
progress, and when the rate of restarts is worth an alert. Does not cover which ranks (`elastic`)
or where (`quarantine`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

How = Literal["finished", "stopped", "preempted", "refused", "failed", "killed", "hung"]
EXIT_STOPPED = 1  # as of a run that met its criteria to stop
EXIT_REFUSED = 2  # as of every command that can't be carried out as it was given
# EX_SOFTWARE of sysexits.h: a scheduler that requeues on it would repeat a failure.
EXIT_DO_NOT_REQUEUE = 70
EXIT_REQUEUE = 75  # as of a run that was told to stop, and saved
_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Ended:
    """One attempt, over.

    Attributes:
        how: it ended; refused is a mistake in what was asked for, not a failure.
        began_ns, ended_ns: by the wall clock, since 1970.
        committed: the highest step that any attempt up to its end has saved.
        planned: the supervisor stopped it itself, to start it on other ranks.
    """

    how: How
    began_ns: int
    ended_ns: int
    committed: int
    planned: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """When to go on.

    Attributes:
        max_restarts: over the whole run, whatever supervisor counted them.
        max_idle: attempts in a row without a new saved step that end the run.
        base_s, longest_s: the delay before the second restart in a row without progress, which
            doubles with each; the first is immediate.
        seed: of the jitter, which spreads restarts of many jobs that failed together.
        alert_restarts, alert_window_s: as many restarts within so long are worth an alert.
        record_only: say what would be done, end nothing, start nothing again.
    """

    max_restarts: int = 100
    max_idle: int = 3
    base_s: float = 1.0
    longest_s: float = 300.0
    seed: int = 0
    alert_restarts: int = 5
    alert_window_s: float = 3600.0
    record_only: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """What to do.

    Attributes:
        restart: or end.
        delay_s: before it.
        reason: in words.
        exit_code: of the supervisor that ends.
        alert: the restarts come too often.
    """

    restart: bool
    reason: str
    delay_s: float = 0.0
    exit_code: int = 0
    alert: bool = False


def decide(history: Sequence[Ended], policy: Policy, *, told: bool = False) -> Action:
    """What to do after the last attempt of a history that isn't empty.

    Args:
        history: all attempts that have ended.
        policy: when to go on.
        told: the supervisor was told to stop.
    """
    last = history[-1]
    if last.how == "finished":
        return Action(False, "finished")
    if last.how == "stopped":
        return Action(False, "stopped by its own criteria", exit_code=EXIT_STOPPED)
    if last.how == "refused":
        return Action(False, "refused as it was asked for", exit_code=EXIT_REFUSED)
    if told:
        return Action(False, "told to stop", exit_code=EXIT_REQUEUE)
    if last.planned:
        return Action(True, "stopped at a checkpoint to go on with other ranks")
    failures = [one for one in history if not one.planned and one.how != "refused"]
    restarts = len(failures)
    idle = num_idle(failures)
    recent = sum(last.ended_ns - f.ended_ns <= policy.alert_window_s * _S for f in failures)
    alert = recent >= policy.alert_restarts
    if policy.record_only:
        return Action(False, "only recording", exit_code=EXIT_DO_NOT_REQUEUE, alert=alert)
    if idle >= policy.max_idle:
        reason = f"{idle} attempts in a row saved no new step"
        return Action(False, reason, exit_code=EXIT_DO_NOT_REQUEUE, alert=True)
    if restarts > policy.max_restarts:
        reason = f"all {policy.max_restarts} restarts are used"
        return Action(False, reason, exit_code=EXIT_DO_NOT_REQUEUE, alert=True)
    return Action(
        True,
        f"restart {restarts} of {policy.max_restarts}",
        delay_s=_delay_s(idle, restarts, policy),
        alert=alert,
    )


def num_idle(failures: Sequence[Ended]) -> int:
    """Attempts at the end of a history in a row that saved no step beyond all before."""
    idle = 0
    for number in range(len(failures) - 1, -1, -1):
        before = max((f.committed for f in failures[:number]), default=0)
        if failures[number].committed > before:
            break
        idle += 1
    return idle


def _delay_s(idle: int, restarts: int, policy: Policy) -> float:
    """Exponential in the attempts without progress, with up to half as much on top.

    The jitter is keyed by the seed and the number of the restart, so that a history alone decides.
    """
    if idle < 2:
        return 0.0
    # From 2 on: one attempt without a save may have been killed just before its first.
    jitter = random.Random(f"{policy.seed}/{restarts}").random() / 2
    return float(min(policy.base_s * 2.0 ** (idle - 2), policy.longest_s) * (1 + jitter))
