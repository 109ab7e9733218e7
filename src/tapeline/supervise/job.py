"""What is supervised, by what, and how it ended: what goes into a supervisor and comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tapeline.config import TrainingConfig
from tapeline.errors import RunError
from tapeline.supervise.elastic import Ranks
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.nodes import Node
from tapeline.supervise.policy import Policy
from tapeline.supervise.quarantine import Rule
from tapeline.supervise.stragglers import SlowLimits


@dataclass(frozen=True, slots=True)
class Job:
    """What is supervised.

    Attributes:
        run: its folder.
        begin: program and arguments that begin it.
        resume: that go on with it, once it has begun.
        ranks: how many.
        training: what decides on how many it can be trained; None allows any number.
        node: this machine, among those on which it is trained; each has as many ranks.

    Raises:
        RunError: on several machines, the number of ranks isn't fixed.
    """

    run: Path
    begin: tuple[str, ...]
    resume: tuple[str, ...]
    ranks: Ranks = field(default_factory=Ranks)
    training: TrainingConfig | None = None
    node: Node = field(default_factory=Node)

    def __post_init__(self) -> None:
        if self.node.number > 1 and self.ranks.least != self.ranks.most:
            raise RunError(
                "--ranks",
                expected="one number, of ranks on each machine, where there are several machines",
                found=f"{self.ranks.least}:{self.ranks.most}",
                fix="Give the number that every machine has places for",
            )


@dataclass(frozen=True, slots=True)
class Rules:
    """By what it is supervised.

    Attributes:
        policy: when to start again.
        hang: when a rank hangs.
        quarantine: when a place is left out.
        slow: when a rank is a straggler.
        evict: put the place of one in quarantine and go on without, where that is faster.
        health: a shell command that says by exit code 0 that TAPELINE_SLOT can be used.
        settle_s: after the first failure, how long the other ranks may take to say theirs.
        grace_s: after a stop, how long they may take to save.
    """

    policy: Policy = field(default_factory=Policy)
    hang: HangLimits = field(default_factory=HangLimits)
    quarantine: Rule = field(default_factory=Rule)
    slow: SlowLimits = field(default_factory=SlowLimits)
    evict: bool = False
    health: str | None = None
    settle_s: float = 0.5
    grace_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended.

    Attributes:
        exit_code: for the scheduler.
        reason: in words.
        said: what the first rank to fail said last; rank 0, for a finished run.
        output: what rank 0 printed in the last attempt.
        attempts: how many there were, in all lives of supervisors.
    """

    exit_code: int
    reason: str
    said: tuple[str, ...]
    output: str
    attempts: int
