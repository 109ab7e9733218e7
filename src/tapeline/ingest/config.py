"""How files are read: the objects, and what a file or the command line says of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import Field, field_validator

from tapeline.configfile import Config
from tapeline.errors import TapeError
from tapeline.tape import (
    Calendar,
    Gaps,
    GridOptions,
    LocalHours,
    Policy,
    Sessions,
    UtcDays,
    detect,
    reader_named,
)
from tapeline.tape.grid import Answer, to_ns
from tapeline.tape.readers import Reader

Files = Sequence[Path]
_POLICY: Final = ("crossed", "locked", "one_sided", "hold_s", "stale_cross_s", "max_unclear_share")


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read; the fields are those of `read_tape`.

    Attributes:
        sessions: makes the rule of where sessions begin and end, for each tape its own, since
            a rule remembers where it was.
        derive: names of derived columns, computed once, here.
    """

    format: str
    instrument: str | None
    sessions: Callable[[], Sessions]
    grid: GridOptions
    policy: Policy
    options: Mapping[str, Any]
    max_unreadable_share: float
    max_lifted_share: float
    derive: tuple[str, ...] = ()


class IngestConfig(Config):
    """How files are read, as a TOML file and `--set` say it; `reading` gives the objects.

    Attributes:
        reader: name of a reader; recognised by content by default.
        sessions: `utc`, `gap:SECONDS`, `hours:HH:MM-HH:MM[,…]@ZONE` or `calendar:NAME`.
        pre, post: with a calendar, open with its pre-market, close with its post-market.
        night_from, weekends: with hours, as `LocalHours` takes them.
        step_s, depth, max_age_s, age_column: the grid, as `GridOptions` takes them; 0 seconds
            means none: each state of the file a row, any age.
        crossed, locked, one_sided, hold_s, stale_cross_s, max_unclear_share: as `Policy` takes
            them.
        options: of the reader.
        max_unreadable_share: largest share of lines that may be left out.
        max_lifted_share: largest share of events that may be out of the order of time.
        derive: derived columns: known names, or `module:function`.
    """

    reader: str | None = None
    instrument: str | None = None
    sessions: str = "utc"
    pre: bool = False
    post: bool = False
    night_from: str | None = None
    weekends: bool = True
    step_s: float | None = None
    depth: int | None = None
    max_age_s: float | None = None
    age_column: bool | None = None
    crossed: Answer | None = None
    locked: Answer | None = None
    one_sided: Answer | None = None
    hold_s: float | None = None
    stale_cross_s: float | None = None
    max_unclear_share: float | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_unreadable_share: float = 0.001
    max_lifted_share: float = 0.01
    derive: list[str] = Field(default_factory=list)

    @field_validator("crossed", "locked", "one_sided", mode="before")
    @classmethod
    def _nan_is_a_word(cls, value: Any) -> Any:
        """TOML reads a bare nan as a number."""
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    def reading(self, files: Files) -> Reading:
        """The objects for files of one format; what isn't set is the format's own default.

        Raises:
            TapeError: a file isn't recognised or is of another format, a value is outside its
                range, or a name isn't known.
        """
        kind = reader_named(self.reader) if self.reader else _one_format(files)
        return Reading(
            format=kind.name,
            instrument=self.instrument,
            sessions=self._sessions(),
            grid=dataclasses.replace(kind.grid, **self._grid()),
            policy=dataclasses.replace(kind.policy, **self._given(*_POLICY)),
            options=self.options,
            max_unreadable_share=self.max_unreadable_share,
            max_lifted_share=self.max_lifted_share,
            derive=tuple(self.derive),
        )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _grid(self) -> dict[str, Any]:
        given = self._given("depth", "age_column")
        if self.step_s is not None:
            given["step_ns"] = to_ns("step_s", self.step_s) if self.step_s else None
        if self.max_age_s is not None:
            given["max_age_s"] = self.max_age_s or None
        return given

    def _sessions(self) -> Callable[[], Sessions]:
        kind, _, rest = self.sessions.partition(":")
        if self.sessions == "utc":
            return UtcDays
        if kind == "calendar" and rest:
            return partial(Calendar, rest, self.pre, self.post)
        hours, at, zone = rest.partition("@")
        if kind == "hours" and at:
            return partial(
                LocalHours, tuple(hours.split(",")), zone, self.night_from, self.weekends
            )
        with contextlib.suppress(ValueError):
            if kind == "gap":
                return partial(Gaps, float(rest))
        raise TapeError(
            "sessions",
            expected="utc, gap:SECONDS, hours:HH:MM-HH:MM@ZONE or calendar:NAME",
            found=repr(self.sessions),
            fix="Write one such as calendar:XNYS or hours:17:00-16:00@America/Chicago",
        )


def _one_format(files: Files) -> type[Reader]:
    """The reader of all files: options, grid and policy are one format's.

    Raises:
        TapeError: one isn't recognised, or they are of several formats.
    """
    kinds = [detect(file) for file in files]
    other = next((n for n, kind in enumerate(kinds) if kind is not kinds[0]), None)
    if other is not None:
        raise TapeError(
            files[other],
            expected=f"{kinds[0].name}, as {files[0]} is",
            found=kinds[other].name,
            fix="Ingest files of different formats one after the other: each call appends to the "
            "store",
        )
    return kinds[0]
