"""The formats: how sessions become files and come back bit for bit."""

from tapeline.store.formats.base import Reader, Writer, arrays_of, content_hash
from tapeline.store.formats.compressed import ZarrReader, ZarrWriter
from tapeline.store.formats.mapped import MappedReader, MappedWriter
from tapeline.store.formats.npy import NpyReader, NpyWriter
from tapeline.store.formats.text import CsvReader, CsvWriter

__all__ = [
    "READERS",
    "WRITERS",
    "MappedReader",
    "Reader",
    "Writer",
    "ZarrReader",
    "arrays_of",
    "content_hash",
]

WRITERS: dict[str, type[Writer]] = {
    "mmap": MappedWriter,
    "npy": NpyWriter,
    "zarr": ZarrWriter,
    "csv": CsvWriter,
}
READERS: dict[str, type[Reader]] = {
    "mmap": MappedReader,
    "npy": NpyReader,
    "zarr": ZarrReader,
    "csv": CsvReader,
}
