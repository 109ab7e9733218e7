"""Training in a process of its own, to the end or until it is really killed with SIGKILL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapeline.clock import SystemClock
from tapeline.errors import RunError
from tapeline.runs import RunFolder

_LIMIT_S = 300.0
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Killed:
    """How a training process died.

    Attributes:
        pid: of the process.
        signal: that ended it.
        after_step: the last step it had journalled when the signal was sent.
    """

    pid: int
    signal: str
    after_step: int

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)


def train_and_kill(config: Path, run: Path, *, at_step: int) -> Killed:
    """Train in a process and send it SIGKILL once it has journalled `at_step`.

    Raises:
        RunError: it ended by itself before that.
    """
    folder = RunFolder(run, SystemClock())
    with _tapeline("train", str(config), "--out", str(run)) as process:
        deadline = time.monotonic() + _LIMIT_S
        step = 0
        while step < at_step and process.poll() is None and time.monotonic() < deadline:
            step = max(folder.losses(), default=0)
            time.sleep(_POLL_S)
        process.kill()
        _, talk = process.communicate()
    if process.returncode != -signal.SIGKILL:
        raise RunError(
            run,
            expected=f"a run that is killed at step {at_step}",
            found=f"one that ended by itself: {_last_line(talk)}",
            fix="Train more steps, or kill earlier",
        )
    return Killed(process.pid, "SIGKILL", max(folder.losses(), default=0))


def train_to_end(config: Path, run: Path) -> dict[str, Any]:
    """Train in a process; returns what `tapeline train --json` prints."""
    return _json("train", str(config), "--out", str(run), "--json")


def resume_to_end(run: Path) -> dict[str, Any]:
    """Resume in a process; returns what `tapeline resume --json` prints."""
    return _json("resume", str(run), "--json")


def _json(*arguments: str) -> dict[str, Any]:
    with _tapeline(*arguments) as process:
        data, talk = process.communicate(timeout=_LIMIT_S)
    if process.returncode != 0:
        raise RunError(
            f"tapeline {' '.join(arguments)}",
            expected="exit code 0",
            found=f"{process.returncode}: {_last_line(talk)}",
            fix="Run the command by itself to see all it says",
        )
    values: dict[str, Any] = json.loads(data)
    return values


def _tapeline(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tapeline", *arguments],  # -P: no module of the working folder
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
