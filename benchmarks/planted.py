"""Causes planted in real runs, each as data: a model that misbehaves, a setting, a signal.

`diagnosis.py` counts how often `tapeline diagnose` tells them; the tests try each once. Every run
is one of one or two ranks on this machine, forked from a server that imported torch once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tapeline.cli import main
from tapeline.ledger import heartbeat_path, read_heartbeat
from tapeline.signals import Verdict
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

MODEL = '''
import os
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])


class Planted(torch.nn.Module):
    """Computes for so long and waits as told; counts its own forward passes in training."""

    def __init__(self, every_s, slow_rank, rotating_s, raises, size):
        super().__init__()
        self.every_s, self.slow_rank, self.rotating_s = every_s, slow_rank, rotating_s
        self.raises, self.passes = raises, 0
        self.matrix = torch.ones(size, size)

    def forward(self, x):
        if not self.training:
            return x
        self.passes += 1
        self.matrix @ self.matrix  # so that most of the time in kernels is in a large one
        time.sleep(self.every_s * (3 if self.slow_rank == RANK else 1))
        if (self.passes * 2654435761 >> 7) % 2 == RANK:
            time.sleep(self.rotating_s)
        if self.raises == [RANK, self.passes]:
            raise RuntimeError("a fault of its own")
        return x


def model(num_inputs, every_s=0.02, slow_rank=None, rotating_s=0.0, raises=None, size=256,
          collective_s=0.0, fsync_s=0.0, tiny=0):
    slow_down(collective_s, fsync_s)
    layers = [torch.nn.Linear(4, 4) for _ in range(tiny)]
    return torch.nn.Sequential(
        Planted(every_s, slow_rank, rotating_s, raises, size),
        torch.nn.Linear(num_inputs, 4),
        *layers,
        torch.nn.Linear(4, 1),
    )


def slow_down(collective_s, fsync_s):
    send, sync = dist.batch_isend_irecv, os.fsync

    def slow_send(operations):
        time.sleep(collective_s)
        return send(operations)

    def slow_sync(descriptor):
        time.sleep(fsync_s)
        return sync(descriptor)

    if collective_s:
        dist.batch_isend_irecv = slow_send
    if fsync_s:
        os.fsync = slow_sync


def slow_to_make(x, y, draws, seconds):
    time.sleep(seconds)
    return x, y
'''


@dataclass(frozen=True, slots=True)
class Plant:
    """One cause.

    Attributes:
        kind: of the verdict that tells it.
        ranks: that it must name.
        settings: of the run.
        act: what is done to the run meanwhile: (run folder, pids by rank).
        alive: whether it is diagnosed while it goes on.
        num_ranks: of the run.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    act: Callable[[Path, list[int]], None] | None = None
    alive: bool = False
    num_ranks: int = 2

    def told_by(self, verdict: Verdict) -> bool:
        """Whether a verdict tells this cause, and of the rank it was planted in."""
        return verdict.kind == self.kind and verdict.ranks == self.ranks


