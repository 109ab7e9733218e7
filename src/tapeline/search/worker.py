"""A worker: takes jobs off the journal and runs them, one after another, until the search is over.

`python -m tapeline.search.worker FOLDER` is one; any number of them, on any machines that see the
folder, need nothing but the journal to get along. One that dies is missed by the others after a
lease, and its job is given out again; one that was only slow finds its lease gone and lets go.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tapeline.errors import TapelineError
from tapeline.search.folder import SearchFolder
from tapeline.search.journal import Entry
from tapeline.search.replay import Replay
from tapeline.search.schedule import Job
from tapeline.search.suggest import distributions
from tapeline.search.trial import Outcome, Stretch

STORAGE = "TAPELINE_SEARCH_STORAGE"  # not an argument, since it may hold a password
_POLL_S = 0.2
_IDLE_POLLS = 5  # so many times rarer, with nothing to do: each asks the storage
_SIGNS_PER_LEASE = 4


class Worker:
    """One worker.

    Args:
        work_of: a stretch as something to run; by default itself.
        poll_s: between two looks at a process.
    """

    def __init__(
        self,
        search: SearchFolder,
        work_of: Callable[[Stretch], Stretch] = lambda stretch: stretch,
        poll_s: float = _POLL_S,
    ) -> None:
        self.name = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:6]}"
        self.stopping = False
        self._search = search
        self._work_of = work_of
        self._poll_s = poll_s
        self._journal = search.journal()
        self._replay = Replay(search.config, search.rules)
        self._lease_s = search.config.lease_s
        self._count = 0
        self._shown_at = -math.inf
        self._seen: dict[str, tuple[int, float]] = {}  # counts of others, and since when

    def work(self) -> None:
        """Run jobs until the search is over, or `stopping` is set."""
        while not self.stopping:
            self._read()
            self._tend()
            if self._replay.schedule.is_over:
                return
            if not (self._replay.schedule.next_job() and self._take_one()):
                time.sleep(_IDLE_POLLS * self._poll_s)

    def _read(self, until: str | None = None) -> int | None:
        """Take in new entries, up to one's own if its token is given; its place."""
        for place, entry in self._journal.new_entries():
            self._replay.apply(place, entry)
            if entry["token"] == until:
                return place
        return None

    def _take_one(self) -> bool:
        """Ask for a job and do it; False if someone else was faster."""
        token = self._journal.append({"kind": "ask", "worker": self.name})
        lease = self._read(until=token)
        assert lease is not None, "an entry that was appended is there"
        job = self._replay.schedule.running.get(lease)
        if job is None:
            return False
        values = self._replay.suggested(job)  # of the journal up to here, and no further
        self._append("begin", lease, job=asdict(job), values=values)
        search = self._search
        stretch = Stretch(search.config, search.rules, search.base, search.base_file, job, values)
        self._do(lease, job, stretch)
        return True

    def _do(self, lease: int, job: Job, stretch: Stretch) -> None:
        work = self._work_of(stretch)
        while work.is_busy() and not self.stopping:
            if not self._holds(lease):
                return
            time.sleep(self._poll_s)
        outcome = work.outcome(None)
        if outcome is None and not self.stopping:
            code = self._watched(lease, work.start())
            if code is None:
                return
            outcome = work.outcome(code)
        if outcome is None:
            self._append("give back", lease, died=not self.stopping)
            return
        self._end(lease, job, stretch, outcome)

    def _watched(self, lease: int, process: subprocess.Popen[bytes]) -> int | None:
        """The exit code of a process; None if it was killed, since the lease had gone."""
        told = False
        try:
            while (code := process.poll()) is None:
                if not self._holds(lease):
                    return None
                if self.stopping and not told:
                    process.terminate()
                    told = True
                time.sleep(self._poll_s)
            return code
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _holds(self, lease: int) -> bool:
        """Whether the lease is still ours; now and then this takes a look at the others."""
        if time.monotonic() - self._shown_at > self._lease_s / _SIGNS_PER_LEASE:
            self._read()
            self._tend()
        return self._replay.owners.get(lease) == self.name

    def _end(self, lease: int, job: Job, stretch: Stretch, outcome: Outcome) -> None:
        is_number = math.isfinite(outcome.value)
        shown = {}
        if is_number and job.seed is None and stretch.to_step == self._search.rules.rungs[-1]:
            known = distributions(self._search.config)
            shown = {"value": outcome.value, "params": stretch.values, "distributions": known}
        self._append(
            "end",
            lease,
            shown,
            value=outcome.value if is_number else None,
            reason=outcome.reason,
        )

    def _append(
        self, kind: str, lease: int, shown: dict[str, object] | None = None, **more: object
    ) -> None:
        entry: Entry = {"kind": kind, "lease": lease, "worker": self.name, **more}
        self._journal.append(entry, **(shown or {}))

    def _tend(self) -> None:
        """Show a sign of life, and give back what the dead held."""
        now = time.monotonic()
        if now - self._shown_at <= self._lease_s / _SIGNS_PER_LEASE:
            return
        self._count += 1
        self._journal.show_life(self.name, self._count)
        self._shown_at = now
        lives = self._journal.lives()
        for lease, owner in list(self._replay.owners.items()):
            count = lives.get(owner, 0)
            seen, since = self._seen.get(owner, (-1, now))
            if seen != count:
                self._seen[owner] = (count, now)
            elif owner != self.name and now - since > self._lease_s:
                self._append("give back", lease, died=True)


def main() -> None:
    """Work on the search whose folder is the first argument."""
    try:
        worker = Worker(SearchFolder.open(Path(sys.argv[1]), os.environ.get(STORAGE)))

        def stop(*_: object) -> None:
            worker.stopping = True

        signal.signal(signal.SIGTERM, stop)
        worker.work()
    except TapelineError as error:
        raise SystemExit(f"tapeline: {error}") from None


if __name__ == "__main__":
    main()
