"""What can go wrong between a program and its storage, and when: counting and striking.

Covers: the faults, which operations each can strike, the record of operations. Does not cover
how operations are intercepted (`disk`, `objects`).
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

FaultKind = Literal[
    "crash", "io_error", "full_disk", "short_write", "truncated", "bit_flip", "slow_fsync"
]
OperationKind = Literal[
    "open",
    "write",
    "truncate",
    "fsync",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "put",
    "delete",
]

_WRITES: Final = frozenset({"write", "put"})
_NEED_ROOM: Final = frozenset({"open", "write", "mkdir", "put"})
_STRIKES: Final[dict[FaultKind, frozenset[str] | None]] = {  # None: any operation
    "crash": None,
    "io_error": None,
    "full_disk": _NEED_ROOM,
    "short_write": frozenset({"write"}),
    "truncated": _WRITES,
    "bit_flip": _WRITES,
    "slow_fsync": frozenset({"fsync"}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: `crash`: the process ends here; of a write, half its bytes have arrived, and nothing
            that runs afterwards (`finally`, other threads) changes anything any more.
            `io_error`: the operation fails with EIO. `full_disk`: from here on, whatever needs
            room fails with ENOSPC. `short_write`: the operating system takes half the bytes and
            says so. `truncated`: half of what was written is lost, and nothing says so.
            `bit_flip`: one bit arrives changed. `slow_fsync`: it takes `delay_s` longer.
        at_operation: the number, from 0, among the operations that the kind can strike on paths
            that match.
        path_pattern: of paths below the root, as a shell would match them; `*` matches `/` too.
        delay_s: of `slow_fsync`.
    """

    kind: FaultKind
    at_operation: int = 0
    path_pattern: str = "*"
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that changes what is stored; of a rename or link, `path` is the new name."""

    kind: OperationKind
    path: str


class Crash(BaseException):
    """Stands for the end of the process; not an Exception, so that no recovery catches it."""


def crashes(operations: Sequence[Operation]) -> list[Fault]:
    """A crash at each of the operations of a recorded run: together, between any two."""
    return [Fault("crash", number) for number in range(len(operations))]


class Injector:
    """Counts operations and strikes.

    Attributes:
        operations: what was done or tried, in order; the recorder.
        struck: the faults that have struck.
        crashed: whether a crash was among them.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.operations: list[Operation] = []
        self.struck: list[Fault] = []
        self.crashed = False
        self._faults = faults
        self._counts = [0] * len(faults)
        self._full = False
        self._lock = threading.Lock()  # a save works in threads

    def strike(self, kind: OperationKind, path: str) -> frozenset[FaultKind]:
        """Count an operation that is about to be done.

        Returns:
            What is to go wrong with its bytes.

        Raises:
            OSError: it fails.
            Crash: the process has ended, or ends here and not in the middle of a write.
        """
        with self._lock:
            if self.crashed:
                raise Crash("the process has ended")
            self.operations.append(Operation(kind, path))
            hits = [f for i, f in enumerate(self._faults) if self._hits(i, f, kind, path)]
            self.struck += hits
            kinds = frozenset(fault.kind for fault in hits)
            self.crashed = "crash" in kinds
            self._full |= "full_disk" in kinds
            full = self._full and kind in _NEED_ROOM
        if "crash" in kinds and kind != "write":
            raise Crash(f"at {kind} {path}")
        if "io_error" in kinds:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        time.sleep(sum(fault.delay_s for fault in hits))
        return kinds

    def _hits(self, index: int, fault: Fault, kind: OperationKind, path: str) -> bool:
        strikes = _STRIKES[fault.kind]
        if strikes is not None and kind not in strikes:
            return False
        if not fnmatch.fnmatchcase(path, fault.path_pattern):
            return False
        self._counts[index] += 1
        return self._counts[index] == fault.at_operation + 1
