"""A search from its beginning, or from where it was left, to its end: workers on this machine.

Workers of the same search may run on other machines meanwhile; the same command there joins it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tapeline.errors import RunError
from tapeline.search.folder import SearchFolder
from tapeline.search.replay import Replay
from tapeline.search.worker import STORAGE
from tapeline.supervise.processes import die_with_parent

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
_POLL_S = 0.5


def conduct(search: SearchFolder, workers: int, say: Say, progress: Progress) -> None:
    """Let so many workers of this machine work until the search is over.

    Args:
        say: told of each that ends before the search.
        progress: called with the steps of trials given out, and the budget.

    Raises:
        RunError: every worker ended before the search.
    """
    journal, replay = search.journal(), Replay(search.config, search.rules)
    with _started(search, workers) as processes:
        living = dict(enumerate(processes))
        while living:
            for number, process in list(living.items()):
                if (code := process.poll()) is not None:
                    del living[number]
                    if code:
                        say(f"worker {number} ended with {code}; the others take over its job")
            for place, entry in journal.new_entries():
                replay.apply(place, entry)
            progress(replay.schedule.spent_steps, search.rules.budget_steps)
            time.sleep(_POLL_S)
    for place, entry in journal.new_entries():
        replay.apply(place, entry)
    if not replay.schedule.is_over:
        log = _log(search.path, 0)
        raise RunError(
            search.path,
            expected="workers that live until the search is over",
            found=_last_line(log),
            fix=f"See {log.parent}, then give the same command again: it goes on from there",
        )


@contextlib.contextmanager
def _started(search: SearchFolder, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers; those that still run when the block ends are told to save and end."""
    parent = os.getpid()
    environment = dict(os.environ)
    if search.storage:
        environment[STORAGE] = search.storage
    (search.path / "workers").mkdir(exist_ok=True)
    processes = []
    try:
        for one in range(number):
            with _log(search.path, one).open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "tapeline.search.worker", str(search.path)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for this process alone
                        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _log(folder: Path, worker: int) -> Path:
    return folder / "workers" / f"{worker}.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "all of them gone"
