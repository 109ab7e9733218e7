"""From market data files to a store: read in order or by several processes, appended as read."""

from tapeline.ingest.config import IngestConfig, Reading
from tapeline.ingest.files import (
    Ingested,
    distinct,
    ingest,
    ingest_parallel,
    ingest_part,
)
from tapeline.store.write import check_out

__all__ = [
    "IngestConfig",
    "Ingested",
    "Reading",
    "check_out",
    "distinct",
    "ingest",
    "ingest_parallel",
    "ingest_part",
]
