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
from types import TracebackType

import torch

from tapeline.attempt.course import RolledBack
from tapeline.attempt.ending import ORDERLY
from tapeline.clock import Clock, utc
from tapeline.files import atomic_write
from tapeline.ledger import Ledger
from tapeline.runs import MetricsJournal, RunFolder
from tapeline.training.timer import timer_of
from tapeline.world import World


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
        device: that the steps are done on.

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
        device: torch.device,
    ) -> None:
        self.attempt, self.first, self.clock = attempt, first, clock
        self.writes = world.rank == 0
        self._errors = run.errors_path(world.rank)
        self.ledger = Ledger(
            run.path,
            world=world,
            attempt=attempt,
            from_step=first,
            clock=clock,
            device=timer_of(device, clock),
            began_ns=began_ns,
        )
        self.ledger.spent("restore", restored_ns)
        self.journal = MetricsJournal(run.metrics_path(world.rank), attempt)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (*ORDERLY, RolledBack)):
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
