"""Checkpoints: all state of a run, committed whole, verified before use."""

from tapeline.checkpoint.checkpointer import Checkpointer
from tapeline.checkpoint.commit import read_manifest, verify
from tapeline.checkpoint.load import load_checkpoint, load_state
from tapeline.checkpoint.manifest import Manifest
from tapeline.checkpoint.restore import restore_model, restore_state
from tapeline.checkpoint.save import save_checkpoint, save_state
from tapeline.checkpoint.shelf import Entry, Loaded, Newest, Shelf, Skipped
from tapeline.checkpoint.state import (
    State,
    capture_state,
    part_sha256,
    state_sha256,
)
from tapeline.checkpoint.stats import SaveStats
from tapeline.checkpoint.votes import Ranks

__all__ = [
    "Checkpointer",
    "Entry",
    "Loaded",
    "Manifest",
    "Newest",
    "Ranks",
    "SaveStats",
    "Shelf",
    "Skipped",
    "State",
    "capture_state",
    "load_checkpoint",
    "load_state",
    "part_sha256",
    "read_manifest",
    "restore_model",
    "restore_state",
    "save_checkpoint",
    "save_state",
    "state_sha256",
    "verify",
]
