"""A run under chaos beside the same run undisturbed: equal bits, a closed account, goodput.

Covers: driving `chaos` until the time is over, and the figures. The efficiency that is predicted
takes the failures that happened, and what a save and a restart cost in this very run, the wait
until a hang was detected with it: it tells whether the model of the plan holds, not whether the
costs were known beforehand.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapeline.errors import RunError
from tapeline.ledger import Account, account_of
from tapeline.reliability import efficiency
from tapeline.supervise.chaos import Chaos, Strike
from tapeline.supervise.processes import die_with_parent

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        strikes: faults that were done.
        parted: parts of the state that are not as in the undisturbed run.
        goodput: measured; None if a part of the time is unknown.
        predicted: by the renewal model; None without a failure or a save.
    """

    strikes: int
    parted: tuple[str, ...]
    goodput: float | None
    predicted: float | None


def under_chaos(
    run: Path,
    supervised: Sequence[str],
    strikes: Sequence[Strike],
    longest_s: float,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], int]:
    """Run a supervised command to its end, and strike it until the time is over.

    Args:
        run: folder of the run.
        supervised: the command; prints the run's result as JSON.
        strikes: what to do, in turn.
        longest_s: from the first step on; no strikes after that.
        say: told of each.

    Returns:
        The result, and how many strikes there were.

    Raises:
        RunError: the supervisor gave up.
    """
    chaos = Chaos(run, say)
    parent = os.getpid()
    with subprocess.Popen(
        supervised,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads here
    ) as process:
        while process.poll() is None and not chaos.ready():
            time.sleep(_POLL_S)
        deadline = time.monotonic() + longest_s
        for strike in strikes:
            while process.poll() is None and not chaos.ready() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            due = min(time.monotonic() + strike.after_s, deadline)
            while process.poll() is None and time.monotonic() < due:
                time.sleep(_POLL_S)
            if process.poll() is not None or time.monotonic() >= deadline:
                break
            chaos.strike(strike)
        output, _ = process.communicate()
    return _result(run, process.returncode, output), len(chaos.done)


def undisturbed(run: Path, command: Sequence[str]) -> dict[str, Any]:
    """The result of a command that is left in peace.

    Raises:
        RunError: it failed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return _result(run, done.returncode, done.stdout)


def compare(run: Path, struck: dict[str, Any], whole: dict[str, Any], strikes: int) -> Trial:
    """The figures of a run under chaos.

    Raises:
        LedgerError: its account doesn't close.
    """
    account = account_of(run)
    ours, theirs = struck["part_sha256"], whole["part_sha256"]
    parted = tuple(part for part in theirs if ours.get(part) != theirs[part])
    return Trial(strikes, parted, account.goodput, predicted(account, _between_saves(run)))


def _between_saves(run: Path) -> list[int]:
    """Steps between the checkpoints that are kept."""
    names = sorted((run / "checkpoints").glob("step-*/manifest.json"))
    steps = [int(path.parent.name.partition("-")[2]) for path in names]
    return [later - step for step, later in itertools.pairwise(steps)]


def predicted(account: Account, between: Sequence[int]) -> float | None:
    """The goodput that the renewal model gives for the costs of this run.

    Of the time that goes neither to failures nor to saves, the run's own share is useful. Daly's
    restarts fail as everything else does; chaos waits until the run trains again, so that of a
    cycle M + R the model rules M.

    Args:
        account: of the run.
        between: steps between saves.

    Source: `reliability.efficiency`, Daly 2006.
    """
    rank = account.ranks[0]
    failures, times = len(rank.lives) - 1, rank.times
    if failures < 1 or not between or not times.kept_steps:
        return None
    interval = sorted(between)[len(between) // 2]
    buckets = times.buckets_ns
    going_ns = times.wall_ns - buckets["lost"] - buckets["checkpoint"]
    restart_ns = times.buckets_ns["lost"] - times.lost_ns["redone"]
    num_saves = max(1, (times.kept_steps + times.redone_steps) // interval)
    up_ns = times.wall_ns - restart_ns
    carried = efficiency(
        interval * going_ns / times.kept_steps / 1e9,
        blocking_s=times.phases_ns["checkpoint"] / num_saves / 1e9,
        mtbf_s=up_ns / failures / 1e9,
    )
    return carried * up_ns / times.wall_ns * buckets["useful"] / going_ns


def _result(run: Path, code: int, output: str) -> dict[str, Any]:
    try:
        if code:
            raise ValueError
        result: dict[str, Any] = json.loads(output)
        return result
    except ValueError:
        raise RunError(
            run,
            expected="a run that comes to its last step",
            found=f"exit code {code}",
            fix="See what it said above; mend that, and try again in another folder",
        ) from None
