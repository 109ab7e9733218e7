# ruff: noqa: D101, D102 (the subjects say by their names what they are)
"""What a checkpoint costs the training loop, and what it takes to be safe and to come back.

Cases: `small` (57 thousand parameters and Adam, 0.69 MB) and `large` (100 million, 1.2 GB; a
tenth of that with `--quick`). Every subject saves the same live objects. `large, in turn` is the
memory copy and the save in the background alone, one right after the other: memory that other
subjects left cold makes whichever copy comes first several times slower.

    blocking_s    until `save` returns, nothing else running
    durable_s     until the bytes are on the disk
    loop_lost_s   time of a loop that trains on through a save, less its steps at their usual pace
    load_s        from the disk into freshly built model and optimiser
    extra_mb      peak memory beyond what was there before the first save
    bytes         on the disk

The first save of each subject warms it up and isn't timed; what one left to be written back is
written before the next. `memory copy` and `write + fsync` are the limits: less can't block, less
isn't durable. `ratio_to` is of blocking_s, `durable_ratio_to` and `load_ratio_to` of those. A case
takes as many rounds as fit its time, two at least; all of it takes under six minutes, and 12 GB in
the folder it is run in, which are given back. DCP is torch.distributed.checkpoint; its own
staging memory can't be used without a GPU, so it gets plain memory to reuse.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from harness import Row, Samples, main
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from tapeline.checkpoint import Checkpointer, capture_state, load_checkpoint

REFERENCES = ("memory copy", "write + fsync")
IN_TURN = ("memory copy", "tapeline async")
MARKS = (("durable", "write + fsync"), ("load", "DCP save"))
Live = tuple[nn.Module, torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Case:
    """What is saved, how long a loop is watched before and after, and the rounds."""

    name: str
    widths: list[int]
    quiet_s: float
    rounds: int
    for_s: float


CASES = (
    Case("small", [800, 64, 64, 32, 1], 0.02, 30, 60),
    Case("large", [2048] * 25, 0.3, 5, 200),
)
QUICK = (
    Case("small", [800, 64, 64, 32, 1], 0.02, 10, 15),
    Case("large", [1024] * 11, 0.1, 1, 0),
)


def build(widths: list[int]) -> Live:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), foreach=True)


def trained(widths: list[int]) -> Live:
    model, optimizer = build(widths)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(live: Live) -> list[torch.Tensor]:
    model, optimizer = live
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in model.parameters()), *moments]


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Subject:
    """Saves live objects under `folder`; by default done when `save` returns."""

    def __init__(self, live: Live, folder: Path) -> None:
        self.live = live
        self.folder = folder
        self.number = 0
        folder.mkdir()

    def save(self) -> None:
        raise NotImplementedError

    def busy(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def load(self, fresh: Live) -> None:
        raise NotImplementedError

    def tidy(self) -> None:
        """Delete older saves, where that isn't part of saving."""
        for old in sorted(self.folder.iterdir())[:-1]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def close(self) -> None:
        pass

    def path(self) -> Path:
        return self.folder / f"{self.number:04d}"


class MemoryCopy(Subject):
    def __init__(self, live: Live, folder: Path) -> None:
        super().__init__(live, folder)
        self.copies = [torch.zeros_like(tensor) for tensor in tensors_of(live)]

    def save(self) -> None:
        for copy, tensor in zip(self.copies, tensors_of(self.live), strict=True):
            copy.copy_(tensor)


class WriteFsync(Subject):
    def save(self) -> None:
        self.number += 1
        with self.path().open("xb") as stream:
            for tensor in tensors_of(self.live):
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())


class TorchSave(Subject):
    def write(self, path: Path) -> None:
        model, optimizer = self.live
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def save(self) -> None:
        self.write(self.folder / "checkpoint.pt")

    def load(self, fresh: Live) -> None:
        saved = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        fresh[0].load_state_dict(saved["model"])
        fresh[1].load_state_dict(saved["optimizer"])

    def tidy(self) -> None:
        flush(self.folder / "checkpoint.pt")


