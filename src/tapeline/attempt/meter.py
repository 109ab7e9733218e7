"""What steps take: their times, the machine's figures, and once in a life the kernels in one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tapeline.attempt.observer import Observer
from tapeline.attempt.parts import Parts
from tapeline.runs import MachineFigures, Probe
from tapeline.training.distribute import time_waits
from tapeline.training.kernels import KernelProfile

JOURNAL_NS = 250_000_000  # records of fast steps, oftener, would cost more than they tell
_WARM_UP_STEPS, _COMPARED_STEPS = 5, 10


class StepMeter:
    """The hook that takes how long steps took; journals it, with the machine's figures.

    Journalling is left to whoever journals what was learnt, so that both are of the same steps.

    Args:
        observer: whose journal and ledger; waiting for other ranks is booked there, where the
            host can tell it from computing.
        parts: what takes steps, and the loader that feeds it.
    """

    def __init__(self, observer: Observer, parts: Parts) -> None:
        self._journal, self._ledger = observer.journal, observer.ledger
        self._clock = observer.clock
        self._written_ns = self._clock.monotonic_ns()
        self._num_samples = parts.config.training.batch // parts.rows.size
        self._loader, self._made = parts.loader, (0, 0)
        self._sees_waits = time_waits(parts.step, lambda: observer.ledger.span("communication"))
        self._step_ns: list[int] = []
        self._wait_ns: list[int] = []
        self._until_ns = self._ledger.in_steps_ns()
        self._probe = Probe(
            torch.get_num_threads(), device=_device_reading(parts.step.device), clock=observer.clock
        )

    def __call__(self, _: int, __: torch.Tensor) -> None:
        """The hook: a step has ended."""
        now_ns = self._ledger.in_steps_ns()
        self._step_ns.append(now_ns[0] - self._until_ns[0])
        self._wait_ns.append(now_ns[2] - self._until_ns[2])
        self._until_ns = now_ns

    def write_if_due(self, number: int) -> MachineFigures | None:
        """Journal what was collected up to step `number`, at most a few times a second."""
        if self._clock.monotonic_ns() - self._written_ns < JOURNAL_NS:
            return None
        return self.write(number)

    def write(self, number: int) -> MachineFigures | None:
        """Journal what was collected up to step `number`; None if that is nothing."""
        self._written_ns = self._clock.monotonic_ns()
        if not self._step_ns:
            return None
        figures = self._probe.read(
            len(self._step_ns) * self._num_samples,
            step_ns=self._step_ns,
            collective_wait_ns=self._wait_ns if self._sees_waits else None,
            batch_s=self._batch_s(),
        )
        self._journal.machine(number, figures)
        self._step_ns, self._wait_ns = [], []
        return figures

    def _batch_s(self) -> float | None:
        """What the loader took for a batch since the last time; None if it made none."""
        made = self._loader.num_made, self._loader.making_ns
        num, spent_ns = made[0] - self._made[0], made[1] - self._made[1]
        self._made = made
        return spent_ns / num / 1e9 if num else None


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


class KernelHooks:
    """Profiles one step of each life, early on, where this rank writes.

    Args:
        observer: whose journal and ledger.
        device: that the steps are done on.
    """

    def __init__(self, observer: Observer, device: torch.device) -> None:
        self._observer = observer
        self._profile = KernelProfile(device)
        self._from_step = observer.first + _WARM_UP_STEPS
        self._at_step = self._from_step + _COMPARED_STEPS
        self._computed_ns = 0
        self._usual_ns = 0.0

    def begin(self, number: int, _: torch.Tensor) -> None:
        """The hook after all others."""
        ledger = self._observer.ledger
        if not self._observer.writes:
            return
        if number == self._from_step:
            self._computed_ns = ledger.in_steps_ns()[1]
        elif number == self._at_step:
            now_ns = ledger.in_steps_ns()[1]
            self._usual_ns = (now_ns - self._computed_ns) / _COMPARED_STEPS
            self._computed_ns = now_ns
            with ledger.span("startup"):  # once in a life, not in its steps
                self._profile.begin()

    def close(self) -> None:
        """End a profile that no step ended: the process would crash as it exits."""
        self._profile.end()

    def end(self, number: int, _: torch.Tensor) -> None:
        """The hook right after the step."""
        if number != self._at_step + 1:
            return
        ledger = self._observer.ledger
        own_ns = ledger.in_steps_ns()[1] - self._computed_ns
        with ledger.span("startup"):
            found = self._profile.end()
        if found is None:
            return
        # The step takes longer by being profiled, or the kernels by what else the machine does.
        longer_us = max(1.0, own_ns, self._usual_ns) / 1e3
        self._observer.journal.profile(
            number,
            per_step=found.number,
            median_us=found.median_us,
            busy=min(1.0, found.total_us / longer_us),
        )
