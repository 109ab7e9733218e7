"""The account of a run: every nanosecond of every rank in exactly one bucket.

    wall = useful + starved + checkpoint + lost + startup + evaluation + other

Covers putting the lives of all ranks on one axis of time, what lay between them, and goodput,
ETTR and money. Does not cover why time was lost.

*lost* is what failures and rollbacks cost: steps that were done again (`redone`, with all that
was spent beside them), the time until somebody noticed an end (`detection`, where anybody did),
the time nobody ran (`down`), and what a later attempt took to start (`restart`) and to read its
checkpoint (`reload`). *startup* is therefore that of the first attempt alone.

After an attempt that finished, or that its own criteria stopped, the run was over: nobody waited
for it, so the time until somebody takes it up again is in no bucket, and *startup* begins anew.
`attempts.jsonl` tells that; a ledger alone doesn't say why it was closed, and any gap is *down*.

Between two attempts on one machine the monotonic clock counts, which nobody can set; between
machines the wall clock. A gap that comes out negative is told and leaves the ratios unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapeline.errors import LedgerError
from tapeline.ledger.lives import Life, kept_through, lives_of
from tapeline.ledger.phases import BUCKET_OF, BUCKETS, INDEX, NS_PER_S, PHASES
from tapeline.ledger.reading import Attempt, RankLedger, read_attempts, read_ledgers
from tapeline.words import percent

_OVER = ("finished", "stopped")
LOSSES = ("redone", "detection", "down", "restart", "reload")
_NS_PER_HOUR = 3600 * NS_PER_S
_CLOCK_MOVED_NS = NS_PER_S  # less is drift


@dataclass(slots=True)
class Times:
    """Integer nanoseconds by bucket; for a job, of all its ranks together.

    Attributes:
        buckets_ns: by `BUCKETS`.
        lost_ns: the bucket "lost" by `LOSSES`.
        phases_ns: what the ranks did, by `PHASES`, whatever it was worth.
        overlap_ns: of waits for data, counted as useful because the device worked.
        device_ns: when devices worked; 0 where nobody looked.
        inferred_ns: known from heartbeats alone.
        estimated_ns: of spans that a rollback split.
        background_slowdown_ns: estimated cost of background writes; None if unknown.
        kept_steps, redone_steps: steps that count, and steps done for nothing.
    """

    buckets_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    lost_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0))
    phases_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    overlap_ns: int = 0
    device_ns: int = 0
    inferred_ns: int = 0
    estimated_ns: int = 0
    background_slowdown_ns: int | None = None
    kept_steps: int = 0
    redone_steps: int = 0

    @property
    def wall_ns(self) -> int:
        """All buckets together."""
        return sum(self.buckets_ns.values())

    @property
    def goodput(self) -> float | None:
        """Useful time over all time; None where there is none."""
        return self.buckets_ns["useful"] / self.wall_ns if self.wall_ns else None

    @property
    def ettr(self) -> float | None:
        """Time in which the run came forward, however slowly, over all time.

        Source: effective training time ratio, arXiv 2410.21680: what isn't lost and isn't startup.
        """
        away = self.buckets_ns["lost"] + self.buckets_ns["startup"]
        return (self.wall_ns - away) / self.wall_ns if self.wall_ns else None

    def lose(self, kind: str, nanoseconds: int) -> None:
        """Add to the bucket "lost"."""
        self.lost_ns[kind] += nanoseconds
        self.buckets_ns["lost"] += nanoseconds

    def add(self, other: Times) -> None:
        """Add the times of another rank or life."""
        for mine, theirs in (
            (self.buckets_ns, other.buckets_ns),
            (self.lost_ns, other.lost_ns),
            (self.phases_ns, other.phases_ns),
        ):
            for name, nanoseconds in theirs.items():
                mine[name] += nanoseconds
        for name in (
            "overlap_ns",
            "device_ns",
            "inferred_ns",
            "estimated_ns",
            "kept_steps",
            "redone_steps",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.background_slowdown_ns is not None:
            known_ns = self.background_slowdown_ns or 0
            self.background_slowdown_ns = known_ns + other.background_slowdown_ns

    def as_dict(self) -> dict[str, Any]:
        """The fields and the ratios as JSON can hold them."""
        return {"wall_ns": self.wall_ns, "goodput": self.goodput, "ettr": self.ettr, **asdict(self)}


@dataclass(frozen=True, slots=True)
class LifeAccount:
    """One attempt of one rank on the rank's axis of time.

    Attributes:
        attempt: which.
        begin_ns: since the rank's first attempt began.
        wall_begin_ns: by the wall clock, since 1970.
        lived_ns: how long it is known to have lived.
        from_step, step: steps done when it began and when it ended.
        times: its buckets, without what lay after it.
        how: how it ended; None if it was killed, or lives.
        detection_ns, down_ns: after it, until its end was noticed and until the next began.
    """

    attempt: int
    begin_ns: int
    wall_begin_ns: int
    lived_ns: int
    from_step: int
    step: int
    times: Times
    how: str | None = None
    detection_ns: int = 0
    down_ns: int = 0

    @property
    def starts_again(self) -> bool:
        """Whether it took up a run that wasn't over, so that its start is lost."""
        return bool(self.times.lost_ns["restart"] + self.times.lost_ns["reload"])


