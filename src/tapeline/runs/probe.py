"""What a rank's machine does, read at the logging interval for `MetricsJournal.machine`.

Covers the process: its memory and its share of the processor. The figures of an accelerator are
handed in, as whoever trains on it has them. What can't be read is None.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from tapeline.clock import Clock, SystemClock
from tapeline.runs.metrics import MachineFigures

DeviceReading = tuple[int | None, float | None]


class Probe:
    """Reads what changed since it was made or read last.

    Args:
        num_threads: threads that compute; a process that uses all of them fully has a
            utilisation of 1.
        device: bytes in use at most since the last call, and utilisation from 0 to 1, of an
            accelerator; its utilisation then stands for that of the processor.
    """

    def __init__(
        self,
        num_threads: int = 1,
        *,
        device: Callable[[], DeviceReading] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._num_threads = num_threads
        self._device = device
        self._clock = clock or SystemClock()
        self._process = psutil.Process()
        self._wall_ns, self._busy_ns = self._clock.monotonic_ns(), time.process_time_ns()

    def read(
        self,
        num_samples: int,
        *,
        step_ns: Sequence[int] | None = None,
        collective_wait_ns: Sequence[int] | None = None,
        batch_s: float | None = None,
    ) -> MachineFigures:
        """The figures of the steps since the last call.

        Args:
            num_samples: windows that this rank trained on since then.
            step_ns: how long each step took.
            collective_wait_ns: the part of each that went by in collectives.
            batch_s: what the loader took to make a batch.
        """
        wall_ns, busy_ns = self._clock.monotonic_ns(), time.process_time_ns()
        passed_ns, used_ns = wall_ns - self._wall_ns, busy_ns - self._busy_ns
        self._wall_ns, self._busy_ns = wall_ns, busy_ns
        if self._device:
            device_bytes, utilisation = self._device()
        else:
            device_bytes, utilisation = None, self._share(used_ns, passed_ns)
        return MachineFigures(
            step_ns=step_ns,
            collective_wait_ns=collective_wait_ns,
            samples_per_s=1e9 * num_samples / passed_ns if passed_ns else None,
            rss_bytes=self._process.memory_info().rss,
            device_bytes=device_bytes,
            utilisation=utilisation,
            batch_s=batch_s,
        )

    def _share(self, used_ns: int, passed_ns: int) -> float | None:
        # More threads than were told, the loader's for one, don't make it more than full.
        return min(1.0, used_ns / passed_ns / self._num_threads) if passed_ns else None
