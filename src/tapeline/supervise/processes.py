"""Processes of a run: made to end with their parent, found again, and ended without grace.

A process of a supervised run carries the run's folder in its environment (`MARK`), which the
kernel keeps from the start of the program. Whoever has it can be found, whoever its parent is and
whatever session it moved to: torchrun gives each rank a session of its own, so that a process
group doesn't hold them. Does not cover other machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tapeline.errors import RunError

MARK = "TAPELINE_SUPERVISED"
_PR_SET_PDEATHSIG = 1
_LONGEST_S = 20.0  # a killed process may hang in the kernel until its disk or device answers


def die_with_parent(parent: int) -> None:
    """Be killed when the parent process ends, however it does; Linux only, elsewhere not.

    Args:
        parent: its pid, since it may have ended before this call.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def marked(run: Path, spared: Iterable[int] = ()) -> list[psutil.Process]:
    """The living processes of a run on this machine, this one and the spared left out."""
    left_out = {os.getpid(), *spared}
    found = []
    for process in psutil.process_iter():
        if process.pid in left_out:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.environ().get(MARK) == str(run)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(run: Path, spared: Iterable[int] = ()) -> int:
    """SIGKILL every process of a run and return once none is left.

    Returns:
        How many there were.

    Raises:
        RunError: one doesn't end.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + _LONGEST_S
    while left := marked(run, spared):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            ended.add(process.pid)
        if time.monotonic() > deadline:
            raise RunError(
                run,
                expected="every process of its last attempt to end on SIGKILL",
                found=f"process {left[0].pid} still there",
                fix="Look at what it waits for in the kernel, with `cat /proc/PID/stack`",
            )
        time.sleep(0.005)  # not psutil's wait: it takes the exit codes of our own children
    return len(ended)


def publish(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON file that readers see whole or not at all; not forced to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def published(path: Path) -> dict[str, Any] | None:
    """What was published at a path; None if nothing was."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
