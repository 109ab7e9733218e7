"""`tapeline store` for stores behind a URL and for parts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from tapeline.store import Shards, write_part, write_shards

REMOTE = "memory://command-line/store"


def test_a_store_goes_to_a_url_and_comes_back(tapeline, tmp_path: Path) -> None:
    write_shards([np.ones((5, 2)), np.zeros((3, 2))], "here", "mmap")
    code, _, err = tapeline("store", "convert", "here", "--to", "zarr", "--out", REMOTE)
    assert (code, err) == (0, f"{REMOTE}/zarr: 2 sessions\n")
    assert tapeline("store", "verify", REMOTE)[0] == 0
    code, out, _ = tapeline("store", "info", REMOTE, "--json")
    said = json.loads(out)
    assert (code, said["store"], said["format"], said["rows"]) == (0, REMOTE, "zarr", 8)
    assert said["fingerprint"] == Shards("here").fingerprint
    code, _, err = tapeline("store", "convert", REMOTE, "--to", "npy", "--out", "back")
    assert (code, err) == (0, "back/npy: 2 sessions\n")
    assert Shards("back").fingerprint == Shards("here").fingerprint
    code, _, err = tapeline("store", "convert", REMOTE, "--to", "csv")
    assert code == 2
    assert "expected a folder on this machine for this format, found a URL" in err


def test_parts_are_joined_by_hand(tapeline) -> None:
    for part in (1, 2):
        write_part([np.full((2, 2), part)], f"s{part}", "mmap", part=part, num_parts=2)
    code, _, err = tapeline("store", "join", "s1")
    assert code == 2
    assert "expected 2 parts that are complete, found 1 that aren't: 2." in err
    write_part([], "s1", "mmap", part=2, num_parts=2)
    code, _, err = tapeline("store", "join", "s1", "--format", "mmap")
    assert code == 0
    assert re.fullmatch(r"s1/mmap: joined\n", err)
    assert len(Shards("s1")) == 1
