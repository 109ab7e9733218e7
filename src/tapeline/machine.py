"""What machine this is: the label of every timing.

Reads versions from package metadata, so nothing heavy is imported to name it.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("tapeline", "torch", "numpy", "numba", "pyarrow")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine at one moment.

    Attributes:
        processor: the model's name.
        cores: logical cores this process may use.
        memory_gib: installed memory.
        device: the accelerator torch sees, or "cpu"; "unknown" while torch isn't imported.
        python: version of the interpreter.
        versions: of the packages that matter to numbers and timings.
        load_1min: runnable processes, averaged over the last minute.
    """

    processor: str
    cores: int
    memory_gib: float
    device: str
    python: str
    versions: dict[str, str]
    load_1min: float

    @classmethod
    def here(cls) -> Machine:
        """Describe the machine this runs on, now."""
        return cls(
            processor=_processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            device=_device(),
            python=platform.python_version(),
            versions={name: found for name in _PACKAGES if (found := _version(name))},
            load_1min=round(psutil.getloadavg()[0], 2),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)

    def __str__(self) -> str:
        torch = self.versions.get("torch", "none")
        return (
            f"{self.processor}, {self.cores} cores, {self.memory_gib:g} GiB, device {self.device}, "
            f"Python {self.python}, torch {torch}, load {self.load_1min:g}"
        )


def _cores() -> int:
    return os.cpu_count() or 1


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is None:
        return "unknown"
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
