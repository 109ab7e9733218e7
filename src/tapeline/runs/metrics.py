"""The metrics journal of one rank: what was measured, by attempt and step.

Covers writing it within a budget of bytes, and without ever stopping the training. Reading it back
is `history`'s. One line is one record; a number that JSON has no word for is a string: "nan",
"inf", "-inf".

    {"attempt":1,"step":20,"losses":[…],"grad_norms":[…],"learning_rate":0.001}
    {"attempt":1,"step":20,"step_ns":[…],"collective_wait_ns":[…],"samples_per_s":…,
     "rss_bytes":…,"device_bytes":…,"utilisation":…,"batch_s":…}
    {"attempt":1,"step":100,"validation":{"loss":…}}
    {"attempt":1,"step":50,"profile":{"per_step":…,"median_us":…,"busy":…}}
    {"attempt":1,"step":20,"failed_writes":2,"lost_records":0,"error":"…"}
    {"thinned":{"records":640,"up_to_step":12000}}

`step` is the last one measured, counted from 1; a list holds the steps up to and including it.
What wasn't measured isn't there. A step done again in a later attempt stands there again. The
last line but one is written after a failure, once writing works again; the last is the file's
first, where older detail was left out to keep to the budget.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from tapeline.files import Journal, atomic_write

BUDGET_BYTES = 64 << 20  # some 900,000 steps in full detail
_HEAD = re.compile(rb'\{"attempt":(\d+),"step":(\d+),"(\w+)"')
_THINNED = re.compile(rb'\{"thinned":\{"records":(\d+),"up_to_step":(\d+)\}\}')
_KEPT = (b"validation", b"profile", b"failed_writes", b"")
NOT_IN_JSON = ("nan", "inf", "-inf")
_THINNED_TO = 0.9  # of the budget, at most; mostly three quarters, so that thinning is rare
_MOST_PENDING = 10_000  # records kept in memory while the file can't be written
_MOST_PASSES = 63  # records between two tries: each may take as long as a step


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What one rank's machine did over the steps of a logging interval; None: not measured.

    Attributes:
        step_ns: how long each step took.
        collective_wait_ns: the part of each that went by in collectives.
        samples_per_s: windows a second, of the rank.
        rss_bytes: memory of the process, now.
        device_bytes: memory of the device, the most since the last time.
        utilisation: of the device, from 0 to 1.
        batch_s: what its loader took to make a batch, waited for or not.
    """

    step_ns: Sequence[int] | None = None
    collective_wait_ns: Sequence[int] | None = None
    samples_per_s: float | None = None
    rss_bytes: int | None = None
    device_bytes: int | None = None
    utilisation: float | None = None
    batch_s: float | None = None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class MetricsJournal:
    """Appends the metrics of one attempt.

    A failure to write never raises: it is told once, through `warn`, counted, and noted in the
    journal as soon as that can be written again; what could not be written waits in memory.

    Args:
        attempt: which life of the run writes.
        budget_bytes: as long as the file may be. Beyond it, every second record of its older half
            is left out, and so on; the older, the less detail. The newest half is never touched.
        warn: takes a sentence about the first failure.
    """

    def __init__(
        self,
        path: Path,
        attempt: int,
        *,
        budget_bytes: int = BUDGET_BYTES,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        self._path = path
        self._attempt = attempt
        self._budget_bytes = self._thin_at = budget_bytes
        self._warn = warn
        self._file: IO[bytes] | None = None
        self._size = 0
        self._pending: list[bytes] = []
        self._step = 0
        self._untold = False  # failures that the journal doesn't note yet
        self._error = ""
        self._passes = self._passes_left = 0  # records before the next try, after a failure
        self.failed_writes = 0
        self.lost_records = 0
        self._write()

    def losses(
        self,
        step: int,
        losses: Sequence[float],
        *,
        grad_norms: Sequence[float] | None = None,
        learning_rate: float | None = None,
    ) -> None:
        """What the steps up to and including `step` learnt, counted from 1.

        Args:
            step: the last of them.
            losses: of each.
            grad_norms: of each, before clipping.
            learning_rate: `step`'s.
        """
        self._append(
            step,
            {
                "losses": list(losses),
                "grad_norms": None if grad_norms is None else list(grad_norms),
                "learning_rate": learning_rate,
            },
        )

    def machine(self, step: int, figures: MachineFigures) -> None:
        """What the machine did over the steps up to and including `step`."""
        self._append(step, {field.name: getattr(figures, field.name) for field in fields(figures)})

    def validation(self, step: int, figures: Mapping[str, Any]) -> None:
        """What an evaluation after `step` found."""
        self._append(step, {"validation": dict(figures)})

    def profile(self, step: int, *, per_step: float, median_us: float, busy: float) -> None:
        """What a profile of a few steps up to `step` saw.

        Args:
            step: the last of them.
            per_step: kernels (on a CPU: operators) launched in a step.
            median_us: how long one runs.
            busy: share of the computing time in which one runs.
        """
        figures = {"per_step": per_step, "median_us": median_us, "busy": busy}
        self._append(step, {"profile": figures})

    def sync(self) -> None:
        """Put what was written on the disk, as far as that works."""
        self._write(sync=True)

    def close(self) -> None:
        """Write what waits, as far as that works, and close."""
        self.sync()
        if self._pending:
            self.lost_records += len(self._pending)
            self._warn(f"{self._path}: {self.lost_records} records of metrics are lost")
            self._pending = []
        self._drop_file()

    def __enter__(self) -> MetricsJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, step: int, record: Mapping[str, Any]) -> None:
        self._step = step
        there = {name: value for name, value in record.items() if value is not None}
        self._pending.append(_line({"attempt": self._attempt, "step": step, **there}))
        if len(self._pending) > _MOST_PENDING:
            del self._pending[0]
            self.lost_records += 1
        if self._passes_left:
            self._passes_left -= 1
        else:
            self._write()

    def _write(self, *, sync: bool = False) -> None:
        try:
            file = self._file or self._open()
            # The note comes first: it explains what is missing or late after it.
            data = b"".join([*self._note(), *self._pending])
            if data and file.write(data) != len(data):
                raise OSError("only a part could be written")
            self._size += len(data)
            self._pending = []
            self._untold, self._passes = False, 0
            if self._size > self._thin_at:
                self._thin()
            if sync and self._file:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._failed(error)

    def _open(self) -> IO[bytes]:
        with Journal(self._path):  # cuts a torn tail
            pass
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()
        return self._file

    def _note(self) -> list[bytes]:
        if not self._untold:
            return []
        return [
            _line(
                {
                    "attempt": self._attempt,
                    "step": self._step,
                    "failed_writes": self.failed_writes,
                    "lost_records": self.lost_records,
                    "error": self._error,
                }
            )
        ]

    def _failed(self, error: OSError) -> None:
        self.failed_writes += 1
        self._untold = True
        self._error = error.strerror or str(error)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # of a record, a part may have been written
        self._drop_file()
        self._passes = self._passes_left = min(2 * self._passes + 1, _MOST_PASSES)
        if self.failed_writes == 1:
            self._warn(f"{self._path}: metrics can't be written ({self._error}); training goes on")

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _thin(self) -> None:
        # Set first: if the disk is too full to thin, the next try is a good deal later.
        self._thin_at = self._size + self._budget_bytes // 4
        thinned = thin(self._path.read_bytes(), round(_THINNED_TO * self._budget_bytes))
        atomic_write(self._path, thinned)
        self._thin_at = self._budget_bytes
        self._drop_file()


