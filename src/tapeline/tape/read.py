"""From market data files to sessions.

Covers which reader a file gets, the cut into sessions, and the account of it all. Does not cover
formats (`readers`), the order of times (`timeline`), the rules of sessions (`sessions`) or rows
(`grid`).

Memory is bounded by a block, the resting orders of a book, and the rows of one session.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.tape.blocks import Block, BookStates, OrderEvents, TableRows
from tapeline.tape.grid import GridOptions, Policy, Rows, book_columns, made_by
from tapeline.tape.readers import READERS
from tapeline.tape.readers.base import Head, Reader, Source, joined
from tapeline.tape.readers.text import Progress, printable, refuse_foreign
from tapeline.tape.replay import LevelReplay, OrderReplay, Replay
from tapeline.tape.report import Counts, EvictedOrder, TapeReport, listed
from tapeline.tape.sessions import Sessions, Span
from tapeline.tape.states import StateGrid
from tapeline.tape.timeline import Timeline
from tapeline.words import percent

Paths = Path | str | Sequence[Path | str]


def detect(path: Path | str) -> type[Reader]:
    """The reader that recognises a file by its content.

    Raises:
        TapeError: none does, or the file is missing, empty, damaged, or packed or written as none
            reads it.
    """
    head = Head.of(Path(path))
    found = [reader for reader in READERS.values() if reader.recognises(head)]
    found = [reader for reader in found if not reader.is_general] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise TapeError(
            path,
            expected="a file of one format",
            found=f"one that may be {joined([reader.name for reader in found])}",
            fix="Say which, with format (`--reader NAME`)",
        )
    refuse_foreign(head.text, Path(path))
    shown = printable(head.lines[0], 60) if head.text.isascii() else head.raw[:8].hex(" ")
    raise TapeError(
        path,
        expected="; ".join(f"{reader.name} ({reader.looks_for})" for reader in READERS.values()),
        found=f"none of them, but a file that begins with `{shown}`",
        fix="Pin format (`--reader NAME`) if it is one of these; of a CSV whose time column has "
        "another name, say which (`--reader table --set options.time=NAME`)",
    )


class Tape:
    """One reading of files that continue each other: iterate over it once, then ask `report`."""

    def __init__(
        self,
        reader: Reader,
        instrument: str | None,
        sessions: Sessions,
        grid: GridOptions,
        policy: Policy,
    ) -> None:
        self.reader = reader
        self._instrument = instrument
        self._sessions = sessions
        self._grid = grid
        self._policy = policy
        self._counts = reader.source.counts
        self._sink: StateGrid | Replay | None = None
        self._rows: Rows | None = None
        self._span: Span | None = None
        self._seen: set[tuple[str, int]] = set()
        self._has_begun = False
        self._timeline = Timeline(reader.source)
        self._last_in_span_ns = 0
        self._made: dict[str, str] = {}
        self._report: TapeReport | None = None

    @property
    def instrument(self) -> str:
        """The name in the sessions' keys: as given, as the files say, or from the first's name."""
        name = self._instrument or self.reader.instrument()
        return name or self.reader.source.paths[0].name.split(".")[0]

    @property
    def counts(self) -> Counts:
        """What is counted, as it grows."""
        return self._counts

    @property
    def report(self) -> TapeReport:
        """The account, once all sessions have been taken."""
        assert self._report is not None, "iterate over the tape first"
        return self._report

    def __iter__(self) -> Iterator[Session]:
        """The sessions, in order, each as soon as it is over.

        Raises:
            TapeError: a file can't be read as what it claims to be, or gives no valid row.
        """
        num_sessions = 0
        for session in self._all():
            num_sessions += 1
            yield session
        if self._counts.rows == self._counts.rows_marked:
            raise self._no_valid_row()
        self._report = self._account(num_sessions)

    def _no_valid_row(self) -> TapeError:
        counts = self._counts
        if not self._has_begun and not counts.lines_read:
            return TapeError(
                self.reader.source.paths[0],
                expected="data for one valid row or more",
                found="no record",
                fix="Check that there is more to it than a header",
            )
        found = f"{counts.lines_read:,} records, {counts.outside:,} events outside every session "
        found += f"and {counts.rows:,} rows, none of them valid{listed(counts.marked())}"
        if counts.creates_repeated:
            found += f"; {counts.creates_repeated:,} orders were created under an id in use"
        return TapeError(
            self.reader.source.paths[0],
            expected="data for one valid row or more",
            found=found,
            fix="Check the file and the sessions, or lower step_ns (`--set step_s=…`)",
        )

    def _all(self) -> Iterator[Session]:
        for block in self._timeline.settle(self._blocks()):
            if self._sink is None:
                self._sink = self._sink_for(block)
            bar_ns = block.bar_ns if isinstance(block, TableRows) else 0
            for start, stop, span in self._sessions.cut(block.times_ns - bar_ns):
                if not self._has_begun or span != self._span:
                    yield from self._close(is_tape_over=False)
                    self._open(block, span)
                self._add(block.take(slice(start, stop)), span)
        yield from self._close(is_tape_over=True)
        if isinstance(self._sink, Replay):
            self._sink.finish()

    def _blocks(self) -> Iterator[Block]:
        """The reader's, and what is wrong with their times before the order of them is judged."""
        yield from self.reader.blocks()
        counts, share = self._counts, self._policy.max_unclear_share
        num_unclear = counts.times_skipped + counts.times_repeated
        if num_unclear > share * counts.lines_read:
            raise TapeError(
                joined([str(path) for path in self.reader.source.paths], "and"),
                expected=f"at most {percent(share, '.4f')} of the local times in an hour that "
                "daylight saving skips or repeats",
                found=f"{counts.times_skipped:,} in one skipped and {counts.times_repeated:,} in "
                f"one repeated, of {counts.lines_read:,}",
                fix="Check the zone, or write the times in UTC or with their offset; or raise "
                "max_unclear_share (`--set max_unclear_share=…`) if the first moment after and the "
                "earlier of the two will do",
            )

    def _sink_for(self, block: Block) -> StateGrid | Replay:
        if isinstance(block, BookStates | TableRows):
            return StateGrid(self._grid, self._policy, self._counts)
        if self._grid.step_ns is None:
            raise TapeError(
                "step_ns",
                expected="a step, for a book rebuilt from events",
                found="none",
                fix="Give nanoseconds between rows (`--set step_s=0.5`)",
            )
        kind = OrderReplay if isinstance(block, OrderEvents) else LevelReplay
        return kind(self._grid, self._policy, self._counts)

    def _open(self, block: Block, span: Span | None) -> None:
        self._has_begun, self._span, self._rows = True, span, None
        if span is not None:
            if span[:2] in self._seen:
                raise TapeError(
                    f"session {span.date}, segment {span.segment}",
                    expected="one session of that date and segment",
                    found="a second one, of a weekend moved to the same trade date",
                    fix="Let weekends be trade dates (`--set weekends=true`), or leave their data "
                    "out",
                )
            self._seen.add(span[:2])
            columns = book_columns(self._grid.depth)
            if isinstance(block, TableRows):
                columns, span = block.columns, _shown_in(span, block.bar_ns, self._grid.step_ns)
            self._rows = Rows(span, columns, self._grid, self._counts)
            self._made = made_by(self._grid, None if isinstance(block, TableRows) else self._policy)
            if isinstance(block, TableRows) and block.bar_ns:
                self._made["bar_s"] = f"{block.bar_ns / 1e9:.9g}"
        assert self._sink is not None
        self._sink.open(self._rows)

    def _add(self, part: Block, span: Span | None) -> None:
        times_ns, counts = part.times_ns, self._counts
        self._last_in_span_ns = int(times_ns[-1])
        if span is None:
            counts.outside += len(times_ns)
            if counts.outside_first_ns is None:
                counts.outside_first_ns = int(times_ns[0])
            counts.outside_last_ns = int(times_ns[-1])
        if isinstance(self._sink, Replay):
            self._sink.apply(part)  # outside a session the book changes too
        elif span is not None:
            assert self._sink is not None
            assert isinstance(part, BookStates | TableRows)
            self._sink.add(part)

    def _close(self, *, is_tape_over: bool) -> Iterator[Session]:
        rows, last_ns = self._rows, self._last_in_span_ns
        until_ns = last_ns if rows is None else rows.until(last_ns, is_tape_over)
        if self._sink is not None:
            self._sink.close(until_ns)
        if rows is not None:
            session = rows.finish(self.instrument, is_tape_over)
            if session is not None:
                yield dataclasses.replace(session, made=self._made)

    def _account(self, num_sessions: int) -> TapeReport:
        source = self.reader.source
        evicted: list[EvictedOrder] = self._sink.evicted if isinstance(self._sink, Replay) else []
        return TapeReport(
            source=joined([str(path) for path in source.paths], "and"),
            format=self.reader.name,
            instrument=self.instrument,
            detected=self.reader.detected(),
            first_ns=self._timeline.first_ns,
            last_ns=self._timeline.last_ns,
            num_sessions=num_sessions,
            counts=self._counts,
            first_unreadable=source.first_unreadable,
            evicted=tuple(evicted),
        )


