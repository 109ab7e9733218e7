"""Why two runs of one configuration part: what is known of them, then a few steps probed.

Covers the causes below; one that shows on several ranks alone, such as a model that reads its
rank, is not among them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tapeline.checkpoint import Shelf
from tapeline.prove.processes import Command
from tapeline.prove.tracing import entries_of, first_difference

Kind = Literal[
    "changed contract",
    "thread count",
    "non-deterministic operation",
    "unkeyed draw",
    "state outside the checkpoint",
]
ONE_THREAD = 1
MANY_THREADS = max(2, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason to part.

    Attributes:
        where: the module, attribute or operation.
        shown: whether it was seen to change the bits; otherwise it could.
    """

    kind: Kind
    where: str
    evidence: str
    fix: str
    shown: bool = True


def find_causes(reference: Path, killed: Path, equal_up_to: int) -> list[Cause]:
    """Look for what made two runs part; those that were seen to change bits first.

    Args:
        reference: the uninterrupted run. The steps after `equal_up_to` are tried from there.
        killed: the other one.
        equal_up_to: a step at which both saved the same bits, or 0.
    """
    if given_up := _of_contract(killed):
        return given_up
    told = _probe(reference, equal_up_to, ONE_THREAD)
    causes = _of_processes(reference, equal_up_to, told)
    causes += [_draw(name, where) for name, where in told["trace"]["moved"].items()]
    causes += [
        Cause(
            "state outside the checkpoint",
            path,
            f"{change} over three steps, and putting the state back leaves it",
            "Keep it in a buffer (register_buffer), or in get_extra_state and set_extra_state",
            shown=told["again"] is not None,
        )
        for path, change in told["outside"].items()
    ]
    return sorted(causes, key=lambda cause: not cause.shown)


def _of_contract(run: Path) -> list[Cause]:
    """A contract that a life gave up says itself what had changed, and explains other bits."""
    shelf = Shelf(run / "checkpoints")
    for step in shelf.steps()[:1]:
        contract = shelf.manifest(step).metadata.get("contract", {})
        if contract.get("scope") == "statistical":
            threads = "threads" in contract["text"]
            kind: Kind = "thread count" if threads else "changed contract"
            fix = "Leave torch's threads alone: training.threads sets them" if threads else _RANKS
            return [Cause(kind, "the run itself", contract["text"], fix)]
    return []


_RANKS = "Keep the number of ranks and the platform, or train under lanes (training.lanes)"


def _of_processes(reference: Path, step: int, told: dict[str, Any]) -> list[Cause]:
    """What differs between processes that do the same: with as many threads, or with others."""
    steps = f"steps {step + 1} and after"
    entries = entries_of(told["trace"])
    again = _probe(reference, step, ONE_THREAD)
    if where := first_difference(entries, entries_of(again["trace"])):
        evidence = f"two processes that did {steps} alike got other bits, first there"
        return [Cause("non-deterministic operation", where, evidence, _DETERMINISTIC)]
    threaded = _probe(reference, step, MANY_THREADS)
    if where := first_difference(entries, entries_of(threaded["trace"])):
        evidence = (
            f"with {MANY_THREADS} threads in the environment instead of {ONE_THREAD}, {steps} "
            "got other bits, first there"
        )
        return [Cause("thread count", where, evidence, _THREADS)]
    if told["again"] and not told["outside"]:
        evidence = (
            f"new processes do {steps} alike, and one that did them twice from one state got other "
            "bits, first there: something was kept that neither a checkpoint nor a look finds"
        )
        return [Cause("state outside the checkpoint", told["again"], evidence, _KEPT)]
    return []


_KEPT = "Look for what it keeps in a closure, an iterator or a library, and keep it in a buffer"
_DETERMINISTIC = "Use an operation that repeats, and draw from torch, which is keyed by the step"
_THREADS = "Use an operation of torch, or give it a fixed number of threads in the model's code"


def _draw(name: str, where: str) -> Cause:
    return Cause(
        "unkeyed draw",
        where,
        f"it moves the global generator of {name}, which goes on differently on other ranks",
        "Draw from torch in the forward pass: its draws are keyed by seed, step and lane",
    )


def determinism_cost_of(run: Path) -> dict[str, float]:
    """What torch's determinism switch costs a step of a run's model on one rank."""
    return _probe(run, None, ONE_THREAD)


def _probe(run: Path, step: int | None, threads: int) -> dict[str, Any]:
    arguments = [str(run.absolute()), *([] if step is None else [str(step)])]
    with Command(*arguments, module="tapeline.prove.probe", threads=threads) as command:
        return command.data()
