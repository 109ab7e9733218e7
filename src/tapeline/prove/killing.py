"""When a run is killed, drawn from a seed; and training in processes that really are killed."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.prove.processes import POLL_S, Command
from tapeline.runs import RunFolder

_STALL_S = 900.0  # without a new step; long, for models whose steps are
_NOTICE_S = 120.0  # for ranks to notice that one is gone
_TAIL_BYTES = 1 << 16
_FIRST_SHARE = 0.85  # of the steps: a kill later than that could come after the last one


@dataclass(frozen=True, slots=True)
class Killed:
    """How a training process died.

    Attributes:
        pid: of the process; the first, where several ranks died.
        after_step: the last step it had journalled when the signal was sent.
    """

    pid: int
    signal: str
    after_step: int


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned SIGKILL.

    Attributes:
        at_step: it comes once that step is journalled,
        later: and this share of the time between two looks at the journal later, so that any
            moment of a step can be met.
        ranks: of the life that it ends.
        victims: which of them are killed; fewer than all leaves it to the others to notice.
    """

    at_step: int
    later: float
    ranks: int
    victims: tuple[int, ...]


def plan_kills(num: int, ranks: Sequence[int], steps: int, seed: int) -> list[Kill]:
    """Draw `num` kills, one in each of as many equal stretches of the run.

    The lives take the numbers of ranks in turn, beginning with the second: the uninterrupted run
    has the first. On several ranks every second kill, as drawn, ends one of them alone.
    """
    draw = random.Random(seed).random  # the one method whose numbers Python promises to keep
    last = max(num, int(_FIRST_SHARE * steps))
    kills = []
    for number in range(num):
        size = ranks_of_life(number, ranks)
        at_step = 1 + int((number + draw()) * (last - 1) / num)
        later, alone, victim = draw(), draw() < 0.5, int(draw() * size)
        victims = (victim,) if size > 1 and alone else tuple(range(size))
        kills.append(Kill(at_step, later, size, victims))
    return kills


def ranks_of_life(number: int, ranks: Sequence[int]) -> int:
    """On how many ranks a life goes, counted from 0."""
    return ranks[(number + 1) % len(ranks)]


def train_and_kill(config: Path, run: Path, *, at_step: int) -> Killed:
    """Train in a process and send it SIGKILL once it has journalled `at_step`.

    Raises:
        RunError: it ended by itself before that.
    """
    with Command("train", str(config), "--out", str(run)) as command:
        return kill_at(command, run, at_step=at_step)


def train_to_end(config: Path, run: Path) -> dict[str, Any]:
    """Train in a process; returns what `tapeline train --json` prints."""
    with Command("train", str(config), "--out", str(run), "--json") as command:
        return command.data()


def resume_to_end(run: Path) -> dict[str, Any]:
    """Resume in a process; returns what `tapeline resume --json` prints."""
    with Command("resume", str(run), "--json") as command:
        return command.data()


def kill_at(
    command: Command,
    run: Path,
    *,
    at_step: int,
    later: float = 0.0,
    victims: Collection[int] = (),
    progress: Callable[[int], None] | None = None,
) -> Killed:
    """Send SIGKILL to a run once it has journalled `at_step`.

    Args:
        command: trains or resumes it.
        later: how much later, as a share of the time between the last two looks at the journal
            that found something new; so that any moment of a step can be met.
        victims: ranks; none means all. The others then have to end by themselves.
        progress: called with the steps done.

    Raises:
        RunError: the run ended by itself before that, or came to a stop.
    """
    reached, since_s = watch(command, run, until=at_step, progress=progress)
    if reached < at_step:
        command.wait(_NOTICE_S)
        raise RunError(
            run,
            expected=f"a run that is killed at step {at_step}",
            found=f"one that ended by itself: {command.last_line()}",
            fix="Train more steps, or kill earlier",
        )
    time.sleep(later * since_s)
    ranks = victims or range(len(command.processes))
    command.kill(ranks)
    codes = command.wait(_NOTICE_S)
    if not any(codes[rank] == -signal.SIGKILL for rank in ranks):
        raise RunError(
            run,
            expected=f"a run that is killed at step {at_step}",
            found="one that reached its last step before the signal",
            fix="Train more steps, or kill earlier",
        )
    first = command.processes[next(iter(ranks))]
    return Killed(first.pid, "SIGKILL", last_step(run))


def watch(
    command: Command, run: Path, *, until: int, progress: Callable[[int], None] | None = None
) -> tuple[int, float]:
    """Look on until a step is journalled, or some rank has ended.

    Returns:
        The last step seen, and the seconds between the last two looks that found a new one.

    Raises:
        RunError: nothing new for a quarter of an hour.
    """
    step, since_s, seen_s = 0, 0.0, time.monotonic()
    while step < until:
        running = command.is_running  # asked first: what was journalled before the end counts
        found, now_s = last_step(run), time.monotonic()
        if found > step:
            since_s, seen_s, step = (now_s - seen_s if step else 0.0), now_s, found
            if progress:
                progress(step)
        elif not running:
            break
        elif now_s - seen_s > _STALL_S:
            raise RunError(
                run,
                expected=f"a new step within {_STALL_S:.0f} s",
                found=f"none after step {step}",
                fix="Look at the run with `tapeline diagnose` while it hangs",
            )
        time.sleep(POLL_S)
    return step, since_s


def last_step(run: Path) -> int:
    """The last step whose loss is journalled; 0 for none. Reads the journal's end alone."""
    try:
        with RunFolder(run).metrics_path(0).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            lines = stream.read().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        if line.endswith(b"\n") and b'"losses"' in line:
            return int(json.loads(line)["step"])
    return 0
