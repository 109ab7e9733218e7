"""The record of a run: configuration, code, data, machine; taken before the first step.

"Not a repository" and "git failed" are told apart from "clean": a record that guesses is worse
than none.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tapeline.clock import Clock, utc
from tapeline.config import RunConfig
from tapeline.machine import Machine

_GIT_TIMEOUT_S = 10


def record(config: RunConfig, data: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """What `run.json` says.

    Args:
        config: after every override.
        data: what the run reads: fingerprint, windows, split, normaliser.
        clock: for the time of the record.
    """
    return {
        "format": "tapeline run",
        "version": 1,
        "created": utc(clock.wall_ns()),
        "config": config.resolved(),
        "config_hash": config.hash(),
        "code": code_state(Path.cwd()),
        "data": data,
        "machine": Machine.here().as_dict(),
    }


def code_state(folder: Path) -> dict[str, Any]:
    """The state of the git checkout that `folder` is in.

    Returns:
        `state`: "clean", "dirty", "not a repository" or "unknown"; `commit` or None; `changed`
        and `untracked`: how many files, untracked ones count as dirty; `problem`: what git said
        where the state is unknown.
    """
    found: dict[str, Any] = {
        "state": "unknown",
        "commit": None,
        "changed": None,
        "untracked": None,
        "problem": None,
    }
    try:
        inside = _git(folder, "rev-parse", "--is-inside-work-tree")
        if inside.returncode != 0:
            missing = "not a git repository" in inside.stderr
            found["state"] = "not a repository" if missing else "unknown"
            found["problem"] = None if missing else inside.stderr.strip()
            return found
        status = _git(folder, "status", "--porcelain", "--untracked-files=all")
        head = _git(folder, "rev-parse", "HEAD")
    except (OSError, subprocess.TimeoutExpired) as error:
        return found | {"problem": f"git could not be asked: {error}"}
    if status.returncode != 0:
        return found | {"problem": status.stderr.strip()}
    lines = status.stdout.splitlines()
    untracked = sum(line.startswith("??") for line in lines)
    return {
        "state": "dirty" if lines else "clean",
        "commit": head.stdout.strip() if head.returncode == 0 else None,
        "changed": len(lines) - untracked,
        "untracked": untracked,
        "problem": None if head.returncode == 0 else "no commit yet",
    }


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_GIT_TIMEOUT_S,
        env={**os.environ, "LC_ALL": "C"},  # its messages are read, so they must be in English
    )
