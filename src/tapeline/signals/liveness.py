"""The first question of a triage: is every rank alive and moving, and which failed first?"""

from __future__ import annotations

import re
import signal
from collections import Counter
from typing import Literal

from tapeline.clock import utc
from tapeline.signals.evidence import COLLECTIVE, Evidence, Exit, RankEvidence
from tapeline.signals.verdict import Limits, Verdict

Way = Literal["raised", "killed", "aborted", "silent", "torn down"]

# Ends that bring the others down stand before ends that others bring about. An abort may be either:
# a fault of its own, or a watchdog that waited for a rank that says nothing.
_TIERS: tuple[tuple[Way, ...], ...] = (("raised", "killed"), ("aborted", "silent"), ("torn down",))
_HOSTS_AGREE_NS = 1_000_000_000  # two machines' clocks are not closer than that
_FAILURES_OF_OTHERS = re.compile(
    r"nccl|gloo|ProcessGroup|DistBackendError|DistNetworkError|DistStoreError|TCPStore"
    r"|connection (closed|reset|refused|aborted)|broken pipe|socket (timeout|error)"
    r"|(collective|all_?reduce|all_?gather|broadcast|barrier).{0,80}timed? ?out"
    r"|timed? ?out.{0,80}(collective|all_?reduce|all_?gather|broadcast|barrier|peer)"
    r"|^(KeyboardInterrupt|Preempted)",
    re.IGNORECASE,
)
_ADVICE = {
    "raised": "Mend what the exception names, in the first rank's file under `errors/`",
    "killed": "A kill by SIGKILL that nobody asked for is mostly the kernel's, for want of memory:"
    " look at its log, and at the memory of that rank",
    "aborted": "Look at the last lines that rank wrote, and for an assertion in a native library",
    "silent": "Look at that rank's machine: it was lost, or its process killed without a record",
    "torn down": "Look at who sent the signal: a scheduler, a time limit, a person",
}


def liveness(evidence: Evidence, limits: Limits) -> Verdict | None:
    """A crash or a hang; None if every rank moves, or ended in good order.

    Ranks that the supervisor ended, and no others, were ended for a hang: they are judged as they
    stood then.
    """
    ended = [(r, way) for r in evidence.ranks if (way := _way(r)) is not None]
    if any(not (r.exit and r.exit.by_supervisor) for r, _ in ended):
        return _crash(evidence, ended)
    return _hang(evidence, limits) or (_crash(evidence, ended) if ended else None)


def _crash(evidence: Evidence, ended: list[tuple[RankEvidence, Way]]) -> Verdict:
    """With the first rank to fail, by evidence."""
    tier = next(t for t in _TIERS if any(way in t for _, way in ended))
    suspects = sorted((r for r, way in ended if way in tier), key=_order)
    # Whoever lost its connection to another is not that other: it may have been slow to end.
    suspects = [r for r in suspects if not _lost_another(r)] or suspects
    first = [suspects[0], *(r for r in suspects[1:] if not _surely_later(suspects[0], r))]
    ways = {r.rank: way for r, way in ended}
    lines = [f"rank {r.rank} {_words(r, ways[r.rank])}" for r in first[:8]]
    if len(first) > 1:
        lines.append(f"the evidence doesn't order these {len(first)} ranks")
    counts = Counter(ways[r.rank] for r, _ in ended if r not in first)
    lines += [f"{number} more: {way}" for way, number in counts.most_common()]
    running = [r for r in evidence.ranks if r.rank not in ways and not r.exit]
    if running:
        lines.append(f"{len(running)} still there, waiting or not yet ended")
    steps = [r.heartbeat.step for r in evidence.ranks if r.heartbeat]
    lines.append(f"last step completed by all: {min(steps)}" if steps else "no step was recorded")
    return Verdict(
        "crash",
        tuple(r.rank for r in first),
        tuple(lines),
        "an earlier failure of another rank, in its own log or in the kernel's"
        if evidence.num_ranks > 1
        else "another account of its end, in its own log or in the kernel's",
        _ADVICE[ways[first[0].rank]],
    )


