"""Loading, measured: ways to make a batch beside the copy of its bytes, and what a step waits.

    python benchmarks/loaders.py [--quick] [--json]

Covers one process on the host. The large store (1.92 GB) is made once, in the system's folder for
temporary files; `--quick` takes a tenth of it.
"""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Row, Samples, main
from torch.utils.data import DataLoader, Dataset

from tapeline.store import Shards, write_shards
from tapeline.tape.synthetic import synthetic_session
from tapeline.training import TrainStep
from tapeline.training.models import perceptron
from tapeline.windows import (
    BatchSource,
    Feed,
    Form,
    Loader,
    Normaliser,
    Shuffled,
    WindowIndex,
    WindowSampler,
    make_batch,
)

BATCH, HORIZON = 256, 10
SMALL, LARGE, LARGER = (8, 1_140), (250, 46_800), (25, 46_800)


class Windows(Dataset[tuple[np.ndarray, np.ndarray]]):
    """What people write: a map-style dataset over the matrix, one window or one batch at a time."""

    def __init__(self, shards: Shards, index: WindowIndex) -> None:
        self.matrix, self.offsets, self.index = np.asarray(shards.mm), shards.offsets, index

    def __len__(self) -> int:
        return self.index.num_windows

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = self.gather(np.array([number]))
        return x[0], y[0]

    def gather(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A batch by row indices."""
        sessions, starts = self.index.locate(numbers)
        first = self.offsets[sessions] + starts
        last = first + self.index.T - 1
        x = self.matrix[first[:, None] + np.arange(self.index.T)].reshape(len(numbers), -1)
        return x, self.matrix[last + HORIZON, 0] - self.matrix[last, 0]


class Batched(Windows):
    """The same with `__getitems__`: the whole batch in one gather."""

    def __getitems__(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return self.gather(np.array(numbers))


def as_tensors(batch: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def torch_loader(dataset: Windows, num_workers: int) -> Iterator[Any]:
    whole = as_tensors if isinstance(dataset, Batched) else None
    generator = torch.Generator().manual_seed(0)
    # A sampler with replacement: a permutation of 11.7 million numbers is 94 MB and half a second.
    drawn = torch.utils.data.RandomSampler(dataset, True, 1 << 20, generator=generator)
    return endless(
        DataLoader(dataset, BATCH, sampler=drawn, collate_fn=whole, num_workers=num_workers)
    )


def subjects(shards: Shards, index: WindowIndex) -> dict[str, Callable[[], Any]]:
    """Each subject makes its next batch when it is called."""
    width = index.T * shards.mm.shape[1]
    ones, to = np.ones((BATCH, width), np.float32), np.empty((BATCH, width), np.float32)
    sampler, looped = (WindowSampler(index, batch=BATCH, seed=s) for s in (1, 2))
    plain, batched = Windows(shards, index), Batched(shards, index)
    scale = Normaliser.fit(shards, WindowIndex(shards, sessions=[0]))
    ours = {
        "tapeline": Form(scale=scale),
        "tapeline not normalised": Form(),
        "tapeline bfloat16": Form(scale=scale, dtype="bfloat16"),
    }
    source, order = BatchSource(shards, index.T, HORIZON, scale=scale), Shuffled(0)
    blocks, out, starts = source.blocks(index), source.empty(BATCH), itertools.count(0, BATCH)

    def gather() -> None:
        """The gather alone: positions drawn, found, copied, scaled, targets; one buffer."""
        start = next(starts) % (index.num_windows - BATCH)
        for draw in order.draws(index.num_windows, 0, start, start + BATCH):
            source.draw(draw, blocks, *out)

    rng = np.random.default_rng(0)
    found: dict[str, Callable[[], Any]] = {
        "copy": lambda: np.copyto(to, ones),
        "row-index gather": lambda: plain.gather(rng.integers(0, index.num_windows, BATCH)),
        "window loop": lambda: make_batch(shards, *looped.next(), index.T, HORIZON),
        "tapeline gather": gather,
        "sampler + row-index gather": lambda: gather_rows(shards, index.T, *sampler.next()),
    }
    for name, form in ours.items():
        batches = iter(Loader(shards, index, Shuffled(0), BATCH, form=form, feed=Feed(0)))
        found[name] = lambda batches=batches: next(batches)  # type: ignore[misc]
    for name, dataset, workers in (
        ("DataLoader per item 0w", plain, 0),
        ("DataLoader __getitems__ 0w", batched, 0),
        ("DataLoader per item 2w", plain, 2),
        ("DataLoader __getitems__ 2w", batched, 2),
    ):
        loaded = torch_loader(dataset, workers)
        found[name] = lambda loaded=loaded: next(loaded)  # type: ignore[misc]
    return found


def kernels_loaded() -> None:
    """Wait for the threads that load them; until then torch gathers."""
    for thread in threading.enumerate():
        if thread.name == "tapeline-kernel":
            thread.join()


def gather_rows(shards: Shards, T: int, sessions: np.ndarray, starts: np.ndarray) -> Any:
    first = shards.offsets[sessions] + starts
    last = first + T - 1
    matrix = np.asarray(shards.mm)
    x = matrix[first[:, None] + np.arange(T)].reshape(len(first), -1)
    return x, matrix[last + HORIZON, 0] - matrix[last, 0]


def batches(case: str, shards: Shards, T: int, repetitions: int, samples: Samples) -> None:
    """Time and rate of each subject's batch, in turns."""
    gigabytes = BATCH * T * shards.mm.shape[1] * 4 / 1e9
    index = WindowIndex(shards, T, HORIZON)
    ways = subjects(shards, index)
    for way in ways.values():  # load kernels, start workers
        for _ in range(5):
            way()
    kernels_loaded()
    slow = {name for name in ways if "loop" in name or "per item" in name or "2w" in name}
    for number in range(repetitions):
        for name, way in ways.items():
            if name in slow and number % 10:
                continue
            start = time.perf_counter()
            in_a_row = 1 if name in slow else 64  # enough to find its own data in the caches
            for _ in range(in_a_row):
                way()
            taken_s = (time.perf_counter() - start) / in_a_row
            samples.add(case, name, "ms_per_batch", 1e3 * taken_s, "ms")
            samples.add(case, name, "gb_per_s", gigabytes / taken_s, "GB/s")


def stepping(case: str, shards: Shards, T: int, rounds: int, samples: Samples) -> None:
    """The step of the reference model on one fixed batch, and with the loader; in turns.

    Batches made beforehand, several in turn and no loader, tell what is the memory's: the fixed
    one lies in the core's own cache, what comes from a loader never does.
    """
    index = WindowIndex(shards, T, HORIZON)
    form = Form(0, Normaliser.fit(shards, WindowIndex(shards, sessions=[0])))
    model = perceptron(T * len(shards.columns))
    step = TrainStep(model, torch.optim.Adam(model.parameters()))
    feeds = {"tapeline": Feed(2), "tapeline depth 0": Feed(0)}
    sources: dict[str, Iterator[Any]] = {
        name: iter(Loader(shards, index, batch=BATCH, form=form, feed=feed))
        for name, feed in feeds.items()
    }
    for source in sources.values():
        made = [tuple(part.clone() for part in next(source)) for _ in range(16)]
    fixed = made[0]
    for num in (4, 16):
        sources[f"no loader, {num} batches in turn"] = itertools.cycle(made[:num])
    kernels_loaded()
    for turn in range(rounds + 1):
        fixed_s, _ = steps(step, itertools.repeat(fixed))
        if turn:  # the first warms up
            samples.add(case, "fixed batch", "step_ms", 1e3 * fixed_s, "ms")
        for name, source in sources.items():
            taken_s, waited_s = steps(step, source)
            if turn:
                samples.add(case, name, "step_ms", 1e3 * taken_s, "ms")
                samples.add(case, name, "step_ratio", taken_s / fixed_s, "")
                samples.add(case, name, "wait_share", waited_s / taken_s, "")


def steps(step: TrainStep, source: Iterator[Any], num: int = 100) -> tuple[float, float]:
    """Seconds a step takes, and of them those waited for its batch."""
    waited, start = 0.0, time.perf_counter()
    for number in range(num):
        asked = time.perf_counter()
        x, y = next(source)
        waited += time.perf_counter() - asked
        step(number, x, y)
    return (time.perf_counter() - start) / num, waited / num


FIRST = """
import json, sys, time
from tapeline.store import Shards
from tapeline.windows import Feed, Loader, WindowIndex
import torch
torch.set_num_threads(1)
def private_mb():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) / 1024
before = private_mb()
shards = Shards(sys.argv[1])
start = time.perf_counter()
loader = Loader(shards, WindowIndex(shards, int(sys.argv[2]), 10))
batches = iter(loader)
next(batches)
first_batch_s = time.perf_counter() - start
peak, flat = private_mb(), []
for _ in range(20):
    next(batches)
    time.sleep(0.1)
per_epoch = int(sys.argv[3]) or -(-loader.plan.num // 256)
for epoch in range(10):
    for _ in range(per_epoch):
        next(batches)
    peak = max(peak, private_mb())
    flat.append(private_mb())
print(json.dumps({"first_batch_s": first_batch_s, "peak_private_mb": peak - before,
    "growth_10_epochs_mb": flat[-1] - flat[1],
    "state_bytes": len(json.dumps(loader.state_dict(), separators=(",", ":")))}))
batches.close()
"""


def opening(case: str, root: Path, T: int, times: int, per_epoch: int, samples: Samples) -> None:
    """A fresh process: first batch after open, private memory, the state's size."""
    units = {"first_batch_s": "s", "state_bytes": "bytes"}
    command = [sys.executable, "-c", FIRST, str(root), str(T), str(per_epoch)]
    for _ in range(times):
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name, value in json.loads(told).items():
            samples.add(case, "tapeline", name, value, units.get(name, "MB"))


def order_speed(samples: Samples) -> None:
    """Positions a second of the permutation, on one core."""
    for subject, num in (("11,692,750 windows", 11_692_750), ("2^40 windows", 2**40)):
        for number in range(10):
            start = time.perf_counter()
            Shuffled(0).windows(num, number, 0, 2_000_000)
            rate = 2.0 / (time.perf_counter() - start)
            if number:
                samples.add("order", subject, "million_positions_per_s", rate, "M/s")


def store(folder: Path, sessions: int, rows: int) -> Path:
    """A synthetic store of that size, made where it isn't there yet."""
    root = folder / f"store-{sessions}x{rows}"
    if not (root / "mmap" / "index.json").exists():
        needed = sessions * rows * 41 * 4 * 1.2
        free = shutil.disk_usage(folder).free
        if free < 2 * needed:
            raise SystemExit(f"{folder}: {needed / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free")
        made = (synthetic_session(n, 0, rows=rows) for n in range(sessions))
        write_shards(made, root, "mmap")
    return root


def measured(quick: bool) -> list[Row]:
    """All cases."""
    torch.set_num_threads(1)  # on busy cores more take longer, not less
    cache = Path(tempfile.gettempdir()) / "tapeline-bench"
    cache.mkdir(parents=True, exist_ok=True)
    samples = Samples()
    order_speed(samples)
    stores = {"small": store(cache, *SMALL), "large": store(cache, *(LARGER if quick else LARGE))}
    for size, root in stores.items():
        shards = Shards(root)
        for T, repetitions in ((20, 20 if quick else 200), (100, 3 if quick else 40)):
            batches(f"{size} T={T}", shards, T, repetitions, samples)
            gc.collect()
        stepping(f"{size} T=20", shards, 20, 2 if quick else 15, samples)
        per_epoch = 0 if size == "small" else 500
        opening(f"{size} T=20", root, 20, 1 if quick else 5, per_epoch, samples)
    return samples.rows(
        "ms_per_batch",
        ("copy", "row-index gather", "DataLoader __getitems__ 0w", "DataLoader per item 0w"),
    )


if __name__ == "__main__":
    main(__doc__, measured)
