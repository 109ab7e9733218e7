"""The index: which windows there are, in memory that grows with sessions, not with rows.

Covers counting, finding, and splitting in time. Split and purge act here, before any order
exists: shuffling first and splitting afterwards would leak. Which columns are targets is the
batches' matter; which targets exist is told here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from tapeline.errors import WindowError
from tapeline.session import BoolArray, Int64Array
from tapeline.store import Shards
from tapeline.windows.audit import Audit, nothing_lost
from tapeline.windows.blocks import Blocks, Part, last_at_or_before, per_session
from tapeline.windows.rows import (
    Chosen,
    RowPolicy,
    Runs,
    Stages,
    chosen_sessions,
    usable_runs,
    whole,
)
from tapeline.windows.split import Timeline, Until, consecutive_parts, rolling_parts, timeline_of

__all__ = ["WindowIndex", "whole"]

Targets = Literal["all", "any"]
_DEFAULT = RowPolicy()


class WindowIndex:
    """The windows of a store, as blocks of evenly spaced starts.

    A run of `n` rows that follow each other holds `max(0, n − T − horizon + 1)` windows at stride
    1 (formulas.md, section 7). A session is one run, or several where rows are marked invalid or
    missing.

    Args:
        shards: the store.
        T: rows in a window.
        horizons: rows from a window's last row to its target's; one, or several, in the order
            that targets are wanted in.
        stride: rows from one window's start to the next one's, counted anew in each run.
        sessions: which sessions: numbers, a predicate on `SessionKey`, or None for all. `select`
            gives the numbers by instrument and date. Sessions keep their numbers.
        targets: "all" for windows whose target exists at every horizon, "any" for those that have
            one at the shortest; `missing` then tells which haven't got the others.
        policy: which rows may follow each other.

    Raises:
        WindowError: T, a horizon or the stride below 1, sessions that aren't there, rows that the
            policy refuses, or no run is long enough for one window.
    """

    def __init__(
        self,
        shards: Shards,
        T: int = 20,
        horizons: int | Sequence[int] = 10,
        stride: int = 1,
        *,
        sessions: Chosen = None,
        targets: Targets = "all",
        policy: RowPolicy = _DEFAULT,
    ) -> None:
        self._set_shape(T, horizons, stride, targets)
        self._shards: Shards | None = shards
        self.policy = policy
        stages = usable_runs(shards, chosen_sessions(shards, sessions), policy)
        self._build(shards.lengths, stages)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int] | npt.ArrayLike,
        T: int = 20,
        horizons: int | Sequence[int] = 10,
        stride: int = 1,
        targets: Targets = "all",
    ) -> WindowIndex:
        """The index of sessions of which only the numbers of rows are known: no times, no marks."""
        rows = np.asarray(lengths)
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size) or (rows < 0).any():
            raise WindowError(
                "lengths",
                expected="one non-negative whole number of rows per session",
                found=f"{rows.dtype} of shape {list(rows.shape)}, {_short(lengths)}",
                fix="Pass `Shards.lengths`, or a list of whole numbers",
            )
        index = cls.__new__(cls)
        index._set_shape(T, horizons, stride, targets)
        index._shards, index.policy = None, _DEFAULT
        rows = rows.astype(np.int64)
        runs = Runs(np.arange(len(rows)), np.zeros_like(rows), rows)
        index._build(rows, Stages(runs, runs, runs, runs))
        return index

    def _set_shape(
        self, T: int, horizons: int | Sequence[int], stride: int, targets: Targets
    ) -> None:
        self.T, self.stride, self.targets = whole("T", T), whole("stride", stride), targets
        several = np.atleast_1d(np.asarray(horizons)).tolist()
        self.horizons: tuple[int, ...] = tuple(whole("horizon", h) for h in several)
        if not several or len(set(several)) < len(several):
            raise WindowError(
                "horizons",
                expected="one or more, each once",
                found=str(several),
                fix="Name each horizon once",
            )
        if targets not in get_args(Targets):
            raise WindowError(
                f"targets={targets!r}",
                expected=f"one of {', '.join(get_args(Targets))}",
                found="another name",
                fix="Ask for windows with all of their targets, or with any",
            )

    def _build(self, lengths: Int64Array, stages: Stages) -> None:
        self._lengths = lengths
        self._lost = nothing_lost(len(lengths))
        self._lost["not_selected"] += lengths
        chosen = stages.chosen.sessions
        rows = lengths[chosen]
        enough = rows >= self._reach
        self._lost["not_selected"][chosen] = 0
        self._lost["too_short"][chosen] = np.where(enough, 0, rows)
        self._lost["window_tail"][chosen] = np.where(enough, self.T - 1, 0)
        self._lost["horizon_tail"][chosen] = np.where(enough, self._reach - self.T, 0)
        counts = [per_session(runs.sessions, self._fitting(runs), len(lengths)) for runs in stages]
        for reason, before, after in zip(
            ("invalid_rows", "stale_rows", "gap"), counts[:-1], counts[1:], strict=True
        ):
            self._lost[reason] += before - after
        runs = stages.joined
        strided = -(-self._fitting(runs) // self.stride)
        self._blocks = Blocks(*runs[:2], strided, runs.stops, self.stride, self._reach)
        self._lost["stride"] += counts[-1] - self._per_session(self.counts)
        if not self.num_windows:
            longest = max((runs.stops - runs.starts).tolist(), default=0)
            raise WindowError(
                f"windows of {self.T} rows with a target {self._reach - self.T} later",
                expected=f"a session with at least {self._reach} valid rows in sequence",
                found=f"{longest} in the longest of {len(chosen)}",
                fix="Shorten T or horizon, or give longer sessions",
            )

    def _fitting(self, runs: Runs) -> Int64Array:
        """Windows of each run at stride 1, int64 `[runs]`."""
        fitting: Int64Array = np.maximum(runs.stops - runs.starts - self._reach + 1, 0)
        return fitting

    def _per_session(self, counts: Int64Array) -> Int64Array:
        return per_session(self.sessions, counts, len(self._lengths))

    @property
    def sessions(self) -> Int64Array:
        """The session of each block, int64 `[blocks]`."""
        return self._blocks.sessions

    @property
    def firsts(self) -> Int64Array:
        """The first start of each block, int64 `[blocks]`."""
        return self._blocks.firsts

    @property
    def counts(self) -> Int64Array:
        """The windows of each block, int64 `[blocks]`: at rows `first + k · stride`."""
        return self._blocks.counts

    @property
    def horizon(self) -> int:
        """The largest of the horizons."""
        return max(self.horizons)

    @property
    def span(self) -> int:
        """Rows from a window's first to its last target's, both included: T + horizon."""
        return self.T + self.horizon

    @property
    def _reach(self) -> int:
        """Rows from a window's first to the last one that must exist."""
        return self.T + (self.horizon if self.targets == "all" else min(self.horizons))

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return self._blocks.num_windows

    def locate(self, windows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where windows are.

        Args:
            windows: int64 `[n]`, each in 0…num_windows−1.

        Returns:
            Their sessions and first rows, int64 `[n]` each.
        """
        return self._blocks.locate(windows)

    def missing(self, sessions: Int64Array, starts: Int64Array) -> BoolArray:
        """Which targets don't exist: behind the end of the run, or of the part of a split.

        Args:
            sessions, starts: int64 `[n]`, windows of this index.

        Returns:
            bool `[n, horizons]`; nowhere True where targets are "all".
        """
        block = last_at_or_before(self.sessions, self.firsts, sessions, starts)
        rows = starts[:, None] + (self.T + np.array(self.horizons))
        missing: BoolArray = rows > self._blocks.stops[block][:, None]
        return missing

    @property
    def num_input_rows(self) -> int:
        """Rows that some window reads as input."""
        return int(self._input_rows().sum())

    def _input_rows(self) -> Int64Array:
        return (self.counts - 1) * min(self.stride, self.T) + self.T

    def input_rows(self, most: int) -> Iterator[tuple[int, slice | Int64Array]]:
        """The rows that some window reads as input, each once, as (session, rows).

        Args:
            most: rows at a time; a window apart from others comes whole.
        """
        # Blocks never share an input row: each ends a horizon before its run or part does.
        blocks = zip(
            self.sessions.tolist(), self.firsts.tolist(), self.counts.tolist(), strict=True
        )
        for session, first, count in blocks:
            if self.stride <= self.T:
                stop = first + (count - 1) * self.stride + self.T
                for low in range(first, stop, most):
                    yield session, slice(low, min(low + most, stop))
                continue
            at_once = -(-most // self.T)
            for k in range(0, count, at_once):
                starts = first + self.stride * np.arange(k, min(k + at_once, count))
                yield session, (starts[:, None] + np.arange(self.T)).ravel()

    def audit(self) -> Audit:
        """How many windows each session has, and why its other rows start none.

        The parts of a split are audited one by one: a window that crosses a cut is lost to the
        parts on both sides.
        """
        keys = range(len(self._lengths)) if self._shards is None else self._shards.keys
        return Audit(
            sessions=tuple(map(str, keys)),
            rows=self._lengths,
            windows=self._per_session(self.counts),
            rows_read=self._per_session(self._input_rows()),
            lost=self._lost,
        )

    def split(
        self,
        *,
        train: Until,
        validation: Until | None = None,
        test: Until | None = None,
        embargo_ns: int = 0,
        embargo_rows: int = 0,
    ) -> dict[str, WindowIndex]:
        """Cut in time, into parts that follow each other.

        The cut is one instant for all sessions (where the store has no times, one row in store
        order). A window belongs to a part only if its whole span, from the first input row to the
        last target's row, lies there; with targets "any", targets behind the cut are missing.

        Args:
            train, validation, test: where each part ends: after a share of all chosen sessions'
                rows (a float), before an instant (of a form in `to_instant`), or "rest". It
                starts where the one before ends.
            embargo_ns: how long after a part's end the next one starts; for stores with times.
            embargo_rows: the same in rows; for stores without times.

        Returns:
            The index of each part that was asked for, by its name, in the order of time.

        Raises:
            WindowError: ends out of order or of the wrong kind, or a part without a window.
        """
        asked = {"train": train, "validation": validation, "test": test}
        ends = {name: until for name, until in asked.items() if until is not None}
        timeline = self._timeline(embargo_ns, embargo_rows)
        parts = consecutive_parts(timeline, ends)
        return {name: self._part(name, part) for name, part in parts.items()}

    def walk_forward(
        self,
        folds: int,
        *,
        train_parts: int | None = None,
        embargo_ns: int = 0,
        embargo_rows: int = 0,
    ) -> list[dict[str, WindowIndex]]:
        """Train on what was, validate on what came next, again and again.

        All chosen sessions' rows are divided in time into equal parts. Each fold validates on one,
        the next fold on the next one, and trains on those right before it.

        Args:
            folds: how many.
            train_parts: parts to train on, a window that rolls; None for all before, at least one.
            embargo_ns, embargo_rows: as in `split`.

        Returns:
            For each fold, the index of "train" and of "validation".

        Raises:
            WindowError: `folds` or `train_parts` below 1, or a part without a window.
        """
        timeline = self._timeline(embargo_ns, embargo_rows)
        return [
            {
                "train": self._part(f"train, fold {fold}", train),
                "validation": self._part(f"validation, fold {fold}", after),
            }
            for fold, (train, after) in enumerate(rolling_parts(timeline, folds, train_parts))
        ]

    def _timeline(self, embargo_ns: int, embargo_rows: int) -> Timeline:
        selected = self._lengths - self._lost["not_selected"]
        return timeline_of(self._shards, selected, embargo_ns, embargo_rows)

    def _part(self, name: str, part: Part) -> WindowIndex:
        """The windows whose whole span lies in a part."""
        index = copy.copy(self)
        index._blocks, lost = self._blocks.within(part)
        index._lost = self._lost | {
            reason: self._lost[reason] + self._per_session(counts)
            for reason, counts in lost.items()
        }
        if not index.num_windows:
            raise WindowError(
                f"split, {name}",
                expected=f"at least one window of {self._reach} rows, its target included",
                found=f"none in {int((part.highs - part.lows).clip(0).sum()):,} rows",
                fix="Move the cut, shorten the windows or the embargo, or give more data",
            )
        return index

    def check_within(self, shards: Shards) -> None:
        """Raise unless each of these windows, targets included, is usable rows of one session.

        An index made from lengths alone knows nothing of rows that are marked invalid or missing.

        Raises:
            WindowError: a window isn't there; names the first.
        """
        if shards is self._shards:
            return
        known = self.sessions < len(shards)
        chosen = np.zeros(len(shards), np.bool_)
        chosen[self.sessions[known]] = True
        runs = usable_runs(shards, chosen, self.policy).joined
        lasts = self._blocks.lasts
        stops = self._blocks.stops if self.targets == "any" else lasts + self._reach
        run = last_at_or_before(runs.sessions, runs.starts, self.sessions, self.firsts)
        wrong = run < 0
        if len(runs.sessions):
            wrong |= (runs.sessions[run] != self.sessions) | (stops > runs.stops[run])
        if wrong.any():
            b = int(np.argmax(wrong))
            raise WindowError(
                f"windows of session {self.sessions[b]}",
                expected=f"{self.span} valid rows of the store for each",
                found=f"starts {self.firsts[b]} to {lasts[b]}, "
                "some outside the session, on rows marked invalid or across a gap",
                fix="Make the sampler from `WindowIndex(shards, T, horizon)` of this store",
            )

    def fingerprint(self) -> str:
        """Which windows these are: xxh3-64 over their shape and all blocks."""
        shape = [self.T, self.stride, self.targets == "any", len(self.horizons), *self.horizons]
        digest = xxhash.xxh3_64(np.array(shape, "<i8").data)
        # Where all targets exist, what lies behind them is no matter.
        stops = [self._blocks.stops] if self.targets == "any" else []
        for array in (self.sessions, self.firsts, self.counts, *stops):
            digest.update(array.astype("<i8").data)
        return digest.hexdigest()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
