"""The zarr format: a Zarr v3 array per session and array, sharded and compressed with zstd.

Any Zarr reader opens the folder `data` as a group: `zarr.open_group(root + "/zarr/data")`. Here
Zarr is the codec only. The objects of a session are encoded and decoded in memory, and go to and
come from the place by ourselves: every object is compared with its hash in the index before it is
decoded, and a folder and an object store are one code.

A session's folder is named by number and content, so that no two contents ever have one name: a
store can be replaced on an object store, which can't rename, while the old one is still whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tapeline.session import Session
from tapeline.store.formats.base import DATA, LITTLE, SESSION, Reader, Writer, arrays_of, damaged
from tapeline.store.layout import FileEntry, SessionEntry, StoreIndex
from tapeline.store.place import Place, import_extra

_CHUNK_BYTES = 1 << 20  # what Zarr's other readers decompress at once
_SHARD_CHUNKS = 64  # chunks in an object


class ZarrWriter(Writer):
    """Encodes each session in memory, then writes its objects."""

    def __init__(self, place: Place, index: StoreIndex | None) -> None:
        self._zarr = import_extra("zarr")
        super().__init__(place, index)

    def add(self, number: int, session: Session, entry: SessionEntry) -> None:
        """Write the session's objects."""
        objects: dict[str, Any] = {}
        folder = zarr_name(number, entry, list(session.columns))
        store = self._zarr.storage.MemoryStore(objects)
        attributes = entry.model_dump(include={"instrument", "date", "segment", "origin"})
        self._zarr.create_group(
            store, path=folder, attributes={**attributes, "columns": list(session.columns)}
        )
        for name, array in arrays_of(session).items():
            row_bytes = array.itemsize * (array.shape[1] if array.ndim == 2 else 1)
            rows = min(max(1, _CHUNK_BYTES // row_bytes), max(1, len(array)))
            num_chunks = min(-(-max(1, len(array)) // rows), _SHARD_CHUNKS)
            self._zarr.create_array(
                store,
                name=f"{folder}/{name}",
                shape=array.shape,
                dtype=array.dtype,
                chunks=(rows, *array.shape[1:]),
                shards=(rows * num_chunks, *array.shape[1:]),
                compressors=self._zarr.codecs.BloscCodec(
                    cname="zstd", clevel=3, shuffle="shuffle", typesize=array.itemsize
                ),
                # A chunk of zeros is left out otherwise, and -0.0 counts as zero.
                config={"write_empty_chunks": True},
            )[...] = array
        written: dict[str, bytes] = {}
        for name, value in objects.items():
            data = value.to_bytes()
            file = FileEntry(bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
            if self.files.get(DATA + name) != file:  # others may be reading the root's own
                self.files[DATA + name] = file
                written[DATA + name] = data
        self.place.write(written)


class ZarrReader(Reader):
    """Reads a session's objects, compares their hashes, decodes them."""

    def __init__(self, place: Place, index: StoreIndex) -> None:
        self._zarr = import_extra("zarr")
        super().__init__(place, index)
        self._names: dict[str, list[str]] = {}
        for name in index.files:  # `data/folder/array/…`, and the groups' own, which aren't read
            self._names.setdefault("/".join(name.split("/")[1:3]), []).append(name)

    def load(self, number: int, name: str) -> npt.NDArray[Any]:
        """One array, decoded."""
        entry = self.index.sessions[number]
        path = f"{zarr_name(number, entry, self.index.columns)}/{name}"
        shape = (entry.rows, len(self.index.columns)) if name == "values" else (entry.rows,)
        make = self._zarr.core.buffer.default_buffer_prototype().buffer.from_bytes
        read = self._checked(self._names.get(path, []))
        objects = {key.removeprefix(DATA): make(data) for key, data in read.items()}
        store = self._zarr.storage.MemoryStore(objects, read_only=True)
        try:
            array: npt.NDArray[Any] = self._zarr.open_array(store, path=path, mode="r")[...]
        except Exception:  # the bytes are as written: it is another program that wrote them
            raise damaged(f"{self.place}/{DATA}{path}", "no Zarr array") from None
        if array.shape != shape or array.dtype != LITTLE[name]:
            raise damaged(
                f"{self.place}/{DATA}{path}", f"{array.dtype} of shape {list(array.shape)}"
            )
        return np.ascontiguousarray(array)

    def _checked(self, names: list[str]) -> dict[str, bytes]:
        try:
            read = dict(zip(names, self.place.read(names), strict=True))
        except OSError as error:
            raise damaged(self.place, f"an object that can't be read: {error}") from None
        for name, data in read.items():
            if xxhash.xxh3_128_hexdigest(data) != self.index.files[name].xxh3:
                raise damaged(f"{self.place}/{name}", "bytes that differ from those written")
        return read


def zarr_name(number: int, entry: SessionEntry, columns: list[str]) -> str:
    """The folder of one session."""
    return f"{SESSION}{number:05d}-{entry.digest(columns)[:16]}"