class TorchSaveRename(TorchSave):
    def save(self) -> None:
        aside = self.folder / "aside"
        self.write(aside)
        flush(aside)
        aside.rename(self.folder / "checkpoint.pt")
        flush(self.folder)


class DcpSave(Subject):
    def __init__(self, live: Live, folder: Path) -> None:
        super().__init__(live, folder)
        model, optimizer = get_state_dict(*live)  # once: its tensors are the live ones
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        self.number += 1
        dcp.save(self.state, checkpoint_id=self.path(), no_dist=True)

    def load(self, fresh: Live) -> None:
        model, optimizer = get_state_dict(*fresh)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.path(), no_dist=True)
        set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DcpAsync(DcpSave):
    def __init__(self, live: Live, folder: Path) -> None:
        super().__init__(live, folder)
        self.stager = BlockingAsyncStager()
        self.done: Any = None

    def save(self) -> None:
        self.number += 1
        saving = dcp.async_save(
            self.state, checkpoint_id=self.path(), async_stager=self.stager, no_dist=True
        )
        is_pair = isinstance(saving, AsyncSaveResponse)
        self.done = saving.upload_completion if is_pair else saving

    def busy(self) -> bool:
        return not self.done.done()

    def wait(self) -> None:
        self.done.result()


class DcpReused(DcpAsync):
    def __init__(self, live: Live, folder: Path) -> None:
        super().__init__(live, folder)
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(self) -> None:
        if self.stager.state_dict_cache is None:
            self.stager.state_dict_cache = BlockingAsyncStager().stage(self.state)
        super().save()


class Tapeline(Subject):
    background_from_bytes = 1 << 60

    def __init__(self, live: Live, folder: Path) -> None:
        super().__init__(live, folder)
        self.checkpoints = Checkpointer(
            folder, keep=1, background_from_bytes=self.background_from_bytes
        )

    def save(self) -> None:
        self.number += 1
        self.checkpoints.save(capture_state(*self.live, step=self.number))

    def busy(self) -> bool:
        return self.checkpoints.stats().saves < self.number

    def wait(self) -> None:
        # Durable is committed; what follows (reading back, deleting) is part of the next wait.
        while self.busy():
            time.sleep(0.0002)
            self.checkpoints.check()

    def load(self, fresh: Live) -> None:
        load_checkpoint(self.folder / f"step-{self.number:08d}", *fresh, None)

    def tidy(self) -> None:
        self.checkpoints.wait()

    def close(self) -> None:
        self.checkpoints.close()


class TapelineAsync(Tapeline):
    background_from_bytes = 0


