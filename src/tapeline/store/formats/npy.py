"""The npy format: one NumPy file per session and array, to exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tapeline.files import xxh3_file
from tapeline.session import Session
from tapeline.store.formats.base import LITTLE, SESSION, Reader, Writer, arrays_of, damaged
from tapeline.store.layout import FileEntry, SessionEntry


class NpyWriter(Writer):
    """Writes with `numpy.save`."""

    def add(self, number: int, session: Session, entry: SessionEntry) -> None:  # noqa: ARG002
        """Write the session's arrays."""
        for name, array in arrays_of(session).items():
            path = self.place.folder / npy_name(number, name)
            np.save(path, array, allow_pickle=False)
            self.files[path.name] = FileEntry(bytes=path.stat().st_size, xxh3=xxh3_file(path))


class NpyReader(Reader):
    """Reads with `numpy.load`."""

    def load(self, number: int, name: str) -> npt.NDArray[Any]:
        """One file."""
        path = self.place.folder / npy_name(number, name)
        rows = self.index.sessions[number].rows
        shape = (rows, len(self.index.columns)) if name == "values" else (rows,)
        try:
            array: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        except Exception:  # NumPy's parser of headers lets through whatever Python's own raises
            raise damaged(path, "bytes that aren't a NumPy array") from None
        if array.shape != shape or array.dtype != LITTLE[name]:
            raise damaged(path, f"{array.dtype} of shape {list(array.shape)}")
        return array


def npy_name(number: int, name: str) -> str:
    """The file of one array of one session."""
    return f"{SESSION}{number:05d}.{name}.npy"
