"""A ledger as it is read: attempts, and their spans cleaned and checked.

Covers what holds for one rank alone: lines that were written twice are left out and counted, and
the spans of an attempt must follow each other and add up, to the nanosecond. Does not cover what
the time was worth.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapeline.errors import LedgerError
from tapeline.files import read_journal
from tapeline.ledger.heartbeat import read_heartbeat
from tapeline.ledger.histogram import Histogram
from tapeline.ledger.lines import ATTEMPT, END, FIELDS, PARTIAL, SPENT, STEP, read_spans
from tapeline.ledger.tail import inferred_line, last_written
from tapeline.session import Int64Array

_CHUNK_BYTES = 1 << 20
_STEPS = b'{"steps"'


@dataclass(frozen=True, slots=True)
class Begin:
    """How an attempt of one rank began: its line in the ledger."""

    attempt: int
    world_size: int
    from_step: int
    wall_ns: int
    monotonic_ns: int
    boot: str | None


@dataclass(frozen=True, slots=True)
class Close:
    """How it ended, if it came to say so: its line in the ledger."""

    end_ns: int
    wall_ns: int
    how: str
    failed_writes: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive spans of one attempt.

    Attributes:
        attempt: which.
        begins_ns, ends_ns: `[spans]`, since the attempt began.
        before, steps: `[spans]`, steps done at the begin and at the end.
        rows: `[spans, FIELDS]`.
    """

    attempt: int
    begins_ns: Int64Array
    ends_ns: Int64Array
    before: Int64Array
    steps: Int64Array
    rows: Int64Array

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def spent_ns(self) -> Int64Array:
        """`[spans, PHASES]`."""
        return self.rows[:, SPENT]

    @property
    def reached(self) -> Int64Array:
        """`[spans]`, the step that each span's last moment was spent on."""
        return self.steps + self.rows[:, PARTIAL]