@dataclass(frozen=True, slots=True)
class RankAccount:
    """All lives of one rank."""

    rank: int
    lives: tuple[LifeAccount, ...]
    times: Times

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        lives = [asdict(life) | {"times": life.times.as_dict()} for life in self.lives]
        return {"rank": self.rank, **self.times.as_dict(), "lives": lives}


@dataclass(frozen=True, slots=True)
class Account:
    """Where the time of a run went.

    Attributes:
        ranks: each rank's account.
        job: of all ranks together: accelerator time.
        price_per_hour: of one rank's accelerator, in the user's currency; None if not given.
        clock_faults: gaps that came out negative; while there are any, the ratios are None.
        notes: what else should be known: clocks that were set, lines left out.
    """

    ranks: tuple[RankAccount, ...]
    job: Times
    price_per_hour: float | None
    clock_faults: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def goodput(self) -> float | None:
        """Useful time over all time, of the job; None if a part of the time is unknown."""
        return None if self.clock_faults else self.job.goodput

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio of the job; None if a part of the time is unknown."""
        return None if self.clock_faults else self.job.ettr

    def in_words(self) -> str:
        """What became of the time of all lives, the largest parts first."""
        spent = sorted(self.job.buckets_ns.items(), key=lambda bucket: -bucket[1])
        parts = ", ".join(f"{name} {percent(ns / self.job.wall_ns)}" for name, ns in spent[:4])
        told = "unknown, since a clock was set" if self.goodput is None else parts
        return f"of {self.job.wall_ns / NS_PER_S:,.1f} s on all ranks: {told}"

    def cost(self) -> dict[str, float] | None:
        """The price of each bucket; None without a price."""
        if self.price_per_hour is None:
            return None
        return {
            bucket: nanoseconds * self.price_per_hour / _NS_PER_HOUR
            for bucket, nanoseconds in self.job.buckets_ns.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {
            "goodput": self.goodput,
            "ettr": self.ettr,
            "price_per_hour": self.price_per_hour,
            "cost": self.cost(),
            "clock_faults": list(self.clock_faults),
            "notes": list(self.notes),
            "job": self.job.as_dict(),
            "ranks": [rank.as_dict() for rank in self.ranks],
        }


def account_of(run_folder: Path | str, *, price_per_hour: float | None = None) -> Account:
    """The account of a run, live or dead, from its folder.

    Raises:
        LedgerError: no ledger, or one that doesn't add up.
    """
    ledgers = read_ledgers(run_folder)
    return account(ledgers, read_attempts(run_folder), price_per_hour=price_per_hour)


def account(
    ledgers: Sequence[RankLedger],
    attempts: Sequence[Attempt] = (),
    *,
    price_per_hour: float | None = None,
) -> Account:
    """The account of a run.

    Args:
        ledgers: of its ranks.
        attempts: what is known of its attempts beside them.
        price_per_hour: of one rank's accelerator.

    Raises:
        LedgerError: spans that don't add up, or ranks that contradict each other.
    """
    through = kept_through(_from_steps(ledgers, attempts))
    over = {attempt.number for attempt in attempts if attempt.how in _OVER}
    noticed = {
        attempt.number: attempt.ended_wall_ns
        for attempt in attempts
        if attempt.ended_wall_ns is not None and attempt.number not in over
    }
    faults: list[str] = []
    notes: list[str] = []
    ranks = []
    for ledger in ledgers:
        said = _Said(f"rank {ledger.rank}", faults, notes)
        ranks.append(_rank(ledger.rank, lives_of(ledger, through), noticed, over, said))
        if ledger.duplicates:
            notes.append(f"rank {ledger.rank}: {ledger.duplicates} lines were there twice")
        if failed := sum(close.failed_writes for close in ledger.closes.values()):
            notes.append(f"rank {ledger.rank}: {failed} writes of the ledger failed")
    job = Times()
    for rank in ranks:
        job.add(rank.times)
    return Account(tuple(ranks), job, price_per_hour, tuple(faults), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Said:
    where: str
    faults: list[str]
    notes: list[str]


def _from_steps(ledgers: Sequence[RankLedger], attempts: Sequence[Attempt]) -> dict[int, int]:
    from_steps = {attempt.number: attempt.from_step for attempt in attempts}
    for ledger in ledgers:
        for begin in ledger.begins:
            if from_steps.setdefault(begin.attempt, begin.from_step) != begin.from_step:
                raise LedgerError(
                    f"{ledger.path}, attempt {begin.attempt}",
                    expected=f"step {from_steps[begin.attempt]}, where another rank or "
                    "attempts.jsonl says that it began",
                    found=f"step {begin.from_step}",
                    fix="Keep the ledgers of different runs in different folders",
                )
    return from_steps


def _rank(
    number: int, lives: list[Life], noticed: dict[int, int], over: set[int], said: _Said
) -> RankAccount:
    accounts, total, begin_ns = [], Times(), 0
    begins = True  # anew, and not after a failure
    for place, life in enumerate(lives):
        following = lives[place + 1] if place + 1 < len(lives) else None
        is_over = life.begin.attempt in over
        gap_ns = _gap_ns(life, following, said) if following and not is_over else 0
        detection_ns = _detection_ns(life, noticed, gap_ns if following else None, said)
        down_ns = gap_ns - detection_ns if following else 0
        times = _times(life, first=begins)
        begins = is_over
        total.add(times)
        total.lose("detection", detection_ns)
        total.lose("down", down_ns)
        accounts.append(
            LifeAccount(
                life.begin.attempt,
                begin_ns,
                life.begin.wall_ns,
                life.end_ns,
                life.begin.from_step,
                life.step,
                times,
                life.close.how if life.close else None,
                detection_ns,
                down_ns,
            )
        )
        begin_ns += life.end_ns + detection_ns + down_ns
    if total.wall_ns != begin_ns or min(total.buckets_ns.values()) < 0:
        raise LedgerError(
            f"account of rank {number}",
            expected=f"buckets of at least 0 that add up to {begin_ns} ns",
            found=", ".join(f"{name} {ns}" for name, ns in total.buckets_ns.items()),
            fix="Report this with the ledger: its lines add up, but the account doesn't",
        )
    return RankAccount(number, tuple(accounts), total)


def _times(life: Life, *, first: bool) -> Times:
    """The buckets of one life."""
    times = Times(
        overlap_ns=life.overlap_ns,
        device_ns=life.device_ns,
        inferred_ns=life.inferred_ns,
        estimated_ns=life.estimated_ns,
        background_slowdown_ns=life.slowdown_ns(),
        kept_steps=life.kept_steps,
        redone_steps=life.redone_steps,
    )
    kept, redone = life.kept_ns.tolist(), life.redone_ns.tolist()
    for phase, bucket in BUCKET_OF.items():
        kept_ns, redone_ns = kept[INDEX[phase]], redone[INDEX[phase]]
        times.phases_ns[phase] = kept_ns + redone_ns
        if bucket != "startup":
            times.buckets_ns[bucket] += kept_ns
            times.lose("redone", redone_ns)
        elif first:
            times.buckets_ns["startup"] += kept_ns + redone_ns
        else:
            times.lose("reload" if phase == "restore" else "restart", kept_ns + redone_ns)
    times.buckets_ns["starved"] -= life.overlap_ns
    times.buckets_ns["useful"] += life.overlap_ns
    return times


def _gap_ns(life: Life, following: Life, said: _Said) -> int:
    """From the end of what is known of a life to the begin of the next; 0 if it can't be told."""
    end_ns = _wall_end_ns(life)
    wall_ns = following.begin.wall_ns - end_ns
    gap_ns = wall_ns
    between = f"{said.where}, between attempts {life.begin.attempt} and {following.begin.attempt}"
    if life.begin.boot is not None and life.begin.boot == following.begin.boot:
        gap_ns = following.begin.monotonic_ns - life.begin.monotonic_ns - life.end_ns
        if abs(moved_ns := wall_ns - gap_ns) > _CLOCK_MOVED_NS:
            said.notes.append(
                f"{between}: the wall clock moved by {moved_ns / NS_PER_S:+.1f} s against the "
                "machine's own, which was counted"
            )
    if gap_ns >= 0:
        return gap_ns
    said.faults.append(
        f"{between}: the second began {-gap_ns / NS_PER_S:.1f} s before the first ended, so a "
        "clock was set or both ran at once; the time between them is unknown"
    )
    return 0


def _detection_ns(life: Life, noticed: dict[int, int], gap_ns: int | None, said: _Said) -> int:
    """From the last that is known of a killed life until its end was noticed."""
    ended_ns = noticed.get(life.begin.attempt)
    if life.close or ended_ns is None:
        return 0
    detection_ns = ended_ns - _wall_end_ns(life)
    if detection_ns >= 0 and (gap_ns is None or detection_ns <= gap_ns):
        return detection_ns
    said.notes.append(
        f"{said.where}, attempt {life.begin.attempt}: its end was noticed "
        f"{detection_ns / NS_PER_S:+.1f} s after it, by the wall clock, which can't be; how long "
        "that took is not told apart"
    )
    return 0


def _wall_end_ns(life: Life) -> int:
    return life.close.wall_ns if life.close else life.begin.wall_ns + life.end_ns
