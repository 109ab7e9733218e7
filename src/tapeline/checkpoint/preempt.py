"""Preemption: being told to stop, stopping between two steps, saved, within the grace period.

Covers: SIGTERM (clusters, spot machines), SIGUSR1 (Slurm's `--signal`) and a notice file; the
agreement of all ranks at a step boundary; whether a save fits the grace period. Does not cover
the save itself, nor starting again.

A handler only notes the signal and its time. It may run between any two bytecodes, in the middle
of a collective or of a save, so everything else happens where the loop asks.

Python runs handlers in the main thread only: threads (a loader's, a writer's) notice nothing.
Child processes are another matter. Clusters signal every process of a job, whatever its process
group, and a worker that dies of SIGTERM takes the loader with it: start them in
`children_shielded()`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tapeline.clock import Clock, SystemClock
from tapeline.errors import CheckpointError

# EX_TEMPFAIL of sysexits.h, "try again later": no shell, Python or signal death (128 + n) uses it.
EXIT_PREEMPTED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_NOTICE_POLL_NS = 1_000_000_000  # a look at a network file system takes longer than a short step


class Preempted(SystemExit):
    """The run was stopped from outside after `step` was saved; uncaught, the exit code is 75."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"preempted by {self.reason}; saved at step {self.step}"


class PreemptionGuard:
    """Notes that the run is to stop while its `with` block lasts.

    The handlers that were there are put back afterwards. Blocks may be nested: what the inner one
    notes, the outer one has noted too.

    Args:
        grace_s: from the notice to the kill, as the cluster promises.
        notice_file: stop when this file exists.
        any_rank: True for all ranks if it is called with True on one (an all-reduce); None for
            one rank alone.
        warn: called once with a sentence when a save would not fit the grace period, and again
            after it did and no longer does.
        clock: for how often the file is looked for.

    Raises:
        CheckpointError: on entry, outside the main thread; `grace_s` is not above 0.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        warn: Callable[[str], None],
        notice_file: Path | None = None,
        any_rank: Callable[[bool], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not grace_s > 0:
            raise CheckpointError(
                "grace period",
                expected="a number of seconds above 0",
                found=f"{grace_s:g}",
                fix="Give the time between the notice and the kill",
            )
        self._grace_s = grace_s
        self._warn = warn
        self._notice_file = notice_file
        self._any_rank = any_rank or bool
        self._clock = clock or SystemClock()
        self._before: dict[signal.Signals, Any] = {}
        self._reason: str | None = None
        self._polled_ns: int | None = None
        self._fits = True

    def __enter__(self) -> PreemptionGuard:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "preemption",
                expected="the main thread, the only one that Python gives signals to",
                found=f"thread {threading.current_thread().name}",
                fix="Enter the guard in the main thread and hand it to the loop",
            )
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for one that was not set from Python, and can't be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @property
    def reason(self) -> str | None:
        """What this rank knows the stop is due to; None as long as there is none."""
        return self._reason

    def agreed(self) -> bool:
        """Whether any rank is to stop: called by all ranks at the same step boundaries.

        To be asked in evaluation and warm-up too, wherever ranks are in step.
        """
        self._poll_file()
        agreed = self._any_rank(self._reason is not None)
        if agreed and self._reason is None:
            self._note("a notice to another rank")
        return agreed

    def measured(self, *, save_s: float, poll_s: float) -> None:
        """Take a save's time until it is durable, and the longest time between two questions.

        A notice comes at the worst moment, just after `agreed` said no: both have to fit.
        """
        fits = save_s + poll_s <= self._grace_s
        if self._fits and not fits:
            self._warn(
                f"A preemption would lose work: the grace period is {self._grace_s:g} s, a step "
                f"takes up to {poll_s:.3g} s and a save {save_s:.3g} s. Save faster or more often, "
                "or ask for a longer grace period."
            )
        self._fits = fits

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(signal.Signals(number).name)
        outer = getattr(self._before.get(signal.Signals(number)), "__self__", None)
        if isinstance(outer, PreemptionGuard):
            outer._handle(number, frame)

    def _note(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason

    def _poll_file(self) -> None:
        if self._notice_file is None or self._reason is not None:
            return
        now_ns = self._clock.monotonic_ns()
        if self._polled_ns is None or now_ns - self._polled_ns >= _NOTICE_POLL_NS:
            self._polled_ns = now_ns
            if self._notice_file.exists():
                self._note(f"the notice file {self._notice_file}")


@contextlib.contextmanager
def children_shielded() -> Iterator[None]:
    """Processes (and threads) started in this block are not reached by the signals of a stop.

    They are blocked, not ignored, and only in this thread: one that comes meanwhile reaches this
    process through another thread, or at the end of the block. Such children don't end by
    `terminate()`: use `kill()`, or close what they read from.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