def _shown_in(span: Span, bar_ns: int, step_ns: int | None) -> Span:
    """Where the rows of a span lie: its bars are known after its start, the last at its end."""
    if not bar_ns or step_ns is None or not span.whole:
        return span
    return span._replace(start_ns=span.start_ns + step_ns, end_ns=span.end_ns + 1)


def read_tape(
    paths: Paths,
    *,
    format: str | None = None,  # noqa: A002  # what users call it
    instrument: str | None = None,
    sessions: Sessions | None = None,
    grid: GridOptions | None = None,
    policy: Policy | None = None,
    options: Mapping[str, Any] | None = None,
    max_unreadable_share: float = 0.001,
    max_lifted_share: float = 0.01,
    progress: Progress | None = None,
) -> Tape:
    """Read market data files as sessions of rows on a grid, without look-ahead.

    Args:
        paths: a file, or several that continue each other, in order.
        format: name of a reader; recognised by content if None.
        instrument: name in the sessions' keys; if None, as the files say, or the file's name.
        sessions: where sessions begin and end; by default by UTC day.
        grid: which instants get a row, and its columns; the format's own default if None.
        policy: rows of a book that shows no market; the format's own default if None.
        options: of the reader: what it would detect, or can't know.
        max_unreadable_share: largest share of lines that may be left out.
        max_lifted_share: largest share of events that may be out of the order of time: taken as of
            a later time already reached, or left out as far ahead of both their neighbours.
        progress: called with the bytes read and the bytes of the file.

    Returns:
        An iterator of sessions, one at a time; afterwards its `report` tells what became of
        everything.

    Raises:
        TapeError: a file isn't recognised, or an option is wrong. Reading raises more.
    """
    given = [paths] if isinstance(paths, Path | str) else list(paths)
    if not given:
        raise TapeError("paths", expected="one file or more", found="none", fix="Give a path")
    files = [Path(path) for path in given]
    kinds = [detect(file) for file in files] if format is None else [reader_named(format)]
    if other := next((n for n, kind in enumerate(kinds) if kind is not kinds[0]), None):
        raise TapeError(
            files[other],
            expected=f"{kinds[0].name}, as {files[0]} is",
            found=kinds[other].name,
            fix="Read files of different formats one by one",
        )
    kind = kinds[0]
    source = Source(
        files, Counts(), max_unreadable_share, progress, max_lifted_share=max_lifted_share
    )
    return Tape(
        kind(source, _options(kind, options or {})),
        instrument,
        sessions or kind.sessions(),
        grid or kind.grid,
        policy or kind.policy,
    )


