"""Which checkpoint to resume from, and which ones to leave alone.

Covers: the choice over both tiers and all ranks, by the run's line of lives, and the journal of
resumes that failed. Does not cover reading checkpoints or talking to other ranks: each rank lists
what it has verified, the lists are gathered, and every rank makes the same choice from them.

Modification times, the order of names and links play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tapeline.files import Journal, read_journal

_FAILURES_TO_TAINT = 2


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A checkpoint as one rank sees it.

    Attributes:
        step: optimiser steps completed.
        attempt: the life of the run that saved it, from 1.
        identity: hash of its manifest: equal for equal content, on every rank and in either tier.
        run: what run it says it is of.
        tier: "local" (crash recovery) or "durable".
        place: its folder or URL.
        fault: what is wrong with it; None if every byte verified.
    """

    step: int
    attempt: int
    identity: str
    run: str
    tier: Literal["durable", "local"]
    place: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not chosen although its step is higher, and why."""

    step: int
    identity: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Where all ranks resume.

    Attributes:
        step: optimiser steps completed; 0 to begin anew.
        identity: of the checkpoint; None if none can be used.
        places: for each rank, where it reads it: the local tier where that has it.
        passed_over: the better ones that can't be used, highest step first.
    """

    step: int
    identity: str | None
    places: tuple[str, ...]
    passed_over: tuple[PassedOver, ...]


def choose(
    listed: Sequence[Iterable[Candidate]],
    *,
    run: str,
    starts: Mapping[int, int],
    tainted: Mapping[str, str],
) -> Choice:
    """The highest step that verifies on every rank, in the run's line, and is not tainted.

    A pure function: equal for every rank, whatever the order each listed its candidates in.

    Args:
        listed: for each rank, what it sees.
        run: the run to resume; candidates of another one are passed over.
        starts: for each life of the run so far, the step it began from. What earlier lives saved
            beyond that step was given up then, and is out of the line.
        tainted: identities not to resume from, each with the reason (`TaintJournal.tainted`).
    """
    ranks = [sorted(set(candidates), key=_local_first) for candidates in listed]
    known = {(one.step, one.attempt, one.identity): one for rank in ranks for one in rank}
    passed_over: list[PassedOver] = []
    for (step, _, identity), candidate in sorted(known.items(), reverse=True):
        of_ranks = [[one for one in rank if one.identity == identity] for rank in ranks]
        usable = [[one for one in copies if one.fault is None] for copies in of_ranks]
        reason = (
            _unusable(of_ranks, usable)
            or _out_of_line(candidate, run, starts)
            or tainted.get(identity)
        )
        if reason is None:
            places = tuple(copies[0].place for copies in usable)
            return Choice(step, identity, places, tuple(passed_over))
        passed_over.append(PassedOver(step, identity, reason))
    return Choice(0, None, (), tuple(passed_over))


def _local_first(candidate: Candidate) -> tuple[bool, str, str, str]:
    return (
        candidate.tier != "local",
        candidate.place,
        candidate.identity,
        candidate.fault or "",
    )


def _unusable(
    of_ranks: Sequence[Sequence[Candidate]], usable: Sequence[Sequence[Candidate]]
) -> str | None:
    for rank, copies in enumerate(usable):
        if not copies:
            seen = of_ranks[rank]
            return f"rank {rank}: {seen[0].fault}" if seen else f"rank {rank} doesn't have it"
    return None


def _out_of_line(candidate: Candidate, run: str, starts: Mapping[int, int]) -> str | None:
    if candidate.run != run:
        return f"it is of run {candidate.run}, not of {run}"
    if candidate.attempt not in starts:
        return f"it is of attempt {candidate.attempt}, which this run never had"
    for attempt, start in sorted(starts.items()):
        if attempt > candidate.attempt and start < candidate.step:
            return (
                f"attempt {attempt} began again from step {start}: "
                f"what attempt {candidate.attempt} saved beyond that was given up"
            )
    return None


class TaintJournal:
    """Which checkpoints failed on resume, kept in a file of the run: `taint.jsonl`.

    A resume has failed if it neither reached `within_steps` further steps nor was released. One
    that was killed leaves no end, and counts: a checkpoint that crashes on every resume can't be
    told from bad luck at the first time, so the second taints it. A resume that survives clears
    what came before. One process of a run writes.

    Args:
        path: of the journal.
        within_steps: how far a resume has to come.
    """

    def __init__(self, path: Path, *, within_steps: int) -> None:
        assert within_steps >= 1, "a resume that has to come nowhere can't fail"
        self._path = path
        self._within_steps = within_steps
        self._open: tuple[str, int] | None = None

    def tainted(self) -> dict[str, str]:
        """The identities not to resume from, each with the reason; asked before `resumed`.

        Raises:
            RunError: the journal is damaged.
        """
        failures: dict[str, list[int]] = {}
        for line in read_journal(self._path):
            of_identity = failures.setdefault(line["identity"], [])
            if line["event"] == "resumed":
                of_identity.append(line["attempt"])
            else:
                of_identity.clear()
        return {
            identity: f"tainted: the resumes in attempts {', '.join(map(str, attempts))} failed "
            f"within {self._within_steps} steps"
            for identity, attempts in failures.items()
            if len(attempts) >= _FAILURES_TO_TAINT
        }

    def resumed(self, identity: str, *, step: int, attempt: int) -> None:
        """Note, on disk, that a life begins from a checkpoint."""
        self._open = (identity, step)
        self._note({"event": "resumed", "identity": identity, "step": step, "attempt": attempt})

    def step_done(self, step: int) -> None:
        """Note the step that shows that the resume came far enough; called after each step."""
        if self._open and step >= self._open[1] + self._within_steps:
            self._end("survived")

    def release(self) -> None:
        """Note an end that is not the checkpoint's fault: finished, preempted, stopped by hand."""
        if self._open:
            self._end("released")

    def _end(self, event: str) -> None:
        assert self._open, "a resume ends once"
        identity, step = self._open
        self._open = None
        self._note({"event": event, "identity": identity, "step": step})

    def _note(self, record: dict[str, object]) -> None:
        with Journal(self._path) as journal:
            journal.append(record)
