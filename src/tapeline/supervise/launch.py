"""Starting all ranks of an attempt on this machine, and knowing how each ended.

torchrun is the engine: a child with `--max-restarts=0` and, for each attempt, a rendezvous of its
own on a port that the kernel chooses: reusing one connects workers to the attempt that died.
`standby` is the other engine. A launch ends by SIGKILL of every process of the run: a hung rank
gets no grace. Of a run on several machines, it covers what this one starts, and sees how the
others' ranks ended by the same files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tapeline.signals import Exit
from tapeline.supervise.nodes import Share
from tapeline.supervise.processes import MARK, die_with_parent, end_all, publish, published


class Launch:
    """The ranks of one attempt, running or ended.

    Args:
        run: folder of the run.
        folder: of this attempt.
        share: the ranks that are started here.
        gone: whether what started the ranks is there no more.
        spared: processes of the run that outlive an attempt.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        share: Share,
        gone: Callable[[], bool],
        spared: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self.share = share
        self._run = run
        self._gone = gone
        self._spared = spared
        self._exits: dict[int, Exit] = {}
        self._ended_here: set[int] = set()

    def pids(self) -> dict[int, int]:
        """The process of each rank that has been started here, by rank."""
        found = {rank: published(self._file(rank)) for rank in self.share.ranks}
        return {rank: content["pid"] for rank, content in found.items() if content}

    def exits(self) -> dict[int, Exit]:
        """How each rank ended that has, by rank."""
        for rank in range(self.share.num_ranks):
            content = published(self._file(rank)) if rank not in self._exits else None
            if content and "code" in content:
                code = content["code"]
                self._exits[rank] = Exit(
                    code=code if code >= 0 else None,
                    signal=-code if code < 0 else None,
                    time_ns=content["ended_ns"],
                    by_supervisor=rank in self._ended_here or self._ended_there(rank),
                )
        left = {rank: Exit(signal=signal.SIGKILL, by_supervisor=True) for rank in self._ended_here}
        return left | self._exits

    def gone(self) -> bool:
        """Whether what started the ranks here has ended: no more ends of these will be told."""
        return self._gone()

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs here."""
        exits = self.exits()
        for rank, pid in self.pids().items():
            if rank not in exits:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def end(self) -> None:
        """SIGKILL whatever is left here, and return once nothing is."""
        self._ended_here = set(self.share.ranks) - self.exits().keys()
        ended = {"ranks": sorted(self._ended_here)}
        publish(self.folder / f"ended-{self.share.node.index}.json", ended)
        end_all(self._run, self._spared)
        self.exits()

    def errors_of(self, rank: int, num_lines: int = 20) -> list[str]:
        """The last lines that a rank said on standard error."""
        return _tail(self.folder / f"rank-{rank}.err", num_lines)

    def said(self) -> list[str]:
        """The last lines of what started the ranks."""
        return _tail(self.folder / "launcher.log", 20)

    def output(self) -> str:
        """What rank 0 printed."""
        path = self.folder / "rank-0.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def _ended_there(self, rank: int) -> bool:
        """Whether a supervisor on another machine ended the rank."""
        node = rank // self.share.num_local
        return rank in (published(self.folder / f"ended-{node}.json") or {}).get("ranks", ())

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"


class Engine(Protocol):
    """Starts the ranks of attempts."""

    def start(
        self,
        folder: Path,
        share: Share,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Launch:
        """Start `command` as the ranks of this machine, which write into `folder`."""
        ...

    def close(self) -> None:
        """End what outlives attempts."""
        ...


class Torchrun:
    """Each attempt under a torchrun of its own.

    Args:
        run: folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._child: subprocess.Popen[bytes] | None = None

    def start(
        self,
        folder: Path,
        share: Share,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> Launch:
        """Start the ranks; whatever is left of an attempt before is ended first."""
        end_all(self._run)
        self.close()
        argv = [sys.executable, "-m", "torch.distributed.run", *_meeting(share)]
        argv += [f"--nproc-per-node={share.num_local}", "--max-restarts=0"]
        argv += ["-m", "tapeline.supervise.rank", str(folder), *command]
        parent = os.getpid()
        with (folder / "launcher.log").open("wb") as log:
            self._child = child = subprocess.Popen(
                argv,
                env={**os.environ, **environment, MARK: str(self._run)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  no threads here
            )
        return Launch(self._run, folder, share, lambda: child.poll() is not None)

    def close(self) -> None:
        """Reap the last torchrun, killed if it runs."""
        if self._child:
            self._child.kill()
            self._child.wait()
            self._child = None


def _meeting(share: Share) -> list[str]:
    node = share.node
    if node.number == 1:
        return ["--standalone"]
    where = [f"--master-addr={node.address}", f"--master-port={share.port}"]
    return [f"--nnodes={node.number}", f"--node-rank={node.index}", *where]


def _tail(path: Path, num_lines: int) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - (1 << 14)))
            return stream.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []
