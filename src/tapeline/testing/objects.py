"""An object store with faults: what is put and deleted through one fsspec file system.

Covers: `pipe_file`, `put_file` and `rm`. A put is whole or absent, as object stores promise, so a
crash leaves no half of one. Does not cover streams opened for writing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

from tapeline.testing.faults import Fault, Injector


class FaultyObjects(Injector):
    """Intercepts the puts and deletions of a file system while its `with` block lasts.

    Args:
        filesystem: an fsspec file system; it is the instance that is changed meanwhile, and
            fsspec hands out one for all equal URLs.
        faults: paths are matched as the file system names them. Of the kinds, `short_write` and
            `slow_fsync` never strike here.
    """

    def __init__(self, filesystem: Any, *faults: Fault) -> None:
        super().__init__(faults)
        self._filesystem = filesystem
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> FaultyObjects:
        really_pipe, really_rm = self._filesystem.pipe_file, self._filesystem.rm

        def pipe_file(path: str, value: bytes, *rest: Any, **more: Any) -> Any:
            kinds = self.strike("put", path)
            if "truncated" in kinds:
                value = value[: len(value) // 2]
            if "bit_flip" in kinds:
                changed = bytearray(value)
                changed[len(value) // 2] ^= 1
                value = bytes(changed)
            return really_pipe(path, value, *rest, **more)

        def put_file(source: str, path: str, *_: Any, **more: Any) -> Any:
            return pipe_file(path, Path(source).read_bytes(), **more)

        def rm(path: Any, *rest: Any, **more: Any) -> Any:
            for one in [path] if isinstance(path, str) else path:
                self.strike("delete", one)
            return really_rm(path, *rest, **more)

        for new in (pipe_file, put_file, rm):
            self._undo.enter_context(mock.patch.object(self._filesystem, new.__name__, new))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
