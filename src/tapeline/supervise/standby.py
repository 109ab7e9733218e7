"""A warm standby: one spare process with everything imported, from which ranks are forked.

torchrun can't do this: it starts its workers as new programs, and importing torch alone takes
seconds. So the ranks are started here, in the environment that torchrun would give them (RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).
One standby serves any number of failures and any number of ranks; it touches no device and starts
no thread, so that a fork of it is a fresh process. POSIX.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tapeline.errors import RunError
from tapeline.supervise.launch import Launch
from tapeline.supervise.nodes import Share
from tapeline.supervise.processes import MARK, die_with_parent, end_all
from tapeline.supervise.rank import fork_rank, note_end

PRELOADED = ("tapeline.cli", "tapeline.readiness:ready")
_REAP_S = 0.02


class Standby:
    """Starts ranks as forks of a process that has its imports done.

    Args:
        run: folder of the run.
        preloaded: modules that the standby imports, and `module:function` that it calls.
    """

    def __init__(self, run: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self._run = run
        self._preloaded = tuple(preloaded)
        self._child: subprocess.Popen[bytes] | None = None

    def start(
        self,
        folder: Path,
        share: Share,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Launch:
        """Start the ranks; whatever is left of an attempt before is ended first.

        Raises:
            RunError: the standby doesn't start, or ended.
        """
        child = self._ready()
        end_all(self._run, [child.pid])
        meeting = {"MASTER_ADDR": share.node.address, "MASTER_PORT": str(share.port)}
        request = {
            "folder": str(folder),
            "ranks": list(share.ranks),
            "command": list(command),
            "environment": {**environment, **meeting, "WORLD_SIZE": str(share.num_ranks)},
        }
        assert child.stdin, "it was opened with pipes"
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise self._not_ready("one that had ended") from None
        return Launch(self._run, folder, share, lambda: child.poll() is not None, [child.pid])

    def close(self) -> None:
        """End the standby, and with it every rank that is a fork of it."""
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._child and self._child.poll() is None:
            return self._child
        self.close()
        end_all(self._run)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tapeline.supervise.standby", *self._preloaded],
            env={"OMP_NUM_THREADS": "1", **os.environ, MARK: str(self._run)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._child.stdout, "it was opened with pipes"
        if self._child.stdout.readline() != b"ready\n":
            raise self._not_ready("one that ended while importing")
        return self._child

    def _not_ready(self, found: str) -> RunError:
        return RunError(
            f"standby of {self._run}",
            expected="a spare process with its imports done",
            found=found,
            fix="See what it said above, or supervise without a standby",
        )


def main(preloaded: Sequence[str]) -> NoReturn:
    """Import, then fork ranks as asked on standard input, and note how each ends."""
    die_with_parent(os.getppid())
    sys.path.append(str(Path.cwd()))
    for reference in preloaded:
        name, _, function = reference.partition(":")
        module = importlib.import_module(name)
        if function:
            getattr(module, function)()
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a cluster's goes to all; the supervisor decides
    print("ready", flush=True)
    ranks: dict[int, tuple[Path, int]] = {}  # by pid
    while True:
        # Ends are looked for by the clock: a handler of SIGCHLD would be inherited by the ranks.
        asked, _, _ = select.select([sys.stdin], [], [], _REAP_S if ranks else None)
        _reap(ranks)
        if asked:
            line = sys.stdin.readline()  # one at a time, so that none waits in the buffer
            if not line:
                os._exit(0)
            _fork_all(json.loads(line), ranks)


def _fork_all(request: dict[str, Any], ranks: dict[int, tuple[Path, int]]) -> None:
    folder = Path(request["folder"])
    os.environ.update(request["environment"])
    for local, rank in enumerate(request["ranks"]):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local)}
        ranks[fork_rank(folder, rank, request["command"])] = folder, rank


def _reap(ranks: dict[int, tuple[Path, int]]) -> None:
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid in ranks:
            folder, rank = ranks.pop(pid)
            note_end(folder, rank, pid, status)


if __name__ == "__main__":
    main(sys.argv[1:])