def thin(content: bytes, most_bytes: int) -> bytes:
    """A journal's lines with less detail in the older half, at most so many bytes of them.

    Every second record of measurements is left out of it, but none that begins a life or a
    stretch that is done again; if that doesn't do, the oldest records of all go too. The first
    line says how much is gone.
    """
    lines = content.splitlines(keepends=True)
    gone = _Gone()
    if lines and (told := _THINNED.match(lines[0])):
        gone = _Gone(int(told[1]), int(told[2]))
        del lines[0]
    kept = deque[bytes]()
    half, passed = sum(map(len, lines)) / 2, 0
    last: dict[bytes, tuple[int, int, bool]] = {}  # by kind: attempt, step, whether it was kept
    for line in lines:
        passed += len(line)
        attempt, step, kind = _head(line)
        if passed > half or kind in _KEPT:
            kept.append(line)
            continue
        kind = kind if kind == b"losses" else b"machine"
        last_attempt, last_step, was_kept = last.get(kind, (0, 0, False))
        keep = attempt != last_attempt or step <= last_step or not was_kept
        last[kind] = attempt, step, keep
        if keep:
            kept.append(line)
        else:
            gone.add(step)
    surplus = sum(map(len, kept)) - most_bytes
    while surplus > 0 and len(kept) > 1:
        line = kept.popleft()
        surplus -= len(line)
        gone.add(_head(line)[1])
    return b"".join([_line({"thinned": asdict(gone)}), *kept])


@dataclass(slots=True)
class _Gone:
    """What was left out: how many records, and the last step of any of them."""

    records: int = 0
    up_to_step: int = 0

    def add(self, step: int) -> None:
        self.records += 1
        self.up_to_step = max(self.up_to_step, step)


def _head(line: bytes) -> tuple[int, int, bytes]:
    """Attempt, step and the first key after them; of a line that isn't ours, zeros and no key.

    The rest isn't read: training waits meanwhile, and to read all of it takes seconds.
    """
    match = _HEAD.match(line)
    return (int(match[1]), int(match[2]), match[3]) if match else (0, 0, b"")


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(without_nan(record), separators=(",", ":"))
    return text.encode() + b"\n"


def without_nan(value: Any) -> Any:
    """A value with the numbers that JSON has no word for as "nan", "inf" and "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in value]
    return value


def with_nan(value: Any) -> Any:
    """A value of a record with the numbers that JSON has no word for as numbers again."""
    if isinstance(value, str):
        return float(value) if value in NOT_IN_JSON else value
    if isinstance(value, Mapping):
        return {key: with_nan(v) for key, v in value.items()}
    return [with_nan(v) for v in value] if isinstance(value, list) else value