def _hang(evidence: Evidence, limits: Limits) -> Verdict | None:
    """With the ranks that the others wait for."""
    running = [r for r in evidence.ranks if not r.exit or r.exit.by_supervisor]
    beats = {r.rank: r.heartbeat for r in running if r.heartbeat}
    stopped = [r for r in running if r.process_state in ("T", "t")]
    late = [n for n, beat in beats.items() if beat.age_s > limits.stuck_after_s(beat.phase)]
    if not (stopped or late):
        return None
    lines = [
        f"rank {n} moved last {beats[n].age_s:.0f} s ago, in {beats[n].phase} after step "
        f"{beats[n].step}; {limits.stuck_after_s(beats[n].phase):.0f} s are allowed there"
        for n in late[:8]
    ]
    if len(late) > 8:
        lines.append(f"{len(late) - 8} more the same")
    in_collective = any(beats[n].phase == COLLECTIVE for n in late)
    culprits, why, change = _culprits(evidence, running, stopped, late)
    place = "in a collective" if in_collective else "outside any collective that was recorded"
    return Verdict(
        "hang",
        tuple(culprits),
        (*lines, f"it hangs {place}: {why}"),
        "a step completed since, or a phase that lawfully takes longer than its limit",
        change,
    )


def _way(rank: RankEvidence) -> Way | None:
    """By what evidence a rank ended; None if it runs, or ended as it should."""
    found = Exit() if rank.exit is None and rank.process_state in ("Z", "X") else rank.exit
    if found is None or (found.orderly and not found.by_supervisor):
        return None
    if found.by_supervisor or found.signal in (signal.SIGTERM, signal.SIGINT):
        return "torn down"
    if found.exception is not None:
        return "torn down" if _lost_another(rank) else "raised"
    if found.signal is not None:
        return "aborted" if found.signal == signal.SIGABRT else "killed"
    return "silent" if found.code is None else "aborted"


def _lost_another(rank: RankEvidence) -> bool:
    return bool(rank.exit and _FAILURES_OF_OTHERS.search(rank.exit.exception or ""))


def _order(rank: RankEvidence) -> tuple[bool, int, int, int]:
    time_ns = rank.exit.time_ns if rank.exit else None
    step = rank.heartbeat.step if rank.heartbeat else 0
    return time_ns is None, time_ns or 0, step, rank.rank


def _surely_later(first: RankEvidence, other: RankEvidence) -> bool:
    a, b = (r.exit.time_ns if r.exit else None for r in (first, other))
    if a is None or b is None:
        return False
    return b - a > (0 if first.host == other.host else _HOSTS_AGREE_NS)


def _words(rank: RankEvidence, way: Way) -> str:
    end = rank.exit or Exit()
    if way == "raised" or (way == "torn down" and end.exception):
        words = f"{'raised' if way == 'raised' else 'torn down:'} {end.exception}".rstrip(".")
    elif end.by_supervisor:
        words = "had not ended when the supervisor ended it"
    elif end.signal is not None:
        words = f"was ended by {_signal_name(end.signal)}"
    elif end.code is not None:
        words = f"ended with code {end.code} and without a word"
    else:
        words = "is gone without a trace"
    if rank.heartbeat:
        words += f", after step {rank.heartbeat.step}, in {rank.heartbeat.phase}"
    return words + (f", at {utc(end.time_ns)}" if end.time_ns is not None else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _culprits(
    evidence: Evidence, running: list[RankEvidence], stopped: list[RankEvidence], late: list[int]
) -> tuple[list[int], str, str]:
    """The ranks that are waited for, how that is known, and what to do."""
    if stopped:
        ranks = [r.rank for r in stopped]
        return ranks, f"{_ranks(ranks)} stopped by a signal", "Continue it with SIGCONT, or end it"
    gone = [r.rank for r in evidence.ranks if r not in running]
    if gone:
        why = f"{_ranks(gone)} ended in good order while the others wait"
        return gone, why, "Give every rank the same number of steps"
    blocked = [r.rank for r in running if r.rank in late and r.process_state == "D"]
    if blocked:
        why = f"{_ranks(blocked)} in an uninterruptible wait, for a disk or a network filesystem"
        return blocked, why, "Look at the storage that it reads from or writes to"
    beats = {r.rank: r.heartbeat for r in running if r.heartbeat}
    least = min(beat.step for beat in beats.values())
    behind = [n for n, b in beats.items() if b.step == least and b.phase != COLLECTIVE]
    behind = behind or [n for n, b in beats.items() if b.step == least]
    stacks = "Look at its stacks, with `py-spy dump --pid`"
    if len(behind) < len(beats) or len(beats) == 1:
        phase = beats[behind[0]].phase
        return behind, f"{_ranks(behind)} still in {phase} after step {least}", stacks
    return (
        [],
        "no rank is behind another",
        "Look at the network between the machines, and for collectives in another order on "
        "some rank",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks} are"
