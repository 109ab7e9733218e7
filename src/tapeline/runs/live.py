"""A run at this moment, from the ends of its files: cheap enough to look at every second.

Covers a run that goes on and one that ended, on its own machine or seen from another. Nothing is
written and no lock is tried, so nothing here is in the training's way. Does not cover why a run is
slow or dead (`diagnosis`), nor its whole history (`history`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tapeline.clock import Clock
from tapeline.errors import LedgerError
from tapeline.files import read_journal, tail_records
from tapeline.ledger import (
    Account,
    Beat,
    account_of,
    heartbeat_path,
    ledger_path,
    read_heartbeat,
    read_ledger,
)
from tapeline.ledger.tail import boot_id, kernel_state, pace_per_s
from tapeline.runs.folder import RunFolder
from tapeline.runs.metrics import with_nan, without_nan
from tapeline.signals import Limits

_GONE = (None, "Z", "X")
_CLOCKS_AGREE_S = 2.0
FINAL = ("finished", "stopped")  # nobody starts such a run again by itself
_MOST_LOSSES = 200
_MOST_FINDINGS = 5
_ACCOUNT_SHARE = 0.05  # of the time between two looks, at most, goes into the account


@dataclass(frozen=True, slots=True)
class LiveRank:
    """One rank in the run's last life; what can't be known is None.

    Attributes:
        phase: what it does since its last heartbeat.
        age_s: of that heartbeat; None on another machine, whose clock is another.
        lives: whether its process is there.
        samples_per_s: windows a second, while it lives.
    """

    rank: int
    step: int | None = None
    phase: str | None = None
    age_s: float | None = None
    lives: bool | None = None
    samples_per_s: float | None = None

    @property
    def stale(self) -> bool:
        """Whether it lives and came forward too long ago for its phase."""
        limits = Limits()
        allowed_s = limits.stuck_s.get(self.phase or "", limits.stuck_else_s)
        return bool(self.lives) and self.age_s is not None and self.age_s > allowed_s


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run at one moment.

    Attributes:
        target: steps it is to do.
        lives: of `attempts.jsonl`, in order.
        supervised: whether a supervisor on this machine looks after it.
        ranks: of the last life.
        losses: (step, loss), the last ones; each step once.
        account: where the time went until the last heartbeat; None under a `problem`.
        problem: why there is no account.
        findings: of the watchers, in all lives, in the order of writing.
        pace_per_s: steps a second of late, with all that lay between them.
    """

    name: str
    target: int
    lives: tuple[dict[str, Any], ...] = ()
    supervised: bool = False
    ranks: tuple[LiveRank, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    account: Account | None = None
    problem: str | None = None
    findings: tuple[dict[str, Any], ...] = ()
    pace_per_s: float | None = None

    @property
    def state(self) -> str:
        """In a word: how its end is told, or what it is without one.

        "not begun"; "running"; "stale": a rank lives and hasn't come forward for too long;
        "broken": some processes are gone and others live; "dead": all that can be seen from here
        are gone, and none told an end; "unknown": none can be seen.
        """
        if not self.lives:
            return "not begun"
        if how := self.lives[-1].get("how"):
            return str(how)
        if any(rank.stale for rank in self.ranks):
            return "stale"
        lives = {rank.lives for rank in self.ranks}
        if True in lives:
            return "broken" if False in lives else "running"
        return "dead" if False in lives else "unknown"

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come, as far as can be told."""
        told = self.state not in ("not begun", "running", "stale", "broken", "unknown")
        return self.state in FINAL or (told and not self.supervised)

    @property
    def healthy(self) -> bool:
        """Whether it runs, or came to a good end."""
        return self.state in ("running", "not begun", *FINAL)

    @property
    def step(self) -> int:
        """Steps that all ranks have done; where none is heard of, the last one that is known."""
        heard = [rank.step for rank in self.ranks if rank.step is not None]
        journalled = self.losses[-1][0] if self.losses else 0
        told = self.lives[-1].get("step", journalled) if self.lives else 0
        return min(heard) if heard else int(told)

    @property
    def eta_s(self) -> float | None:
        """Until the last step at the pace of late; None unless it runs."""
        if self.state != "running" or not self.pace_per_s:
            return None
        return max(0, self.target - self.step) / self.pace_per_s

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them; the account without its ranks and their lives."""
        account = self.account
        return {
            "name": self.name,
            "state": self.state,
            "ended": self.ended,
            "supervised": self.supervised,
            "step": self.step,
            "target": self.target,
            "eta_s": self.eta_s,
            "pace_per_s": self.pace_per_s,
            "attempts": list(self.lives),
            "ranks": [{**asdict(rank), "stale": rank.stale} for rank in self.ranks],
            "losses": [[step, without_nan(loss)] for step, loss in self.losses],
            "goodput": account.goodput if account else None,
            "ettr": account.ettr if account else None,
            "buckets_ns": account.job.buckets_ns if account else None,
            "account_problem": self.problem,
            "findings": list(self.findings[-_MOST_FINDINGS:]),
            "num_findings": len(self.findings),
        }


class LiveView:
    """Looks at one run, as often as is asked.

    Args:
        clock: for the ages of heartbeats.

    Raises:
        RunError: the folder isn't a run's.
    """

    def __init__(self, run: Path, clock: Clock) -> None:
        self._run = RunFolder(run, clock)
        self._config = self._run.record()["config"]
        self._clock = clock
        self._account: tuple[Account | None, str | None] = None, None
        self._account_due_ns = 0
        self._same_boots: dict[tuple[int, int], bool] = {}  # by rank and life

    def look(self) -> LiveRun:
        """The run now.

        Raises:
            RunError: a line of its journals is damaged.
        """
        run = self._run
        lives = run.attempts()
        life = lives[-1] if lives else {}
        account, problem = self._accounted()
        return LiveRun(
            name=self._config["name"],
            target=self._target(life),
            lives=tuple(lives),
            supervised=_is_any_locked(run.path.glob("supervise/.lock-*")),
            ranks=tuple(self._rank(rank, life) for rank in range(life.get("world_size", 0))),
            losses=_losses(run.metrics_path(0)),
            account=account,
            problem=problem,
            findings=tuple(read_journal(run.findings_path)),
            pace_per_s=pace_per_s(ledger_path(run.path, 0), life["attempt"]) if life else None,
        )

    def _target(self, life: dict[str, Any]) -> int:
        """A resumed life may have been given another number of steps."""
        own = self._run.attempt_record(life["attempt"]) if life else None
        config = (own or {}).get("config") or self._config
        return int(config["training"]["steps"])

    def _rank(self, rank: int, life: dict[str, Any]) -> LiveRank:
        beat = read_heartbeat(heartbeat_path(self._run.path, rank))
        if beat is None or beat.attempt != life["attempt"]:
            return LiveRank(rank)
        if life.get("host") != socket.gethostname():
            return LiveRank(rank, beat.step, beat.phase)
        life_of_rank = rank, beat.attempt
        if life_of_rank not in self._same_boots:
            self._same_boots[life_of_rank] = same_boot(self._run.path, *life_of_rank)
        if not self._same_boots[life_of_rank]:
            # The host is rank 0's: that was started again. Another rank's may be another one.
            return LiveRank(rank, beat.step, beat.phase, lives=None if rank else False)
        age_s = max(0, self._clock.monotonic_ns() - beat.monotonic_ns) / 1e9
        lives = process_state(beat, age_s) not in _GONE
        rates = [
            line["samples_per_s"]
            for line in tail_records(self._run.metrics_path(rank))
            if "samples_per_s" in line and line["attempt"] == beat.attempt
        ]
        return LiveRank(
            rank, beat.step, beat.phase, age_s, lives, rates[-1] if lives and rates else None
        )

    def _accounted(self) -> tuple[Account | None, str | None]:
        """The account, from the whole ledger; one that takes long to make is made more rarely."""
        began_ns = time.monotonic_ns()
        if began_ns >= self._account_due_ns:
            try:
                self._account = account_of(self._run.path), None
            except LedgerError as error:
                self._account = None, str(error)
            now_ns = time.monotonic_ns()
            self._account_due_ns = now_ns + round((now_ns - began_ns) / _ACCOUNT_SHARE)
        return self._account


def same_boot(run: Path, rank: int, attempt: int) -> bool:
    """Whether a life of a rank began on this machine, up since then, as far as its ledger tells."""
    boots: dict[int, str | None] = {}
    with contextlib.suppress(LedgerError):
        begins = read_ledger(ledger_path(run, rank)).begins
        boots = {begin.attempt: begin.boot for begin in begins}
    return boots.get(attempt) in (None, boot_id())


def process_state(beat: Beat, age_s: float) -> str | None:
    """The letter that the kernel gives the process of a beat; None if that is gone.

    Its number alone may be another's by now: one that began after the beat is.
    """
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(beat.pid)
        if process.create_time() <= time.time() - age_s + _CLOCKS_AGREE_S:
            return kernel_state(process)
    return None


def _is_any_locked(paths: Iterable[Path]) -> bool:
    """Whether a process of this machine holds one of the locks, by the kernel's list (Linux).

    To try them would be in the way of whoever wants to take them.
    """
    try:
        endings = tuple(f":{path.stat().st_ino}" for path in paths)
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(field.endswith(endings) for field in locks.split())


def _losses(journal: Path) -> tuple[tuple[int, float], ...]:
    """The last losses in a journal, each step once: of one done again, the later."""
    found: list[tuple[int, float]] = []
    for line in tail_records(journal):
        if "losses" in line:
            losses = with_nan(line["losses"])
            first = line["step"] - len(losses) + 1
            while found and found[-1][0] >= first:
                found.pop()
            found += [(first + number, float(loss)) for number, loss in enumerate(losses)]
    return tuple(found[-_MOST_LOSSES:])
