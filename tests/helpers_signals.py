"""A job of several ranks played through step by step, and the evidence that its files would hold.

The simulation knows nothing of the triage's limits: it has computing times, waits for batches, a
collective that begins when the last rank arrives, checkpoints, kernels and signals.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace

import numpy as np

from tapeline.signals import Evidence, Exit, Heartbeat, Kernels, RankEvidence, StepTimes

WALL_NS = 1_700_000_000_000_000_000


@dataclass
class Job:
    """What a job is like; the defaults are healthy. Times in seconds a step."""

    ranks: int = 4
    steps: int = 300
    compute_s: float = 0.050
    compute_cv: float = 0.03
    shared_cv: float = 0.0  # noise that strikes all ranks in the same step
    aligned: bool = True
    data_s: float = 0.001
    collective_s: float = 0.002
    slow_rank: tuple[int, float] | None = None  # computes longer by that factor
    slow_loader: tuple[int, float] | None = None  # waits so long for data
    batch_s: tuple[float, ...] | None = None  # what each rank's loader takes for a batch
    pauses: tuple[float, float] = (0.0, 0.0)  # chance per step and rank, seconds
    checkpoint_every: int = 100
    checkpoint_s: float = 0.1
    kernels: Kernels = field(default_factory=lambda: Kernels(400, 110.0, 0.92))
    windows: int = 6

    def play(self, seed: int) -> Evidence:
        """Run it, and gather."""
        random = np.random.default_rng(seed)
        shape = (self.steps, self.ranks)
        speed = np.ones(self.ranks) * random.uniform(0.99, 1.01, self.ranks)
        if self.slow_rank:
            speed[self.slow_rank[0]] *= self.slow_rank[1]
        compute = self.compute_s * speed * random.lognormal(0, self.compute_cv, shape)
        compute *= random.lognormal(0, self.shared_cv, (self.steps, 1))
        compute += self.pauses[1] * (random.random(shape) < self.pauses[0])
        data = self.data_s * random.lognormal(0, 0.5, shape)
        if self.slow_loader:
            rank, wait_s = self.slow_loader
            data[:, rank] = wait_s * random.lognormal(0, 0.3, self.steps)
        own = compute + data
        collective = self.collective_s * random.lognormal(0, 0.2, (self.steps, 1))
        wait = own.max(axis=1, keepdims=True) - own + (collective if self.ranks > 1 else 0)
        saves = self.steps // self.checkpoint_every
        saving = self.checkpoint_s * random.lognormal(0, 0.1, saves).sum()
        startup, evaluation, other = random.uniform(0.2, 0.6, 3)
        wall = (own + wait).sum(axis=0) + saving + startup + evaluation + other
        spent = {
            "useful": (compute + wait).sum(axis=0),
            "starved": data.sum(axis=0),
            "checkpoint": np.full(self.ranks, saving),
            "lost": np.zeros(self.ranks),
            "startup": np.full(self.ranks, startup),
            "evaluation": np.full(self.ranks, evaluation),
            "other": np.full(self.ranks, other),
        }
        cuts = np.array_split(np.arange(self.steps), self.windows)
        return Evidence(
            self.ranks,
            tuple(
                RankEvidence(
                    rank,
                    host="a",
                    heartbeat=Heartbeat(self.steps, "compute", random.uniform(0, 0.1)),
                    process_state="R",
                    shares={name: float((s / wall)[rank]) for name, s in spent.items()},
                    windows=tuple(
                        StepTimes(own[cut, rank], float(wait[cut, rank].mean())) for cut in cuts
                    ),
                    batch_s=self.batch_s and self.batch_s[rank],
                    kernels=replace(
                        self.kernels, median_us=self.kernels.median_us * random.uniform(0.9, 1.1)
                    ),
                )
                for rank in range(self.ranks)
            ),
            self.aligned,
        )


def changed(evidence: Evidence, rank: int, **fields: object) -> Evidence:
    """The same evidence with other fields of one rank."""
    return replace(
        evidence,
        ranks=tuple(replace(r, **fields) if r.rank == rank else r for r in evidence.ranks),
    )


def stopped_in_a_collective(evidence: Evidence, rank: int, seed: int) -> Evidence:
    """One rank stopped by SIGSTOP, the others waiting for it."""
    random = np.random.default_rng(seed)
    for other in range(evidence.num_ranks):
        beat = Heartbeat(300, "communication", 90 + random.uniform(0, 1))
        evidence = changed(evidence, other, heartbeat=beat, process_state="S")
    return changed(evidence, rank, process_state="T")


def ended(evidence: Evidence, first: int, how: Exit, seed: int) -> Evidence:
    """One rank ends, the others fail because of it, within half a second and in any order."""
    random = np.random.default_rng(seed)
    step = 300 - int(random.integers(0, 2))
    for rank in range(evidence.num_ranks):
        beat = Heartbeat(step, "communication", 30.0)
        later = int(random.integers(0, 500_000_000))
        victims = (
            Exit(
                1,
                exception="RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:29500",
                time_ns=WALL_NS + later - 400_000_000,  # a clock of whole seconds would blame it
            ),
            Exit(signal=signal.SIGTERM, time_ns=WALL_NS + later),
            Exit(signal=signal.SIGKILL, time_ns=WALL_NS + later, by_supervisor=True),
        )
        end = how if rank == first else victims[int(random.integers(0, len(victims)))]
        evidence = changed(evidence, rank, heartbeat=beat, exit=end, process_state=None)
    return evidence