SUBJECTS: dict[str, type[Subject]] = {
    "memory copy": MemoryCopy,
    "write + fsync": WriteFsync,
    "torch.save": TorchSave,
    "torch.save + fsync + rename": TorchSaveRename,
    "DCP save": DcpSave,
    "DCP async": DcpAsync,
    "DCP async reused stager": DcpReused,
    "tapeline sync": Tapeline,
    "tapeline async": TapelineAsync,
}


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def training_step(width: int) -> Callable[[], None]:
    """A step of another model: it never waits for the one that is saved."""
    model, optimizer = build([width] * 4)
    batch = torch.randn(64, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def pace(step: Callable[[], None], for_s: float, busy: Callable[[], bool]) -> tuple[int, float]:
    """Take steps for a time and as long as `busy`; returns how many and the time they took."""
    started = time.perf_counter()
    num_steps = 0
    while (passed := time.perf_counter() - started) < for_s or busy():
        step()
        num_steps += 1
    return num_steps, passed


def lost_s(subject: Subject, step: Callable[[], None], quiet_s: float) -> float:
    """What one save costs a loop that goes on, until it is durable and a little beyond."""
    steps_before, before_s = pace(step, quiet_s, lambda: False)
    blocked_s = timed(subject.save)
    steps, looped_s = pace(step, quiet_s, subject.busy)
    subject.wait()
    subject.tidy()
    steps_after, after_s = pace(step, quiet_s, lambda: False)
    return blocked_s + looped_s - steps * (before_s + after_s) / (steps_before + steps_after)


@contextmanager
def peak_extra_mb(found: list[float]) -> Iterator[None]:
    process, over = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        found.append((max(peak, process.memory_info().rss) - before) / 1e6)


def warmed_up(
    samples: Samples, case: Case, live: Live, root: Path, names: Iterable[str] = SUBJECTS
) -> dict[str, Subject]:
    """Every subject after its first save."""
    subjects = {}
    for number, name in enumerate(names):
        kind, extra = SUBJECTS[name], list[float]()
        with peak_extra_mb(extra):  # what a subject allocates up front counts too
            subject = subjects[name] = kind(live, root / f"{case.name}-{number}")
            subject.save()
            subject.wait()
            subject.tidy()
        samples.add(case.name, name, "extra_mb", extra[0], "MB")
    return subjects


def measure_once(
    samples: Samples, case: Case, name: str, subject: Subject, step: Callable[[], None]
) -> None:
    started = time.perf_counter()
    samples.add(case.name, name, "blocking_s", timed(subject.save), "s")
    subject.wait()
    durable = time.perf_counter() - started
    subject.tidy()
    samples.add(case.name, name, "loop_lost_s", lost_s(subject, step, case.quiet_s), "s")
    if name == "memory copy":
        return
    samples.add(case.name, name, "durable_s", durable, "s")
    if name != "write + fsync":
        fresh = build(case.widths)
        samples.add(case.name, name, "load_s", timed(lambda: subject.load(fresh)), "s")


def measure_case(samples: Samples, case: Case, root: Path) -> None:
    live = trained(case.widths)
    step = training_step(256)
    for _ in range(20):
        step()
    subjects = warmed_up(samples, case, live, root)
    started = time.perf_counter()
    for number in range(case.rounds):
        if number >= 2 and time.perf_counter() - started > case.for_s * number / (number + 1):
            break  # another one would take longer than is left
        for name, subject in subjects.items():
            measure_once(samples, case, name, subject, step)
    for name, subject in subjects.items():
        subject.close()
        size = sum(file.stat().st_size for file in subject.folder.rglob("*") if file.is_file())
        if size:
            samples.add(case.name, name, "bytes", size, "B")
        shutil.rmtree(subject.folder)


def measure_in_turn(samples: Samples, case: Case, root: Path) -> None:
    subjects = warmed_up(samples, case, trained(case.widths), root, IN_TURN)
    for _ in range(case.rounds):
        for name, subject in subjects.items():
            samples.add(case.name, name, "blocking_s", timed(subject.save), "s")
            subject.wait()
            subject.tidy()
    for subject in subjects.values():
        subject.close()
        shutil.rmtree(subject.folder)


def marks(samples: Samples) -> Iterator[Row]:
    """The ratios that are no ratios of blocking_s."""
    for metric, reference in MARKS:
        for row in samples.rows(f"{metric}_s", [reference]):
            if row.metric.startswith("ratio_to:"):
                yield replace(row, metric=f"{metric}_{row.metric}")


def measure(quick: bool) -> list[Row]:
    samples = Samples()
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the folder is deleted then too
    with tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as folder:
        for case in QUICK if quick else CASES:
            measure_case(samples, case, Path(folder))
        in_turn = replace(case, name=f"{case.name}, in turn", rounds=3 if quick else 8)
        measure_in_turn(samples, in_turn, Path(folder))
    return [*samples.rows("blocking_s", REFERENCES), *marks(samples)]


if __name__ == "__main__":
    main(__doc__, measure)
