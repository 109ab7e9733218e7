"""The time budget of a step: how long loading, batching and computing take, by kind of store.

Measures; draws nothing. The cases are interleaved repetition by repetition, so that a change of
the machine's load meets all of them alike, and each figure is a median.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tapeline.errors import StoreError
from tapeline.machine import Machine
from tapeline.session import Float32Array, Int64Array
from tapeline.store import FORMATS, Shards, open_reader, stream_sessions, write_shards
from tapeline.training import TrainStep
from tapeline.training.models import perceptron
from tapeline.windows import BatchSource, WindowIndex, WindowSampler, make_batch

Batch = tuple[Float32Array, Float32Array]
_SIZES: Final = {"mmap": 1, "npy": 1, "csv": 3}  # at most, of the arrays' bytes
Way = Callable[[Int64Array, Int64Array], Batch]


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """What one step costs with one kind of store and one way to batch.

    Attributes:
        case: format and way, such as "mmap gathered".
        load_ms: reading the whole store, spread over the steps of an epoch.
        batch_ms: making one batch.
        compute_ms: forward, backward and update; the same for all cases.
        compute_bf16_ms: the same with the forward pass in bfloat16.
        load_epoch_ms: reading the whole store once.
    """

    case: str
    load_ms: float
    batch_ms: float
    compute_ms: float
    compute_bf16_ms: float
    load_epoch_ms: float

    @property
    def data_share(self) -> float:
        """The share of a serial step that waits for data."""
        data = self.load_ms + self.batch_ms
        return data / (data + self.compute_ms)


@dataclass(frozen=True, slots=True)
class Budget:
    """The budget of every case, measured in one run on one machine.

    Attributes:
        rows: one for each case.
        store_rows, columns, batch, T: the size of what was measured.
        steps_per_epoch: batches that hold every window once.
        repetitions: how often each figure was taken.
        machine: where.
    """

    rows: tuple[BudgetRow, ...]
    store_rows: int
    columns: int
    batch: int
    T: int
    steps_per_epoch: int
    repetitions: int
    machine: Machine

    def row(self, case: str) -> BudgetRow:
        """The row of one case."""
        return next(row for row in self.rows if row.case == case)

    @property
    def num_parameters(self) -> int:
        """Of the model that computed."""
        return sum(p.numel() for p in perceptron(self.T * self.columns).parameters())

    def ratios(self) -> dict[str, float]:
        """How many times longer the other ways to batch take than the gather."""
        gathered = self.row("mmap gathered").batch_ms
        return {
            "row-index gather / gather": self.row("mmap row-index").batch_ms / gathered,
            "window loop / gather": self.row("mmap looped").batch_ms / gathered,
        }

    def project(self, store_rows: int) -> list[dict[str, Any]]:
        """An epoch over `store_rows` rows at the measured rates: a projection, not a measurement.

        Loading grows with the rows; batching and computing stay what they are per step, which
        holds while the store fits the page cache. CSV and npy keep every row in memory.
        """
        scale = store_rows / self.store_rows
        steps = math.ceil(self.steps_per_epoch * scale)
        store_bytes = store_rows * self.columns * 4
        return [
            {
                "case": row.case,
                "bytes": store_bytes,
                "memory_bytes": 0 if row.case.startswith("mmap") else store_bytes,
                "load_s": row.load_epoch_ms * scale / 1e3,
                "batch_s": row.batch_ms * steps / 1e3,
                "compute_s": row.compute_ms * steps / 1e3,
                "epoch_s": (row.load_epoch_ms * scale + (row.batch_ms + row.compute_ms) * steps)
                / 1e3,
            }
            for row in self.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything measured, as JSON can hold it."""
        return {
            "machine": self.machine.as_dict(),
            "store_rows": self.store_rows,
            "columns": self.columns,
            "batch": self.batch,
            "T": self.T,
            "steps_per_epoch": self.steps_per_epoch,
            "repetitions": self.repetitions,
            "num_parameters": self.num_parameters,
            "rows": [
                {
                    "case": row.case,
                    "load_ms": row.load_ms,
                    "batch_ms": row.batch_ms,
                    "compute_ms": row.compute_ms,
                    "compute_bf16_ms": row.compute_bf16_ms,
                    "load_epoch_ms": row.load_epoch_ms,
                    "data_share": row.data_share,
                }
                for row in self.rows
            ],
            "ratios": self.ratios(),
        }


