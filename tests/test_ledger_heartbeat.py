"""The heartbeat: what was written last is what is read, and never half of it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tapeline.ledger import PHASES, Heartbeat, read_heartbeat
from tapeline.ledger.heartbeat import FILE_BYTES

COMPUTE = PHASES.index("compute")


def test_the_last_beat_is_read(tmp_path) -> None:
    path = tmp_path / "heartbeat" / "rank-3"
    heartbeat = Heartbeat(path, attempt=2, began_ns=5)
    assert read_heartbeat(path) is None
    for step in range(5):
        heartbeat.beat(step, COMPUTE, 100 + step)
    beat = read_heartbeat(path)
    assert beat is not None
    assert (beat.attempt, beat.step, beat.phase) == (2, 4, "compute")
    assert (beat.monotonic_ns, beat.began_ns, beat.sequence) == (104, 5, 5)
    assert path.stat().st_size == FILE_BYTES
    heartbeat.close()
    assert read_heartbeat(path) == beat


def test_the_next_attempt_goes_on_counting(tmp_path) -> None:
    for attempt in (1, 2):
        heartbeat = Heartbeat(tmp_path / "rank-0", attempt, began_ns=0)
        before = read_heartbeat(tmp_path / "rank-0")
        assert (before.attempt if before else 0) == attempt - 1
        heartbeat.beat(0, COMPUTE, 1)
        heartbeat.close()
    beat = read_heartbeat(tmp_path / "rank-0")
    assert beat is not None and (beat.attempt, beat.sequence) == (2, 2)


@pytest.mark.parametrize("at", range(0, 48, 5))
def test_a_torn_slot_gives_the_beat_before(tmp_path, at) -> None:
    path = tmp_path / "rank-0"
    heartbeat = Heartbeat(path, 1, 0)
    heartbeat.beat(7, COMPUTE, 1)
    heartbeat.beat(8, COMPUTE, 2)
    heartbeat.close()
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10  # the second beat's slot is the first in the file
    path.write_bytes(content)
    beat = read_heartbeat(path)
    assert beat is not None and beat.step == 7


def test_nothing_readable_is_none(tmp_path) -> None:
    assert read_heartbeat(tmp_path / "absent") is None
    for content in (b"", b"\0" * FILE_BYTES, b"x" * 50, b"x" * FILE_BYTES):
        (tmp_path / "rank-0").write_bytes(content)
        assert read_heartbeat(tmp_path / "rank-0") is None


WRITER = """
import sys, pathlib
from tapeline.ledger import Heartbeat
heartbeat = Heartbeat(pathlib.Path(sys.argv[1]), 1, 0)
print("beating", flush=True)
step = 0
while True:
    step += 1
    heartbeat.beat(step, step % 9, step * 1000)
"""


def test_a_reader_beside_a_writer_never_sees_half_a_beat_and_a_kill_leaves_one(tmp_path) -> None:
    path = tmp_path / "rank-0"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    try:
        assert writer.stdout and writer.stdout.readline()
        deadline = time.monotonic() + 60
        seen = 0
        while seen < 5000 and time.monotonic() < deadline:
            beat = read_heartbeat(path)
            if beat is None:  # it has not beaten yet, or it wrote both slots while this one read
                continue
            seen += 1
            assert beat.sequence == beat.step == beat.monotonic_ns // 1000
            assert beat.phase == PHASES[beat.step % 9]
            assert beat.pid == writer.pid
        assert seen == 5000
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert read_heartbeat(path) is not None
