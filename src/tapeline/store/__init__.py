"""Sessions on disk, as shards: written whole or not at all, checked at open, equal in every format.

A store is a folder with one subfolder per format, so that the same sessions can lie side by side
as CSV (to look at), NumPy files (to exchange) and one memory-mapped file (to train from).
"""

from tapeline.store.layout import FORMATS, StoreIndex
from tapeline.store.shards import Shards
from tapeline.store.write import write_shards

__all__ = ["FORMATS", "Shards", "StoreIndex", "write_shards"]
