"""Why a run is slow, stuck or dead: a pure function of what is known of its ranks.

Liveness comes first, since shares mean little on a run that hangs; then what makes it slow, by what
mending it returns. Missing evidence is never taken for health.
"""

from __future__ import annotations

from tapeline.signals.evidence import Evidence
from tapeline.signals.liveness import liveness
from tapeline.signals.slowness import comparable, distribution, shape, typical_share
from tapeline.signals.verdict import Limits, Verdict
from tapeline.words import percent


def triage(evidence: Evidence, limits: Limits | None = None) -> tuple[Verdict, ...]:
    """The causes that the evidence shows, the most pressing first; at least one verdict.

    Args:
        evidence: of a run that goes on or of one that ended.
        limits: from where on something is a finding.
    """
    limits = limits or Limits()
    trouble = liveness(evidence, limits)
    if trouble and trouble.kind == "hang":
        return (trouble,)  # what a hanging run's shares say is the hang
    slow = [*shape(evidence, limits), *distribution(evidence, limits)]
    slow.sort(key=lambda verdict: -(verdict.ceiling or 0))
    if trouble or slow:
        return (*([trouble] if trouble else []), *slow)
    gaps = _gaps(evidence, limits)
    return (_unknown(evidence, gaps) if gaps else _healthy(evidence),)


def _gaps(evidence: Evidence, limits: Limits) -> list[str]:
    """What was not seen, or is not explained."""
    gaps = []
    num = evidence.num_ranks

    def missing(what: str, number: int) -> None:
        if number:
            gaps.append(f"{what} of {number} of {num} ranks")

    missing("any trace", num - len(evidence.ranks))
    missing("the heartbeat", sum(not (r.heartbeat or r.exit) for r in evidence.ranks))
    missing("enough steps in the ledger", sum(r.shares is None for r in evidence.ranks))
    if num > 1:
        ranks = comparable(evidence)
        missing("step times apart from the wait in collectives", num - len(ranks))
        fewest = min((len(r.windows) for r in ranks), default=limits.num_windows)
        if fewest < limits.num_windows:
            gaps.append(f"more than {fewest} of {limits.num_windows} windows of step times")
    if not any(r.kernels for r in evidence.ranks):
        gaps.append("a profile of the kernels")
    return [*(f"not seen: {gap}" for gap in gaps), *_unexplained(evidence, limits)]


def _unexplained(evidence: Evidence, limits: Limits) -> list[str]:
    other = typical_share(evidence, "other")
    if other is None or other < limits.other:
        return []
    return [f"{percent(other)} of the time since startup is in no bucket that has a name"]


def _unknown(evidence: Evidence, gaps: list[str]) -> Verdict:
    return Verdict(
        "unknown",
        (),
        (*gaps, *_shares(evidence)),
        "the evidence that is missing",
        "Get what is named above; what was seen shows no cause",
    )


def _healthy(evidence: Evidence) -> Verdict:
    return Verdict(
        "healthy",
        (),
        (_seen(evidence.num_ranks), *_shares(evidence)),
        "a slower run than one like it on the same machine",
        "Nothing around the steps: the rest is computing, and `torch.profiler` says in which "
        "operations, a few large ones or many small",
    )


def _seen(num_ranks: int) -> str:
    if num_ranks == 1:
        return "its one rank seen, neither ended nor stuck"
    return f"all of {num_ranks} ranks seen, none ended or stuck"


def _shares(evidence: Evidence) -> tuple[str, ...]:
    buckets = ("useful", "starved", "checkpoint", "lost", "evaluation", "other")
    shares = [(bucket, typical_share(evidence, bucket)) for bucket in buckets]
    told = ", ".join(f"{bucket} {percent(share)}" for bucket, share in shares if share is not None)
    return (f"shares of the time since startup: {told}",) if told else ()
