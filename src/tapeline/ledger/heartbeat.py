"""The heartbeat: what a rank does now, in one small file that is written in place.

Covers writing it in under a microsecond, reading it without ever seeing half a record, and a
process that is killed in the middle of a beat. Does not judge: how old a beat may be is for the
reader to say, by phase. A beat stands for progress (a phase entered, a step done); no timer
beats, so a live heartbeat never hides a hang.

The file is mapped into memory, so it is read on the host that writes it.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from tapeline.ledger.phases import PHASES

# Sequence, step, monotonic time now and at the attempt's begin, attempt, phase, process.
_BODY = struct.Struct("<QqqqIII")
_CHECK = struct.Struct("<I")
_SLOT_BYTES = 64
FILE_BYTES = 2 * _SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Beat:
    """The last progress of a rank.

    Attributes:
        sequence: counts beats over all attempts.
        attempt: which life of the run.
        step: steps done.
        phase: entered at `monotonic_ns`, one of `PHASES`.
        monotonic_ns: by the clock of the process's host.
        began_ns: when the attempt began, by the same clock.
        pid: the process.
    """

    sequence: int
    attempt: int
    step: int
    phase: str
    monotonic_ns: int
    began_ns: int
    pid: int


class Heartbeat:
    """Writes the heartbeat of one rank.

    Two slots are written in turn, each with a checksum: while one is being written, the other
    holds the beat before. Opening leaves the last beat of an earlier process readable.

    Args:
        path: the file; made if it isn't there.
        attempt: which life of the run writes.
        began_ns: monotonic time of its begin.
    """

    def __init__(self, path: Path, attempt: int, began_ns: int) -> None:
        last = read_heartbeat(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            # Written, not only made longer: a page without a block behind it can kill the process
            # when the disk is full.
            file.write(bytes(max(0, FILE_BYTES - file.seek(0, os.SEEK_END))))
            file.flush()
            self._map = mmap.mmap(file.fileno(), FILE_BYTES)
        self._sequence = last.sequence if last else 0
        self._began_ns = began_ns
        self._attempt = attempt
        self._pid = os.getpid()

    def beat(self, step: int, phase: int, monotonic_ns: int) -> None:
        """Say that `step` steps are done and that a phase, by its index, was entered."""
        self._sequence = sequence = self._sequence + 1
        body = _BODY.pack(
            sequence, step, monotonic_ns, self._began_ns, self._attempt, phase, self._pid
        )
        start = _SLOT_BYTES * (sequence & 1)
        self._map[start : start + len(body) + 4] = body + _CHECK.pack(zlib.crc32(body))

    def close(self) -> None:
        """Unmap the file; its last beat stays."""
        self._map.close()


def read_heartbeat(path: Path) -> Beat | None:
    """The last whole beat in a file; None where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    beats = (_beat(content[start : start + _SLOT_BYTES]) for start in (0, _SLOT_BYTES))
    return max((beat for beat in beats if beat), key=lambda beat: beat.sequence, default=None)


def _beat(slot: bytes) -> Beat | None:
    body, check = slot[: _BODY.size], slot[_BODY.size : _BODY.size + 4]
    if len(check) < 4 or _CHECK.unpack(check)[0] != zlib.crc32(body):
        return None
    sequence, step, monotonic_ns, began_ns, attempt, phase, pid = _BODY.unpack(body)
    if not sequence or phase >= len(PHASES):
        return None
    return Beat(sequence, attempt, step, PHASES[phase], monotonic_ns, began_ns, pid)