def read_orders(
    path: Path | str,
    *,
    instrument: str,
    sessions: Sessions | None = None,
    grid: GridOptions | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[list[Session], TapeReport]:
    """All sessions of an order-by-order CSV file, and the account of its lines.

    `read_tape(path, format="orders", …)` gives them one at a time; the arguments are the same.

    Raises:
        TapeError: the file can't be read as what it claims to be, or gives no valid row.
    """
    shares = {
        name: options.pop(name)
        for name in ("max_unreadable_share", "max_lifted_share")
        if name in options
    }
    tape = read_tape(
        path,
        format="orders",
        instrument=instrument,
        sessions=sessions,
        grid=grid,
        policy=policy,
        options=options,
        progress=progress,
        **shares,
    )
    return list(tape), tape.report


def reader_named(name: str) -> type[Reader]:
    """The reader of that name.

    Raises:
        TapeError: there is none; the nearest is named.
    """
    if name in READERS:
        return READERS[name]
    nearest = difflib.get_close_matches(name, READERS, n=1)
    raise TapeError(
        "format",
        expected=joined(list(READERS)),
        found=repr(name),
        fix=f"Write {nearest[0]}, the nearest" if nearest else "Give one of them, or none",
    )


def _options(kind: type[Reader], given: Mapping[str, Any]) -> Any:
    names = [field.name for field in dataclasses.fields(kind.Options)]
    for name in given:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1)
            raise TapeError(
                f"options of {kind.name}",
                expected=joined(names) if names else "none",
                found=name,
                fix=f"Write {nearest[0]}, the nearest" if nearest else "Leave it out",
            )
    return kind.Options(**given)
