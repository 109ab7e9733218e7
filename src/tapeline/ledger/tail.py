"""The end of a ledger: which attempt wrote last, up to where, and what the heartbeat adds."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tapeline.files import tail_records
from tapeline.ledger.heartbeat import Beat
from tapeline.ledger.phases import NS_PER_S

_LETTERS = {
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_SLEEPING: "S",
    psutil.STATUS_IDLE: "I",
    psutil.STATUS_DISK_SLEEP: "D",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_DEAD: "X",
}
_IN_STEPS = ("data", "transfer", "compute", "communication")


@dataclass(frozen=True, slots=True)
class LastWritten:
    """What a ledger's last lines say.

    Attributes:
        attempt: the last one; 0 in an empty ledger.
        step, end_ns: of its last span.
        closed: whether it said that it ended.
    """

    attempt: int = 0
    step: int = 0
    end_ns: int = 0
    closed: bool = False


def last_written(path: Path) -> LastWritten:
    """Read the end of a ledger; a torn line and what is no record are passed over."""
    last, step = (0, 0), 0  # attempt and end
    closed: set[object] = set()
    for record in tail_records(path):
        # The highest, not the last: a stretch of lines may be there twice.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            closed |= {record.get("close")}
            if (found := int(record.get("attempt", 0))) and (found, record["end"]) >= last:
                last, step = (found, int(record["end"])), int(record["step"])
            elif (found := int(record.get("begin", 0))) > last[0]:
                last, step = (found, 0), int(record["from_step"])
    return LastWritten(last[0], step, last[1], last[0] in closed)


def pace_per_s(path: Path, attempt: int) -> float | None:
    """Steps a second of an attempt over the end of a ledger, with all that lay between them.

    None where the end holds fewer than two stretches of it.
    """
    spans = [line for line in tail_records(path) if line.get("attempt") == attempt]
    if len(spans) < 2:
        return None
    first, last = spans[0], spans[-1]
    passed_ns = int(last["end"]) - int(first["end"])
    return (last["step"] - first["step"]) * NS_PER_S / passed_ns if passed_ns > 0 else None


def inferred_line(last: LastWritten, beat: Beat | None) -> list[dict[str, Any]]:
    """The span between the last line of a killed attempt and its last heartbeat, or none.

    No longer than one flush leaves open. Where steps were done in it, it is called "compute".
    """
    if beat is None or last.closed or beat.attempt != last.attempt:
        return []
    end_ns = beat.monotonic_ns - beat.began_ns
    if end_ns <= last.end_ns:
        return []
    phase = "compute" if beat.step > last.step else beat.phase
    return [
        {
            "attempt": last.attempt,
            "step": beat.step,
            "end": end_ns,
            phase: end_ns - last.end_ns,
            "partial": int(beat.phase in _IN_STEPS),
            "inferred": 1,
        }
    ]


def boot_id() -> str | None:
    """Names the time since the machine was started, in which one monotonic clock runs."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def kernel_state(process: psutil.Process) -> str | None:
    """The letter that the kernel gives a process, such as "T" for one that was stopped.

    Raises:
        psutil.Error: it is gone, or its state can't be read.
    """
    return _LETTERS.get(process.status())


def process_began_ns() -> int:
    """Monotonic time at which this process began, to about 10 ms.

    For `Ledger(began_ns=…)` of the first attempt in a process; a second one there would begin
    before the first ended.
    """
    return time.monotonic_ns() - max(0, _process_age_ns())


def _process_age_ns() -> int:
    try:
        # psutil counts from the time of booting, which Linux gives it in whole seconds.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_ns = int(fields[19]) * NS_PER_S // os.sysconf("SC_CLK_TCK")
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - began_ns
    except OSError:
        return int((time.time() - psutil.Process().create_time()) * NS_PER_S)
