"""The parts of a run's page on time: buckets, attempts over real time, how long steps took."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tapeline.ledger import (
    BUCKET_OF,
    BUCKETS,
    PHASES,
    Account,
    Histogram,
    RankAccount,
    RankLedger,
    Segment,
    timeline,
)
from tapeline.ledger.phases import NS_PER_S
from tapeline.report.page import Bars, Section
from tapeline.report.seen import SeenRun
from tapeline.report.tables import Cell, Table, format_number, format_percent
from tapeline.report.time_figures import HUES, Mark, Row, step_times_figure, timeline_figure
from tapeline.words import percent

_NS_PER_MS = 1e6
_MOST_RANKS = 16  # in a picture
_PIECES = 400  # of all ranks in the timeline together
_FEWEST_PIECES = 40
_STALL_S, _STALL_TIMES = 1.0, 10.0  # a step that took as long, and as many times the median
# What a step is made of, with the variable of its colour.
_PARTS = {
    "data": "series-4",
    "transfer": "series-5",
    "compute": "series-3",
    "communication": "series-1",
    "other": "rule",
}


def account_table(account: Account) -> Table:
    """The buckets of a job: seconds, share, and money where a price is known."""
    cost = account.cost()
    whole = account.job.wall_ns or 1
    columns = ["bucket", "seconds, all ranks", "share", *(["money"] if cost else [])]
    rows: list[list[Cell]] = []
    for bucket in BUCKETS:
        spent = account.job.buckets_ns[bucket]
        row: list[Cell] = [bucket, round(spent / NS_PER_S, 3), format_percent(spent / whole)]
        rows.append([*row, round(cost[bucket], 4)] if cost else row)
    return Table(columns, rows, "adds up to the nanosecond")


def bucket_bars(accounts: Mapping[str, Account]) -> Bars:
    """A bar of buckets for each of some runs; of one alone, with its figures beside it."""
    shares = {
        name: [account.job.buckets_ns[bucket] / (account.job.wall_ns or 1) for bucket in BUCKETS]
        for name, account in accounts.items()
    }
    notes = dict.fromkeys(BUCKETS, "")
    if len(accounts) == 1:
        ((name, account),) = accounts.items()
        cost = account.cost()
        for bucket, share in zip(BUCKETS, shares[name], strict=True):
            money = f", {format_number(cost[bucket])}" if cost else ""
            notes[bucket] = f"{format_percent(share)}{money}"
    useful = {name: format_percent(account.goodput) for name, account in accounts.items()}
    told = (
        f"{name}: "
        + ", ".join(f"{b} {percent(s, '.1f')}" for b, s in zip(BUCKETS, of_run, strict=True))
        for name, of_run in shares.items()
    )
    return Bars(
        [(bucket, HUES[bucket], notes[bucket]) for bucket in BUCKETS],
        [(name, of_run, f"useful: {useful[name]}") for name, of_run in shares.items()],
        ". ".join(told),
    )


def where_the_time_went(account: Account) -> Section:
    """The buckets of the job."""
    lost = account.job.lost_ns
    of = ", ".join(f"{kind} {format_number(ns / NS_PER_S)} s" for kind, ns in lost.items() if ns)
    faults = "\n\n".join((*account.clock_faults, *account.notes))
    return Section(
        "Where the time went",
        "Every nanosecond of every rank is in one bucket. Lost is what failures cost: steps done "
        "again, the time until an end was noticed, the time nobody ran, later starts and reads of "
        f"a checkpoint{f': {of}' if of else ''}.\n\n{faults}",
        bars=bucket_bars({"run": account}),
        table=account_table(account),
        folded=True,
    )


def attempts(seen: SeenRun) -> Section:
    """The lives of the run over real time."""
    rows: list[list[Cell]] = [
        [
            life["attempt"],
            life["from_step"],
            life.get("step"),
            life.get("world_size"),
            seen.how(life),
            life.get("evidence"),
        ]
        for life in seen.lives
        if "from_step" in life
    ]
    table = Table(["attempt", "from step", "to step", "ranks", "ended", "evidence"], rows, "")
    if seen.account is None:
        return Section("Attempts", "Without a ledger only their order is known.", table=table)
    account = seen.account
    ranks = _shown(account.ranks)
    begins, ends = _marks(seen, account)
    kills = [mark.attempt for mark in ends if mark.killed]
    more = f" Of {len(account.ranks)} ranks, those with the least useful time are shown."
    return Section(
        "Attempts",
        "What each rank did, when. Where something took less than the picture can show, its share "
        "of that stretch is drawn as height. Steps that were done again, and starts after a "
        "failure, count as lost; time in which the run was over is left out."
        + (more if len(ranks) < len(account.ranks) else ""),
        figure=timeline_figure(
            [timeline_row(account, seen.ledgers, rank) for rank in ranks], begins, ends
        ),
        alt=f"{len(seen.lives)} attempts of {len(ranks)} ranks over time"
        + (f"; killed: attempt {', '.join(map(str, kills))}." if kills else "; none was killed."),
        table=table,
    )


def _shown(ranks: tuple[RankAccount, ...]) -> list[RankAccount]:
    worst = sorted(ranks, key=lambda rank: rank.times.goodput or 0.0)[:_MOST_RANKS]
    return sorted(worst, key=lambda rank: rank.rank)


def _offset_ns(account: Account, rank: RankAccount) -> int:
    """From the begin of the run's first attempt to that of the rank's own first."""
    return rank.lives[0].wall_begin_ns - min(one.lives[0].wall_begin_ns for one in account.ranks)


def _marks(seen: SeenRun, account: Account) -> tuple[list[Mark], list[Mark]]:
    """When attempts began and ended, over all ranks."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for rank in account.ranks:
        offset_ns = _offset_ns(account, rank)
        for life in rank.lives:
            begin_s = (offset_ns + life.begin_ns) / NS_PER_S
            end_s = begin_s + life.lived_ns / NS_PER_S
            begins[life.attempt] = min(begin_s, begins.get(life.attempt, begin_s))
            ends[life.attempt] = max(end_s, ends.get(life.attempt, end_s))
    # A rank that was killed closed nothing; one that lives hasn't yet.
    killed = {life.attempt for rank in account.ranks for life in rank.lives if life.how is None}
    if not seen.crashed:
        killed -= {life["attempt"] for life in seen.lives[-1:] if "how" not in life}
    return (
        [Mark(at_s, number) for number, at_s in sorted(begins.items())],
        [Mark(at_s, number, number in killed) for number, at_s in sorted(ends.items())],
    )


