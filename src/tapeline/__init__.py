"""tapeline: train sequence models on market tick data.

Know where every second of a training run went, and never lose a step. The names below are the
small face of the library; each is fetched from its room when first asked for, so that importing
tapeline costs next to nothing.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapeline.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
    from tapeline.session import Session, SessionKey
    from tapeline.store import Shards, write_shards
    from tapeline.tape import read_orders, synthetic_sessions
    from tapeline.training import data_parallel_grads, evaluate, train
    from tapeline.windows import (
        Loader,
        Normaliser,
        WindowIndex,
        WindowSampler,
        make_batch,
        make_batch_vec,
    )

_ROOMS = {
    "checkpoint": ("Checkpointer", "load_checkpoint", "save_checkpoint"),
    "session": ("Session", "SessionKey"),
    "store": ("Shards", "write_shards"),
    "tape": ("read_orders", "synthetic_sessions"),
    "training": ("data_parallel_grads", "evaluate", "train"),
    "windows": (
        "Loader",
        "Normaliser",
        "WindowIndex",
        "WindowSampler",
        "make_batch",
        "make_batch_vec",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__version__ = version("tapeline")
__all__ = [
    "Checkpointer",
    "Loader",
    "Normaliser",
    "Session",
    "SessionKey",
    "Shards",
    "WindowIndex",
    "WindowSampler",
    "data_parallel_grads",
    "evaluate",
    "load_checkpoint",
    "make_batch",
    "make_batch_vec",
    "read_orders",
    "save_checkpoint",
    "synthetic_sessions",
    "train",
    "write_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'tapeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tapeline.{_ROOM_OF[name]}"), name)