@dataclass(slots=True)
class RankLedger:
    """The ledger of one rank on disk, as it was when it was opened.

    Attributes:
        path: the file.
        rank: whose.
        begins: of each attempt, in order.
        closes: by attempt; a killed one has none.
        size: bytes of whole lines.
        inferred: spans known from the heartbeat alone.
        duplicates: lines that were there twice; counted by `spans`.
    """

    path: Path
    rank: int
    begins: tuple[Begin, ...]
    closes: dict[int, Close]
    size: int
    inferred: tuple[dict[str, Any], ...] = ()
    duplicates: int = field(default=0, init=False)

    def spans(self) -> Iterator[Spans]:
        """All spans, in order, in pieces of bounded size.

        Raises:
            LedgerError: they don't add up, or belong to no attempt.
        """
        self.duplicates = 0
        begins = {begin.attempt: begin for begin in self.begins}
        attempt = end_ns = step = 0
        for table in self._tables():
            cuts = np.flatnonzero(np.diff(table[:, ATTEMPT])) + 1
            for rows in np.split(table, cuts) if len(cuts) else [table]:
                found = int(rows[0, ATTEMPT])
                if found not in begins:
                    raise self._wrong(found, "the line in which the attempt begins", "none")
                if found > attempt:
                    attempt, end_ns, step = found, 0, begins[found].from_step
                spans = self._checked(rows, attempt, end_ns, step)
                self.duplicates += len(rows) - len(spans)
                if len(spans):
                    end_ns, step = int(spans.ends_ns[-1]), int(spans.steps[-1])
                    yield spans

    def step_times(self) -> Iterator[StepTimes]:
        """Distributions of the times of steps, about one a second of training."""
        for begin, line in _lines_with(self.path, self.size, _STEPS):
            if begin:
                yield _step_times(line)

    def _tables(self) -> Iterator[Int64Array]:
        for table in read_spans(self.path, self.size):
            if len(table):
                yield table
        if self.inferred:
            rows = [[line.get(name, 0) for name in FIELDS] for line in self.inferred]
            yield np.array(rows, np.int64)

    def _checked(self, rows: Int64Array, attempt: int, end_ns: int, step: int) -> Spans:
        ends_ns = rows[:, END]
        known = np.maximum.accumulate(np.concatenate(([end_ns], ends_ns[:-1])))
        fresh = (ends_ns > known) & (rows[:, ATTEMPT] == attempt)
        if not fresh.all():
            rows = rows[fresh]
        ends_ns, steps = rows[:, END], rows[:, STEP]
        begins_ns = np.concatenate(([end_ns], ends_ns))[: len(rows)]
        before = np.concatenate(([step], steps))[: len(rows)]
        spent_ns, passed_ns = rows[:, SPENT].sum(axis=1), ends_ns - begins_ns
        if (bad := spent_ns != passed_ns).any():
            row = int(np.argmax(bad))
            raise self._wrong(
                attempt,
                f"phases that add up to {passed_ns[row]} ns in the span that ends at step "
                f"{steps[row]}",
                f"{spent_ns[row]} ns",
            )
        if (bad := steps < before).any():
            row = int(np.argmax(bad))
            raise self._wrong(
                attempt, "steps that grow", f"step {steps[row]} after step {before[row]}"
            )
        return Spans(attempt, begins_ns, ends_ns, before, steps, rows)

    def _wrong(self, attempt: int, expected: str, found: str) -> LedgerError:
        return LedgerError(
            f"{self.path}, attempt {attempt}",
            expected=expected,
            found=found,
            fix="Restore the file from a copy; it was changed, or two processes wrote it at once",
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps took, over about a second of training.

    Attributes:
        attempt: which.
        step, end_ns: where the second ended: steps done, and time since the attempt began.
        times: from the end of one step to that of the next, without checkpoints and evaluations.
        own: of it, the rank's own work: data, transfer and compute, without waiting for others
            ("communication") and without "other".
        longest_step, longest_ns: the slowest of them.
    """

    attempt: int
    step: int
    end_ns: int
    times: Histogram
    own: Histogram
    longest_step: int
    longest_ns: int


def step_times_after(path: Path, start: int) -> tuple[list[StepTimes], int]:
    """What was added to `RankLedger.step_times` since a look before, without reading all again.

    Args:
        path: of the ledger; it need not be there yet.
        start: bytes of it that were read before.

    Returns:
        The distributions, and where the next look starts. Lines that are no records are passed
        over: whoever watches a run is not stopped by them.
    """
    if not path.exists():
        return [], start
    size, found = _whole_lines(path), []
    for begin, line in _lines_with(path, size, _STEPS, start):
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            if begin:
                found.append(_step_times(line))
    return found, max(start, size)


def _step_times(line: bytes) -> StepTimes:
    record = json.loads(line)
    return StepTimes(
        attempt=record["steps"],
        step=record["step"],
        end_ns=record["end"],
        times=_histogram(record["times"]),
        own=_histogram(record["own"]),
        longest_step=record["longest"][0],
        longest_ns=record["longest"][1],
    )


def _histogram(pairs: list[int]) -> Histogram:
    return Histogram(dict(zip(pairs[::2], pairs[1::2], strict=True)))


def read_ledger(path: Path, heartbeat: Path | None = None) -> RankLedger:
    """Open the ledger of one rank, of a live run or a dead one.

    Args:
        path: the file.
        heartbeat: of the same rank: what a killed attempt did after its last line.

    Raises:
        LedgerError: it can't be read, or lines are no records of a ledger.
    """
    try:
        size = _whole_lines(path)
        last = last_written(path)
        found = [json.loads(line) for _, line in _lines_with(path, size, b'"wall_ns"')]
        begins = tuple(_begin(record) for record in found if "begin" in record)
        closes = {record["close"]: _close(record) for record in found if "close" in record}
        rank = next(record["rank"] for record in found if "begin" in record)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except StopIteration:
        raise _unreadable(path, "a file in which no attempt begins") from None
    except (ValueError, KeyError, TypeError):
        raise _unreadable(path, "a damaged line") from None
    distinct = {begin.attempt: begin for begin in reversed(begins)}
    beat = read_heartbeat(heartbeat) if heartbeat else None
    return RankLedger(
        path,
        rank,
        tuple(distinct[number] for number in sorted(distinct)),
        closes,
        size,
        tuple(inferred_line(last, beat)),
    )


def read_ledgers(run_folder: Path | str) -> list[RankLedger]:
    """Open the ledgers of all ranks of a run, by rank.

    Raises:
        LedgerError: there is none, or one can't be read.
    """
    folder = Path(run_folder)
    paths = sorted((folder / "ledger").glob("rank-*.jsonl"))
    if not paths:
        raise _unreadable(folder / "ledger", "no ledger of any rank")
    ledgers = [read_ledger(path, folder / "heartbeat" / path.stem) for path in paths]
    return sorted(ledgers, key=lambda ledger: ledger.rank)


def _unreadable(path: Path, found: str) -> LedgerError:
    return LedgerError(
        path,
        expected="a ledger, as `tapeline train` or `Ledger` writes it",
        found=found,
        fix="Give the folder of a run that keeps one",
    )


def _begin(record: dict[str, Any]) -> Begin:
    names = ("world_size", "from_step", "wall_ns", "monotonic_ns", "boot")
    return Begin(record["begin"], *(record[name] for name in names))


def _close(record: dict[str, Any]) -> Close:
    return Close(record["end"], record["wall_ns"], record["how"], record["failed_writes"])


def _whole_lines(path: Path) -> int:
    """Bytes up to and including the last newline."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        while size:
            start = max(0, size - _CHUNK_BYTES)
            stream.seek(start)
            newline = stream.read(size - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            size = start
    return 0


def _lines_with(
    path: Path, size: int, token: bytes, start: int = 0
) -> Iterator[tuple[bool, bytes]]:
    """Lines in bytes `start` to `size` that hold a token, and whether they begin with it."""
    rest, read = b"", start
    with path.open("rb") as stream:
        stream.seek(start)
        while read < size and (chunk := stream.read(min(_CHUNK_BYTES, size - read))):
            read += len(chunk)
            whole, newline, chunk_rest = (rest + chunk).rpartition(b"\n")
            lines, rest = whole + newline, chunk_rest
            at = lines.find(token)
            while at >= 0:
                begin, end = lines.rfind(b"\n", 0, at) + 1, lines.index(b"\n", at)
                yield begin == at, lines[begin:end]
                at = lines.find(token, end)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is known of an attempt beside its ledgers: its lines in `attempts.jsonl`.

    Attributes:
        number: which.
        from_step: where it began.
        how: how it ended; None while it lives, or if nobody saw it end.
        ended_wall_ns: when that was noticed.
    """

    number: int
    from_step: int
    how: str | None = None
    ended_wall_ns: int | None = None


def read_attempts(run_folder: Path | str) -> list[Attempt]:
    """The attempts of a run; empty where nobody keeps them."""
    lives: dict[int, dict[str, Any]] = {}
    for line in read_journal(Path(run_folder) / "attempts.jsonl"):
        lives.setdefault(line["attempt"], {}).update(line)
    return [
        Attempt(
            number,
            life["from_step"],
            life.get("how"),
            _wall_ns(life["ended"]) if "ended" in life else None,
        )
        for number, life in sorted(lives.items())
        if "from_step" in life  # else it ended before it began to train
    ]


def _wall_ns(text: str) -> int:
    """The inverse of `clock.utc`, to the nanosecond."""
    seconds = np.datetime64(text.removesuffix("Z"), "ns")
    return int(seconds.astype(np.int64))
