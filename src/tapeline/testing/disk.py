"""A disk with faults: the file operations of this process below one folder.

Covers: `open` and what `pathlib` and `shutil` make of it, and the functions of `os` that change a
disk, in every thread. Does not cover native code that opens files itself, `os.pwrite`, memory
maps, nor what a power cut does to bytes that were not flushed.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapeline.testing.faults import Crash, Fault, Injector

_BLOCK_BYTES = 4096
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class FaultyDisk(Injector):
    """Intercepts file operations below `root` while its `with` block lasts; one at a time.

    Without faults it is a recorder: `operations` lists what a save does, and
    `crashes(operations)` is a crash between any two of them. Paths are relative to the root.

        with FaultyDisk(folder) as disk:
            save()
        for fault in crashes(disk.operations):
            with FaultyDisk(folder, fault) as disk, contextlib.suppress(Crash):
                save()
            ...  # what is left can be loaded

    Threads that a crash ends do so silently.
    """

    def __init__(self, root: Path, *faults: Fault) -> None:
        super().__init__(faults)
        self._root = os.path.realpath(root)
        self._paths: dict[int, str] = {}  # of open descriptors
        self._undo = contextlib.ExitStack()
        self._really: dict[str, Any] = {}

    def __enter__(self) -> FaultyDisk:
        for name in ("mkdir", "rmdir", "unlink", "remove"):
            self._patch(os, name, self._single(name))
        for name in ("rename", "replace", "link"):
            self._patch(os, name, self._double(name))
        for name in ("open", "close", "write", "fsync", "ftruncate"):
            self._patch(os, name, getattr(self, f"_{name}"))
        self._really["io.open"] = io.open
        for owner in (builtins, io):
            self._patch(owner, "open", self._open_stream, keep=False)
        self._really["excepthook"] = threading.excepthook
        self._patch(threading, "excepthook", self._excepthook, keep=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _patch(self, owner: Any, name: str, new: Callable[..., Any], *, keep: bool = True) -> None:
        before = getattr(owner, name)
        if keep:
            self._really[name] = before
        setattr(owner, name, new)
        self._undo.callback(setattr, owner, name, before)

    def _excepthook(self, arguments: Any) -> None:
        if not isinstance(arguments.exc_value, Crash):
            self._really["excepthook"](arguments)

    def _below(self, path: Any, folder: int | None = None) -> str | None:
        """The path relative to the root; None outside."""
        if isinstance(path, int):
            full = self._paths.get(path)
        elif folder is not None:
            parent = self._paths.get(folder)
            full = None if parent is None else os.path.join(parent, os.fsdecode(path))  # noqa: PTH118
        else:
            above, name = os.path.split(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
            full = f"{os.path.realpath(above)}/{name}"
        if full is None or not f"{full}/".startswith(f"{self._root}/"):
            return None
        return full[len(self._root) + 1 :] or "."

    def _single(self, name: str) -> Callable[..., Any]:
        kind: Any = "unlink" if name == "remove" else name

        def operation(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> Any:
            if (below := self._below(path, dir_fd)) is not None:
                self.strike(kind, below)
            return self._really[name](path, *rest, dir_fd=dir_fd, **more)

        return operation

    def _double(self, name: str) -> Callable[..., Any]:
        kind: Any = "rename" if name == "replace" else name

        def operation(source: Any, target: Any, **more: Any) -> Any:
            if (below := self._below(target, more.get("dst_dir_fd"))) is not None:
                self.strike(kind, below)
            return self._really[name](source, target, **more)

        return operation

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        below = self._below(path, dir_fd)
        if below is not None and flags & _WRITING:
            self.strike("open", below)
        descriptor: int = self._really["open"](path, flags, mode, dir_fd=dir_fd)
        if below is not None:
            self._paths[descriptor] = self._absolute(below)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._really["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        def write(part: Any) -> int:
            return int(self._really["write"](descriptor, part))

        return self._faulty_write(descriptor, data, write)

    def _fsync(self, descriptor: int) -> None:
        if (below := self._below(descriptor)) is not None:
            self.strike("fsync", below)
        self._really["fsync"](descriptor)

    def _ftruncate(self, descriptor: int, length: int) -> None:
        if (below := self._below(descriptor)) is not None:
            self.strike("truncate", below)
        self._really["ftruncate"](descriptor, length)

    def _open_stream(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **more: Any,
    ) -> Any:
        below = None if isinstance(file, int) else self._below(file)
        if below is None or not set(mode) & set("wxa+"):
            return self._really["io.open"](file, mode, buffering, encoding, errors, newline, **more)
        self.strike("open", below)
        raw = _Raw(self, self._absolute(below), mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        stream = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return stream if "b" in mode else io.TextIOWrapper(stream, encoding, errors, newline)

    def _absolute(self, below: str) -> str:
        return f"{self._root}/{below}"

    def _faulty_write(self, descriptor: int, data: Any, write: Callable[[Any], int]) -> int:
        if (below := self._below(descriptor)) is None:
            return write(data)
        if self.crashed:
            return len(memoryview(data).cast("B"))  # a buffer flushed by a process that is no more
        kinds = self.strike("write", below)
        view = memoryview(data).cast("B")
        half = len(view) // 2
        if len(view) % _BLOCK_BYTES == 0:  # writes past the cache are of whole blocks
            half -= half % _BLOCK_BYTES
        if kinds & {"crash", "short_write"}:
            written = write(view[:half])
            if "crash" in kinds:
                raise Crash(f"at write {below}")
            return written
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        written = write(view)
        if kinds & {"bit_flip", "truncated"}:
            with self._really["io.open"](self._absolute(below), "r+b") as damaged:
                damaged.seek(start + len(view) // 2)
                if "truncated" in kinds:
                    damaged.truncate()
                else:
                    (byte,) = damaged.read(1)
                    damaged.seek(-1, os.SEEK_CUR)
                    damaged.write(bytes([byte ^ 1]))
        return written


class _Raw(io.FileIO):
    """The unbuffered end of a stream below the root."""

    def __init__(self, disk: FaultyDisk, path: str, mode: str) -> None:
        super().__init__(path, mode)
        self._disk = disk
        disk._paths[self.fileno()] = path

    def write(self, data: Any, /) -> int:
        return self._disk._faulty_write(self.fileno(), data, super().write)

    def truncate(self, size: int | None = None, /) -> int:
        if (below := self._disk._below(self.fileno())) is not None:
            self._disk.strike("truncate", below)
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            self._disk._paths.pop(self.fileno(), None)
        super().close()