def timeline_row(account: Account, ledgers: list[RankLedger], rank: RankAccount) -> Row:
    """One rank over time, with the buckets that its account counts."""
    ledger = next(one for one in ledgers if one.rank == rank.rank)
    offset_ns = _offset_ns(account, rank)
    begin_ns = {life.attempt: offset_ns + life.begin_ns for life in rank.lives}
    row = Row(f"rank {rank.rank}")
    most = max(_FEWEST_PIECES, _PIECES // min(_MOST_RANKS, len(account.ranks)))
    segments = timeline(ledger, ledgers, most=most)
    again = {life.attempt for life in rank.lives if life.starts_again}
    for segment in segments:
        base_ns = begin_ns[segment.attempt]
        begin_s, end_s = ((base_ns + ns) / NS_PER_S for ns in (segment.begin_ns, segment.end_ns))
        shares = _shares(segment, first=segment.attempt not in again)
        row.pieces.append((begin_s, end_s, shares))
        if segment.spent_ns[PHASES.index("checkpoint")]:
            row.saves.append(end_s)
    for life in rank.lives:
        ended_ns = offset_ns + life.begin_ns + life.lived_ns
        noticed_ns = ended_ns + life.detection_ns
        if life.detection_ns:
            row.unnoticed.append((ended_ns / NS_PER_S, noticed_ns / NS_PER_S))
        if life.down_ns:
            row.down.append((noticed_ns / NS_PER_S, (noticed_ns + life.down_ns) / NS_PER_S))
    row.stalls += _stalls(ledger, segments, begin_ns)
    return row


def _shares(segment: Segment, *, first: bool) -> dict[str, float]:
    """The buckets of a stretch, as the account counts them."""
    shares: dict[str, float] = {}
    whole = segment.spent_ns.sum()
    for phase, ns in zip(PHASES, segment.spent_ns.tolist(), strict=True):
        if ns:
            starts_again = BUCKET_OF[phase] == "startup" and not first
            bucket = "lost" if segment.redone or starts_again else BUCKET_OF[phase]
            shares[bucket] = shares.get(bucket, 0.0) + ns / whole
    return shares


def _stalls(
    ledger: RankLedger, segments: list[Segment], begin_ns: dict[int, int]
) -> list[tuple[float, float]]:
    """Begin and end (s) of the steps that took far longer than the others of their rank."""
    seconds = list(ledger.step_times())
    times = Histogram()
    for second in seconds:
        times.add(second.times.counts)
    if not times.total:
        return []
    least_ns = max(_STALL_S * NS_PER_S, _STALL_TIMES * times.quantile_ns(0.5))
    stalls = []
    for second in seconds:
        if second.longest_ns < least_ns:
            continue
        of_step = (
            one
            for one in segments
            if one.attempt == second.attempt and one.before < second.longest_step <= one.step
        )
        if segment := next(of_step, None):
            base_ns = begin_ns[segment.attempt]
            begin = max(segment.begin_ns, segment.end_ns - second.longest_ns)
            stalls.append(((base_ns + begin) / NS_PER_S, (base_ns + segment.end_ns) / NS_PER_S))
    return stalls


def step_parts(account: Account) -> list[Section]:
    """What a step of each rank is made of; nothing before the first."""
    ranks = [rank for rank in account.ranks if _steps_of(rank)]
    if not ranks:
        return []
    per_step = {
        rank.rank: [rank.times.phases_ns[phase] / _steps_of(rank) / _NS_PER_MS for phase in _PARTS]
        for rank in ranks
    }
    longest = max(sum(spent) for spent in per_step.values())
    shown = sorted(sorted(per_step, key=lambda rank: -sum(per_step[rank]))[:_MOST_RANKS])
    job = account.job
    steps = sum(map(_steps_of, ranks))
    means = {phase: job.phases_ns[phase] / steps / _NS_PER_MS for phase in _PARTS}
    whole = sum(means.values()) or 1
    bars = Bars(
        [
            (phase, hue, f"{format_percent(means[phase] / whole)}")
            for phase, hue in _PARTS.items()
            if means[phase]
        ],
        [
            (
                f"rank {rank}",
                [
                    ms / longest
                    for ms, mean in zip(per_step[rank], means.values(), strict=True)
                    if mean
                ],
                f"{format_number(sum(per_step[rank]))} ms",
            )
            for rank in shown
        ],
        "; ".join(f"{phase} {format_number(ms)} ms a step" for phase, ms in means.items()),
    )
    return [
        Section(
            "Where a step's time goes",
            f"The mean step, {format_number(whole)} ms over all ranks, without checkpoints and "
            "evaluations: the wait for its data, the transfer to the device, compute, collectives, "
            "and what nothing names.",
            bars=bars,
        )
    ]


def _steps_of(rank: RankAccount) -> int:
    return rank.times.kept_steps + rank.times.redone_steps


def step_times(ledgers: list[RankLedger]) -> list[Section]:
    """How long steps took; nothing where none was timed."""
    rows: list[list[Cell]] = []
    found: dict[str, tuple[Histogram, Histogram]] = {}
    for ledger in ledgers:
        times, own, longest = Histogram(), Histogram(), (0, 0)
        for part in ledger.step_times():
            times.add(part.times.counts)
            own.add(part.own.counts)
            longest = max(longest, (part.longest_ns, part.longest_step))
        if times.total:
            found[f"rank {ledger.rank}"] = times, own
            quantiles = [times.quantile_ns(q) / _NS_PER_MS for q in (0.5, 0.95, 0.99)]
            rows.append(
                [
                    ledger.rank,
                    *(
                        float(np.format_float_positional(ms, 4, fractional=False))
                        for ms in quantiles
                    ),
                    round(own.quantile_ns(0.5) / _NS_PER_MS, 3),
                    round(longest[0] / _NS_PER_MS, 3),
                    longest[1],
                ]
            )
    if not found:
        return []
    columns = ["rank", "median ms", "95 % ms", "99 % ms", "own median ms", "longest ms", "at step"]
    slowest = sorted(found, key=lambda name: -found[name][0].quantile_ns(0.5))[:_MOST_RANKS]
    return [
        Section(
            "How long steps took",
            "The distribution of all steps of each rank, without checkpoints and evaluations. A "
            "rank's own work is data, transfer and compute, without waiting for others.",
            figure=step_times_figure({name: one for name, one in found.items() if name in slowest}),
            alt="Distributions of the times of steps: "
            + "; ".join(f"rank {row[0]} median {row[1]} ms, 99 % {row[3]} ms" for row in rows[:8]),
            table=Table(columns, rows, ""),
        )
    ]