def measure_budget(
    root: Path,
    *,
    T: int = 20,
    horizon: int = 10,
    batch: int = 256,
    repetitions: int = 50,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Budget:
    """Measure the budget on a store that is there in all three formats (see `all_formats`).

    Args:
        root: the store's folder.
        T, horizon, batch: the shape of an example and of a batch.
        repetitions: of each batch and step; loading is repeated a tenth as often, at least 3 times.
        threads: of torch; one by default, since on busy cores more take longer, not less.
        progress: called with the repetitions done and in all.
    """
    torch.set_num_threads(threads)
    opened = {fmt: Shards(root, fmt) for fmt in FORMATS}
    mapped = opened["mmap"]
    sampler = WindowSampler(WindowIndex(mapped, T, horizon), batch=batch)
    ways = _ways(opened, T, horizon, batch)
    steps = _steps(perceptron(T * len(mapped.columns)))
    times: dict[str, list[float]] = {name: [] for name in (*ways, *FORMATS, *steps)}
    load_every = max(1, repetitions // max(3, repetitions // 10))
    _repeat_once(
        ways, steps, sampler, {name: [] for name in times}, 0
    )  # compile, fault in, warm up
    for number in range(repetitions):
        _repeat_once(ways, steps, sampler, times, number)
        if number % load_every == 0:
            for fmt in FORMATS:
                times[fmt].append(_timed(lambda fmt=fmt: Shards(root, fmt).mm.sum()))  # type: ignore[misc]
        if progress:
            progress(number + 1, repetitions)
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    steps_per_epoch = math.ceil(sampler.index.num_windows / batch)
    load_ms = {case: medians[case.split()[0]] for case in ways}
    return Budget(
        rows=tuple(
            BudgetRow(
                case,
                load_ms=load_ms[case] / steps_per_epoch,
                batch_ms=medians[case],
                compute_ms=medians["compute"],
                compute_bf16_ms=medians["compute in bfloat16"],
                load_epoch_ms=load_ms[case],
            )
            for case in ways
        ),
        store_rows=int(mapped.offsets[-1]),
        columns=len(mapped.columns),
        batch=batch,
        T=T,
        steps_per_epoch=steps_per_epoch,
        repetitions=repetitions,
        machine=Machine.here(),
    )


def _ways(opened: dict[str, Shards], T: int, horizon: int, batch: int) -> dict[str, Way]:
    """The ways to make a batch that are compared, each from the sampler's windows."""
    mapped = opened["mmap"]
    source = BatchSource(mapped, T, horizon)
    out = source.empty(batch)
    first_rows = mapped.offsets[:-1]
    matrix = np.asarray(mapped.mm)  # a plain array, as the loop and the gather have it

    def row_index(sessions: Int64Array, starts: Int64Array) -> Batch:
        rows = (first_rows[sessions] + starts)[:, None] + np.arange(T)
        last = rows[:, -1]
        x = matrix[rows].reshape(len(starts), -1)
        return x, matrix[last + horizon, 0] - matrix[last, 0]

    def looped(shards: Shards) -> Way:
        return lambda sessions, starts: make_batch(shards, sessions, starts, T, horizon)

    return {
        **{f"{fmt} looped": looped(opened[fmt]) for fmt in ("csv", "npy", "mmap")},
        "mmap row-index": row_index,
        "mmap gathered": lambda sessions, starts: source.batch(sessions, starts, out=out),
    }


def _steps(model: torch.nn.Module) -> dict[str, TrainStep]:
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "compute": TrainStep(model, optimizer),
        "compute in bfloat16": TrainStep(model, optimizer, precision="bfloat16"),
    }


def _repeat_once(
    ways: dict[str, Way],
    steps: dict[str, TrainStep],
    sampler: WindowSampler,
    times: dict[str, list[float]],
    number: int,
) -> None:
    sessions, starts = sampler.next()
    for case, way in ways.items():
        times[case].append(_timed(lambda way=way: way(sessions, starts)))  # type: ignore[misc]
    x, y = (torch.from_numpy(a) for a in ways["mmap gathered"](sessions, starts))
    for name, step in steps.items():
        times[name].append(_timed(lambda step=step: step(number, x, y)))  # type: ignore[misc]


def _timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def all_formats(root: Path, out: Path | None = None) -> None:
    """Write a store in all three formats, one session in memory at a time.

    Args:
        root: the store, in one format or more.
        out: where to write, for a store that isn't to be touched; by default the store itself gets
            the formats it lacks.

    Raises:
        StoreError: there is no store, or no room on the disk; or the formats that lie in the store
            hold different sessions.
    """
    to = root if out is None else out
    source = open_reader(root)
    missing = [fmt for fmt in FORMATS if not (to / fmt).exists()]
    raw_bytes = sum(source.index.raw_bytes(n) for n in range(len(source.index.sessions)))
    needed = raw_bytes * sum(_SIZES[fmt] for fmt in missing)
    there = next(path for path in (to, *to.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise StoreError(
            to,
            expected=f"room for about {needed:,} bytes, the store in {', '.join(missing)}",
            found=f"{free:,} bytes free",
            fix="Make room, or set TMPDIR to a folder on a larger disk" if out else "Make room",
        )
    for fmt in missing:
        write_shards(stream_sessions(root), to, fmt)
    fingerprints = {fmt: Shards(to, fmt).fingerprint for fmt in FORMATS}
    if len(set(fingerprints.values())) > 1:
        raise StoreError(
            to,
            expected="the same sessions in every format",
            found=", ".join(f"{fmt} {value[:8]}" for fmt, value in fingerprints.items()),
            fix="Convert the right one again with `tapeline store convert --replace`",
        )
