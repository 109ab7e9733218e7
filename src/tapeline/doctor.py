"""Is this installation fit to train: packages, devices, threads, the file system, the clock.

Each check tries the thing itself rather than asking whether it should work: a rename is done, a
lock is contended, a kernel is compiled. Nothing is changed but a temporary folder, which goes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from packaging.requirements import Requirement

from tapeline.errors import RunError
from tapeline.files import atomic_write

Status = Literal["ok", "note", "fault"]
_LOWEST_FREE_BYTES = 1 << 30
_SLOW_FSYNC_S = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        part: what was looked at.
        status: "ok"; "note" for what works and could be better; "fault" for what will break runs.
        found: what was seen.
        fix: what to do; empty where nothing needs doing.
    """

    part: str
    status: Status
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)


def examine(folder: Path) -> list[Check]:
    """Try everything a run needs, with `folder` as the place where runs and stores will lie.

    Raises:
        RunError: there is no such folder.
    """
    if not folder.is_dir():
        raise RunError(
            folder, expected="a folder", found="none", fix="Make it, or name the one runs go to"
        )
    checks = [_packages(), *_extras(), _torch(), _threads(), _kernel(), _clock(), _git()]
    checks.append(_space(folder))
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            checks += [trial(Path(scratch)) for trial in (_rename, _fsync, _lock, _map)]
    except OSError as error:
        checks.append(
            Check("writing", "fault", f"{folder}: {error.strerror}", "Choose a writable folder")
        )
    return checks


def _requirements() -> Iterator[Requirement]:
    for line in metadata.requires("tapeline") or []:
        yield Requirement(line)


def _lacking(requirements: list[Requirement]) -> list[str]:
    """Those that aren't met, each with what is there instead."""
    lacking = []
    for one in requirements:
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{one.name} (absent)")
        else:
            if not one.specifier.contains(found, prereleases=True):
                lacking.append(f"{one.name}{one.specifier} (found {found})")
    return lacking


def _packages() -> Check:
    needed = [one for one in _requirements() if one.marker is None or one.marker.evaluate()]
    lacking = _lacking(needed)
    if lacking:
        return Check("packages", "fault", ", ".join(lacking), "pip install --upgrade tapeline")
    python = ".".join(map(str, sys.version_info[:3]))
    return Check("packages", "ok", f"{len(needed)} of {len(needed)}, Python {python}")


def _extras() -> Iterator[Check]:
    for extra in metadata.metadata("tapeline").get_all("Provides-Extra") or []:
        if extra == "test":
            continue
        needed = [
            one for one in _requirements() if one.marker and one.marker.evaluate({"extra": extra})
        ]
        lacking = _lacking(needed)
        part = f"extra {extra}"
        if lacking:
            yield Check(part, "note", ", ".join(lacking), f'pip install "tapeline[{extra}]"')
        else:
            yield Check(part, "ok", ", ".join(one.name for one in needed))


def _torch() -> Check:
    found = f"torch {torch.__version__}"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        if built:
            return Check(
                "devices",
                "note",
                f"{found}, built for CUDA {built}, no device",
                "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or train on the CPU",
            )
        return Check("devices", "ok", f"{found}, CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not torch.cuda.is_bf16_supported():
        return Check("devices", "note", f"{found}, {', '.join(names)}", "Train in float32 there")
    return Check("devices", "ok", f"{found}, {', '.join(names)}")


def _threads() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    found = f"torch uses {threads} of {cores} cores"
    if cores and threads > cores:
        return Check("threads", "fault", found, f"Set OMP_NUM_THREADS to {cores} or fewer")
    return Check("threads", "ok", found)


def _kernel() -> Check:
    from numba import njit

    def total(values: np.ndarray) -> float:
        result = 0.0
        for value in values:
            result += value
        return result

    try:
        found = njit(nogil=True)(total)(np.arange(4.0))
    except Exception as error:  # whatever a broken compiler raises
        return Check("kernel", "fault", f"numba: {error}", "Reinstall numba and llvmlite")
    if found != 6.0:
        return Check("kernel", "fault", f"numba summed 0…3 to {found}", "Reinstall numba")
    return Check("kernel", "ok", "numba compiles")


def _clock() -> Check:
    wall, monotonic = time.time_ns(), time.monotonic_ns()
    time.sleep(0.05)
    apart_ms = abs((time.time_ns() - wall) - (time.monotonic_ns() - monotonic)) / 1e6
    if time.gmtime().tm_year < 2025:
        return Check("clock", "fault", time.strftime("the year is %Y"), "Set the clock")
    if apart_ms > 5:
        return Check(
            "clock",
            "note",
            f"wall and monotonic clocks moved {apart_ms:.1f} ms apart in 50 ms",
            "Let a time service slew the clock instead of stepping it",
        )
    step_ns = time.get_clock_info("monotonic").resolution * 1e9
    return Check("clock", "ok", f"wall and monotonic agree, steps of {step_ns:.0f} ns")


def _git() -> Check:
    if shutil.which("git"):
        return Check("git", "ok", "present: runs record the commit")
    return Check("git", "note", "absent: runs can't record the commit", "Install git")


def _space(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < _LOWEST_FREE_BYTES:
        return Check("space", "fault", found, "Free some, or choose another folder for runs")
    return Check("space", "ok", found)


def _tried(part: str, good: str, fix: str, trial: Callable[[], str | None]) -> Check:
    try:
        wrong = trial()
    except OSError as error:
        wrong = error.strerror or str(error)
    return Check(part, "fault", wrong, fix) if wrong else Check(part, "ok", good)


def _rename(folder: Path) -> Check:
    def trial() -> str | None:
        path = folder / "renamed"
        atomic_write(path, "old")
        atomic_write(path, "new")
        return None if path.read_text() == "new" else "a rename did not replace the file"

    return _tried("rename", "replaces whole files", "Keep runs on a local or POSIX disk", trial)


def _fsync(folder: Path) -> Check:
    seconds = []
    for number in range(5):
        started = time.perf_counter()
        atomic_write(folder / str(number), b"0" * 4096)
        seconds.append(time.perf_counter() - started)
    typical = sorted(seconds)[2]
    found = f"a small file is on the disk after {typical * 1e3:.1f} ms"
    if typical > _SLOW_FSYNC_S:
        return Check("fsync", "note", found, 'Save seldom: checkpoint.every = "auto" sees to it')
    return Check("fsync", "ok", found)


def _lock(folder: Path) -> Check:
    def trial() -> str | None:
        with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
        return "a file could be locked twice"

    fix = "Mount the file system with locks, or never train one run twice at once"
    return _tried("locks", "a run can't be trained twice at once", fix, trial)


def _map(folder: Path) -> Check:
    def trial() -> str | None:
        path = folder / "map"
        path.write_bytes(bytes(range(256)) * 64)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return None if view[4000] == 4000 % 256 else "mapped bytes differ from written ones"

    return _tried("memory map", "stores can be mapped", "Keep stores on a local disk", trial)
