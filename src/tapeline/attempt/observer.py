"""What every rank writes down about a life: where its time goes, what its machine does, its end.

    ledger/rank-N.jsonl     phases of its time
    heartbeat/rank-N        what it does now
    metrics/rank-N.jsonl    its steps' times and its machine; on rank 0 also what was learnt
    errors/rank-N.txt       one line of JSON and a traceback, of the last life that raised

Nothing here waits for a device or another rank.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from tapeline.checkpoint.preempt import Preempted
from tapeline.clock import Clock, utc
from tapeline.files import atomic_write
from tapeline.ledger import Ledger
from tapeline.runs import MetricsJournal, Probe, RunFolder
from tapeline.training import TrainStep
from tapeline.world import World


def error_path(run: Path, rank: int) -> Path:
    """What a rank wrote down when it raised."""
    return run / "errors" / f"rank-{rank}.txt"


class Observer:
    """One rank's view of one life, from the beginning of its process to `with`'s end.

    Args:
        run: its folder.
        world: all ranks, and which of them this is.
        attempt: which life.
        first: steps done before it.
        clock: for all times.
        began_ns: monotonic time at which this life began, for what was spent before this.
        restored_ns: of that, how long the reading of a checkpoint took.

    Attributes:
        attempt, first, clock: as given.
        ledger: books the phases.
        journal: of metrics.
        writes: whether this is the rank that writes for all.
    """

    def __init__(
        self,
        run: RunFolder,
        world: World,
        *,
        attempt: int,
        first: int,
        clock: Clock,
        began_ns: int,
        restored_ns: int,
    ) -> None:
        self.attempt, self.first, self.clock = attempt, first, clock
        self.writes = world.rank == 0
        self._errors = error_path(run.path, world.rank)
        self.ledger = Ledger(
            run.path,
            world=world,
            attempt=attempt,
            from_step=first,
            clock=clock,
            began_ns=began_ns,
        )
        self.ledger.spent("restore", restored_ns)
        self.journal = MetricsJournal(run.metrics_path(world.rank), attempt)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Preempted):
            self._write_down(error)
        self.ledger.close("ended" if kind is None else kind.__name__)
        self.journal.close()

    def said(self, evidence: str) -> str:
        """Evidence of an end, with what could not be written down."""
        journal = self.journal
        lost = [
            f"{number} {what}"
            for number, what in (
                (self.ledger.failed_writes, "writes of the ledger failed"),
                (journal.failed_writes, "writes of metrics failed"),
                (journal.lost_records, "records of metrics are lost"),
            )
            if number
        ]
        return "; ".join([evidence, *lost])

    def _write_down(self, error: BaseException) -> None:
        now_ns = self.clock.wall_ns()
        told = {
            "attempt": self.attempt,
            "exception": f"{type(error).__name__}: {error}",
            "wall_ns": now_ns,
            "time": utc(now_ns),
            "step": self.ledger.step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        text = json.dumps(told) + "\n" + "".join(traceback.format_exception(error))
        try:
            self._errors.parent.mkdir(exist_ok=True)
            atomic_write(self._errors, text)
        except OSError as failure:  # must not hide what it would have told
            error.add_note(f"It could not be written to {self._errors}: {failure}")


class StepMeter:
    """The hook that journals, at the logging interval, how long steps took and what it took.

    Args:
        observer: whose journal and ledger.
        step: its device is read.
        num_samples: windows that this rank trains on in a step.
        every: steps between two records.

    Attributes:
        sees_waits: whether waiting for other ranks can be told from computing: on a CPU with
            lanes. Elsewhere torch waits inside the backward pass, or the device does.
    """

    def __init__(
        self, observer: Observer, step: TrainStep, *, num_samples: int, every: int
    ) -> None:
        self._journal, self._ledger = observer.journal, observer.ledger
        self._every = every
        self._num_samples = num_samples
        self.sees_waits = step.lanes is not None and step.device.type == "cpu"
        self._step_ns: list[int] = []
        self._wait_ns: list[int] = []
        self._until_ns = self._ledger.in_steps_ns()
        self._probe = Probe(
            torch.get_num_threads(), device=_device_reading(step.device), clock=observer.clock
        )

    def __call__(self, number: int, _: torch.Tensor) -> None:
        """The hook: step `number` has ended."""
        now_ns = self._ledger.in_steps_ns()
        self._step_ns.append(now_ns[0] - self._until_ns[0])
        self._wait_ns.append(now_ns[1] - self._until_ns[1])
        self._until_ns = now_ns
        if number % self._every == 0:
            self.write(number)

    def write(self, number: int) -> None:
        """Journal what was collected up to step `number`."""
        if not self._step_ns:
            return
        figures = self._probe.read(
            len(self._step_ns) * self._num_samples,
            step_ns=self._step_ns,
            collective_wait_ns=self._wait_ns if self.sees_waits else None,
        )
        self._journal.machine(number, figures)
        self._step_ns, self._wait_ns = [], []


def _device_reading(
    device: torch.device,
) -> Callable[[], tuple[int | None, float | None]] | None:
    """How the memory of an accelerator is read; None where there is none."""
    if device.type != "cuda":
        return None

    def read() -> tuple[int | None, float | None]:
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most, None

    return read
