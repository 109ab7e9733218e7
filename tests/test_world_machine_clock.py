"""Where a process stands, what it runs on, and what time it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline import machine as machine_module
from tapeline.clock import Clock, FakeClock, SystemClock, utc
from tapeline.errors import RunError
from tapeline.machine import Machine
from tapeline.world import World

FIX = "Start the job with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK."


def test_a_process_without_torchrun_is_alone() -> None:
    assert World.from_environment({}) == World(rank=0, size=1, local_rank=0)


def test_the_place_is_read_from_what_torchrun_sets() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "HOME": "x"}
    assert World.from_environment(environment) == World(rank=5, size=8, local_rank=1)


def test_the_default_is_the_real_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert World.from_environment() == World(rank=1, size=2, local_rank=0)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "two"}, "RANK: expected a whole number, found 'two'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: expected a whole number, found ''"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK: expected a whole number, found '1.0'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected a whole number from 1, found 0"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: expected a whole number from 1, found -2"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1 in a world of 2, found 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK: expected 0 to 1 in a world of 2, found -1"),
        ({"RANK": "1"}, "RANK: expected 0 to 0 in a world of 1, found 1"),
        (
            {"WORLD_SIZE": "4", "LOCAL_RANK": "4"},
            "LOCAL_RANK: expected 0 to 3 in a world of 4, found 4",
        ),
    ],
)
def test_an_impossible_place_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(RunError) as caught:
        World.from_environment(environment)
    assert str(caught.value) == f"environment variable {said}. {FIX}"


def test_the_machine_is_named_in_full() -> None:
    here = Machine.here()
    assert here.processor
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.memory_gib == round(psutil.virtual_memory().total / 2**30, 1)
    assert here.load_1min >= 0
    assert {"torch", "numpy", "pyarrow", "numba"} <= set(here.versions)
    assert json.loads(json.dumps(here.as_dict())) == here.as_dict()


def test_a_machine_prints_as_one_line() -> None:
    machine = Machine("Z80", 2, 0.5, "cpu", "3.11.1", {"torch": "2.10.0"}, 0.25)
    assert str(machine) == (
        "Z80, 2 cores, 0.5 GiB, device cpu, Python 3.11.1, torch 2.10.0, load 0.25"
    )
    bare = Machine("Z80", 2, 64.0, "unknown", "3.11.1", {}, 1.0)
    assert str(bare) == "Z80, 2 cores, 64 GiB, device unknown, Python 3.11.1, torch none, load 1"


def test_a_package_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_PACKAGES", ("numpy", "no-such-package-here"))
    assert list(Machine.here().versions) == ["numpy"]


def test_naming_the_machine_does_not_import_torch() -> None:
    script = (
        "import sys; from tapeline.machine import Machine; m = Machine.here(); "
        "print(m.device, bool(m.versions['torch']), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "unknown True False\n"


def test_a_fake_clock_moves_only_when_told_to() -> None:
    clock = FakeClock(monotonic_ns=5, wall_ns=100)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (5, 100)
    clock.advance(7)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (12, 107)
    clock.set_wall(3)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (12, 3)
    with pytest.raises(AssertionError, match="monotonic time doesn't go back"):
        clock.advance(-1)


def test_the_system_clock_is_whole_nanoseconds_and_monotonic() -> None:
    clock: Clock = SystemClock()
    readings = [clock.monotonic_ns() for _ in range(100)]
    assert all(type(reading) is int for reading in [*readings, clock.wall_ns()])
    assert readings == sorted(readings)


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000000000Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        (1_430_438_399_999_999_999, "2015-04-30T23:59:59.999999999Z"),
        (2**63 - 1, "2262-04-11T23:47:16.854775807Z"),
        (-(2**63), "1677-09-21T00:12:43.145224192Z"),
    ],
)
def test_times_are_written_with_all_nine_digits(nanoseconds: int, text: str) -> None:
    assert utc(nanoseconds) == text


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_no_nanosecond_is_lost_in_writing(nanoseconds: int) -> None:
    text = utc(nanoseconds)
    whole = datetime.fromisoformat(text[:19]).replace(tzinfo=UTC)
    seconds = (whole - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    assert seconds * 1_000_000_000 + int(text[20:29]) == nanoseconds
