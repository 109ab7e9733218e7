"""`tapeline …` in real processes, one for each rank, which can really be killed.

Covers: starting them in the environment that torchrun gives, and what they print. torchrun itself
is not between: it ends all ranks soon after one, and here each is killed and ends by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tapeline.errors import RunError

POLL_S = 0.001
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class Command:
    """One command on some ranks; leaving the block kills what is still running.

    Args:
        arguments: of `python -m module`.
        ranks: how many processes; one is given no rank.
        threads: for libraries that read their number from the environment; None leaves it as it
            is. torch's own number is the configuration's.
    """

    def __init__(
        self,
        *arguments: str,
        module: str = "tapeline",
        ranks: int = 1,
        threads: int | None = None,
    ) -> None:
        self._title = f"{module} {' '.join(arguments)}"
        self._folder = Path(tempfile.mkdtemp(prefix="tapeline-"))
        port = _free_port()
        self.processes = [
            start(
                [module, *arguments],
                _environment(rank, ranks, port, threads),
                self._folder / f"rank-{rank}",
            )
            for rank in range(ranks)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.processes)))
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """Whether every rank is alive."""
        return all(process.poll() is None for process in self.processes)

    def kill(self, ranks: Collection[int]) -> None:
        """Send SIGKILL to some ranks."""
        for rank in ranks:
            self.processes[rank].kill()

    def wait(self, limit_s: float | None = None) -> list[int]:
        """The exit code of each rank; one that is still alive after `limit_s` is killed."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for process in self.processes:
            try:
                process.wait(deadline and max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return [process.wait() for process in self.processes]

    def data(self) -> dict[str, Any]:
        """What rank 0 printed as JSON, once every rank has ended well.

        Raises:
            RunError: one didn't.
        """
        codes = self.wait()
        if any(codes):
            raise RunError(
                self._title,
                expected="exit code 0",
                found=f"{next(filter(None, codes))}: {self.last_line()}",
                fix="Run the command by itself to see all it says",
            )
        values: dict[str, Any] = json.loads((self._folder / "rank-0.out").read_text())
        return values

    def last_line(self) -> str:
        """The last line on standard error, of the first rank that ended badly by itself."""
        codes = [process.poll() for process in self.processes]
        failed = [rank for rank, code in enumerate(codes) if code and code > 0]
        text = (self._folder / f"rank-{failed[0] if failed else 0}.err").read_text()
        lines = text.strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def start(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """Start `python -m …`; what it prints goes to `output`.out and .err."""
    with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],  # -P: no module of the working folder
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environment),
        )


def _environment(rank: int, ranks: int, port: int, threads: int | None) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if name not in _OF_TORCHRUN}
    if threads is not None:
        environment |= dict.fromkeys(_OF_THREADS, str(threads))
    if ranks > 1:
        values = (rank, ranks, rank, "127.0.0.1", port)
        environment |= {n: str(v) for n, v in zip(_OF_TORCHRUN, values, strict=True)}
    return environment


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