def _at_step(run: Path, rank: int, step: int, phase: str | None = None) -> None:
    """Return when a rank has done so many steps, and is in a phase."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        beat = read_heartbeat(heartbeat_path(run, rank))
        if beat and beat.step >= step and phase in (None, beat.phase):
            return
        time.sleep(0.0005)
    raise TimeoutError(f"rank {rank} of {run} never got to step {step}")


def _stop_in_a_collective(run: Path, pids: list[int]) -> None:
    # Rank 1 is quicker than rank 0, for which it waits nearly all the time.
    while True:
        _at_step(run, 1, 8, "communication")
        os.kill(pids[1], signal.SIGSTOP)
        beat = read_heartbeat(heartbeat_path(run, 1))
        if beat and beat.phase == "communication":
            break
        os.kill(pids[1], signal.SIGCONT)
    time.sleep(0.3)


def _kill(run: Path, pids: list[int]) -> None:
    _at_step(run, 1, 8)
    os.kill(pids[1], signal.SIGKILL)


def _arguments(**values: object) -> str:
    pairs = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f"model.arguments={{{pairs}}}"


def _strategy(name: str) -> tuple[str, ...]:
    return f"training.strategy={name}", "training.lanes=1"


PLANTS = {
    # Long steps: what other processes take from one is then a small share of it.
    "healthy": Plant("healthy", (), (_arguments(every_s=0.2),)),
    "slow loader": Plant(
        "starvation",
        (),
        ('data.augment=[{name="planted_model:slow_to_make",arguments={seconds=0.12}}]',),
        num_ranks=1,
    ),
    "slow loaders": Plant(  # of several in step only the last one is seen to wait
        "starvation",
        (),
        ('data.augment=[{name="planted_model:slow_to_make",arguments={seconds=0.12}}]',),
    ),
    "slow rank": Plant("persistent straggler", (1,), (_arguments(slow_rank=1),)),
    "slow rank under ddp": Plant(
        "persistent straggler", (1,), (_arguments(slow_rank=1), *_strategy("ddp"))
    ),
    # FSDP2 has many small kernels of its own, beside which the large one must stay the most.
    "slow rank under fsdp2": Plant(
        "persistent straggler", (1,), (_arguments(slow_rank=1, size=512), *_strategy("fsdp2"))
    ),
    "healthy under ddp": Plant("healthy", (), (_arguments(every_s=0.2), *_strategy("ddp"))),
    "healthy under fsdp2": Plant(
        "healthy", (), (_arguments(every_s=0.2, size=512), *_strategy("fsdp2"))
    ),
    "rotating noise": Plant("rotating straggler", (), (_arguments(every_s=0.01, rotating_s=0.03),)),
    "stopped in a collective": Plant(
        "hang", (1,), (_arguments(slow_rank=0),), _stop_in_a_collective, alive=True
    ),
    "a rank raises": Plant("crash", (1,), (_arguments(raises="[1, 12]"),)),
    "killed": Plant("crash", (1,), (), _kill),
    "slow checkpoint": Plant(
        "checkpoint-bound", (), (_arguments(fsync_s=0.01), "checkpoint.every=4")
    ),
    "tiny kernels": Plant(
        "small kernels", (), (_arguments(every_s=0.0, tiny=150, size=2),), num_ranks=1
    ),
    "slow collective": Plant("communication-bound", (), (_arguments(collective_s=0.01),)),
}


@dataclass(slots=True)
class Bed:
    """Where planted runs are made.

    Args:
        folder: for the store, the model and the runs.
        server: that has torch imported, from which ranks are forked.
    """

    folder: Path
    server: multiprocessing.context.ForkServerContext

    def __post_init__(self) -> None:
        write_shards(synthetic_sessions(2, rows=400), self.folder / "store", "mmap")
        (self.folder / "planted_model.py").write_text(MODEL)

    def grow(self, plant: Plant, name: str, *, steps: int = 90) -> tuple[Path, Callable[[], None]]:
        """A planted run, ended unless it is to be diagnosed alive; and how to end what is left."""
        run = self.folder / name
        config = self.folder / f"{name}.toml"
        config.write_text(
            f"""
            [data]
            store = "store"
            [windows]
            length = 4
            horizon = 3
            [model]
            factory = "planted_model:model"
            [training]
            steps = {steps}
            batch = 12
            lanes = 2
            [validation]
            fraction = 0.0
            [checkpoint]
            every = 1000
            """
        )
        overrides = [word for setting in plant.settings for word in ("--set", setting)]
        argv = ["train", str(config), "--out", str(run), *overrides]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [
            self.server.Process(target=_rank, args=(rank, plant.num_ranks, port, run, argv))
            for rank in range(plant.num_ranks)
        ]
        for process in ranks:
            process.start()

        def end() -> None:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()

        try:
            if plant.act:
                plant.act(run, [process.pid or 0 for process in ranks])
            if not plant.alive:
                for process in ranks:
                    process.join(100)
        except BaseException:
            end()
            raise
        return run, end


def _rank(rank: int, num_ranks: int, port: int, run: Path, argv: list[str]) -> None:
    with run.with_name(f"{run.name}.log-{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.argv = ["tapeline", *argv]
    main()
