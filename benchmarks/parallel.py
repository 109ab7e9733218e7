"""The price of exactness: steps with lanes beside one whole batch, and beside DDP on two ranks.

    python benchmarks/parallel.py [--quick] [--json]

One thread a rank; the two ranks talk over gloo on this machine. Subjects take turns step by step
within the same processes. One rank is measured in processor time, which others on the machine
don't lengthen much; two ranks, which wait for each other, in wall time. Covers the CPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Row, Samples, main
from torch import Tensor, nn

from tapeline.training import TrainStep
from tapeline.training.determinism import make_deterministic
from tapeline.training.distribute import distribute
from tapeline.training.models import perceptron

ROWS, COLUMNS = 20, 41
METRIC, UNIT = "ms_per_step", "ms"
Step = Callable[[int], object]


class Transformer(nn.Module):
    """Six encoder layers of width 256 over the rows of a window: 4.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(COLUMNS, 256)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        """From `[n, T · columns]` to `[n, 1]`."""
        return self.head(self.encoder(self.embed(x.view(len(x), ROWS, COLUMNS))).mean(dim=1))


@dataclass(frozen=True)
class Case:
    """A model, its batch, and the divisor of its repetitions."""

    build: Callable[[], nn.Module]
    batch: int
    cost: int

    def examples(self) -> tuple[Tensor, Tensor]:
        """One batch."""
        return torch.randn(self.batch, ROWS * COLUMNS), torch.randn(self.batch)


CASES = {
    "57 k perceptron": Case(perceptron, batch=256, cost=1),
    "5 M transformer": Case(Transformer, batch=64, cost=13),
}


def step_of(model: nn.Module, **options: int) -> TrainStep:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    return TrainStep(model, optimizer, **options)


def interleaved(
    subjects: dict[str, Step], repetitions: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each subject's steps, after one that doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(repetitions + 1):
        for name, step in subjects.items():
            begin = clock()
            step(number)
            if number:
                times[name].append(1e3 * (clock() - begin))
    return times


def one_rank(case: Case, repetitions: int) -> dict[str, list[float]]:
    build, (x, y) = case.build, case.examples()
    whole, free = step_of(build()), step_of(build())
    lanes = {n: step_of(build(), lanes=n) for n in (4, 8)}

    def without_the_switch(number: int) -> None:
        torch.use_deterministic_algorithms(False)
        free(number, x, y)
        torch.use_deterministic_algorithms(True)

    subjects: dict[str, Step] = {
        "whole batch": lambda number: whole(number, x, y),
        "whole batch, switch off": without_the_switch,
    }
    for count, step in lanes.items():
        subjects[f"{count} lanes"] = lambda number, step=step: step(number, x, y)
    return interleaved(subjects, repetitions, time.process_time)


def on_rank(rank: int, folder: str, repetitions: int) -> None:
    """Both cases on one of two ranks; rank 0 leaves its times in the folder."""
    make_deterministic(threads=1)
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    found = {}
    for name, case in CASES.items():
        x, y = case.examples()
        half = slice(rank * case.batch // 2, (rank + 1) * case.batch // 2)
        ddp = step_of(distribute(case.build(), "ddp"))
        lanes = {n: step_of(case.build(), lanes=n) for n in (2, 4)}
        subjects: dict[str, Step] = {
            "DDP": lambda number, ddp=ddp, x=x[half], y=y[half]: ddp(number, x, y)
        }
        for count, step in lanes.items():
            subjects[f"{count} lanes"] = lambda n, step=step, x=x, y=y: step(n, x, y)
        found[name] = interleaved(subjects, repetitions // case.cost, time.perf_counter)
    if rank == 0:
        torch.save(found, Path(folder) / "times.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool) -> list[Row]:
    """Every case on one rank and on two."""
    make_deterministic(threads=1)
    samples = Samples()
    repetitions = 40 if quick else 150

    def add(case: str, times: dict[str, list[float]]) -> None:
        for subject, values in times.items():
            for value in values:
                samples.add(case, subject, METRIC, value, UNIT)

    for name, case in CASES.items():
        add(f"{name}, 1 rank", one_rank(case, repetitions // case.cost))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_rank, (folder, repetitions), nprocs=2)
        for name, times in torch.load(Path(folder) / "times.pt").items():
            add(f"{name}, 2 ranks", times)
    return samples.rows(METRIC, ("whole batch", "DDP"))


if __name__ == "__main__":
    main(__doc__, measure)
