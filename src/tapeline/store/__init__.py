"""Sessions on disk, as shards: written whole or not at all, checked at open, equal in every format.

A store is a folder, or a prefix behind a URL, with one subfolder per format, so that the same
sessions can lie side by side as CSV (to look at), NumPy files (to exchange), compressed Zarr (to
keep on an object store) and one memory-mapped file (to train from).
"""

from tapeline.store.layout import EVERY_FORMAT, FORMATS, StoreIndex
from tapeline.store.parts import join_parts, join_shards, write_part
from tapeline.store.shards import Shards, open_reader, stream_sessions
from tapeline.store.write import append_shards, write_shards

__all__ = [
    "EVERY_FORMAT",
    "FORMATS",
    "Shards",
    "StoreIndex",
    "append_shards",
    "join_parts",
    "join_shards",
    "open_reader",
    "stream_sessions",
    "write_part",
    "write_shards",
]
