"""Names that somebody gave to checkpoints, kept for ever beside them: `tags/<tag>.json`.

Covers: giving a name once and reading all names, in a folder or an object store. Does not cover
what a tagged checkpoint is protected from (`retain`).
"""

from __future__ import annotations

import json
import re
from typing import Any

from tapeline.checkpoint.place import Place
from tapeline.errors import CheckpointError
from tapeline.files import canonical_json

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Tags:
    """The tags of one place."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def check(self, tag: str) -> None:
        """Raise a `CheckpointError` if a tag is no plain name."""
        if not _TAG.fullmatch(tag):
            raise CheckpointError(
                "tag",
                expected="letters, digits, `.`, `_` and `-`, up to 100",
                found=repr(tag),
                fix="Choose another name",
            )

    def add(self, tag: str, fields: dict[str, Any]) -> None:
        """Give a name to what `fields` identify, with its `step`; the same again is no news.

        Raises:
            CheckpointError: the tag is no plain name, or is another one's.
        """
        self.check(tag)
        record = canonical_json(fields)
        try:
            self._place.put_once(f"tags/{tag}.json", record.encode())
        except FileExistsError:
            there = self._place.read(f"tags/{tag}.json").decode()
            if there != record:
                raise CheckpointError(
                    f"{self._place}, tag {tag}",
                    expected=f"no tag of that name, or {record}",
                    found=there,
                    fix="Choose another name: a tag stays where it is",
                ) from None

    def steps(self) -> dict[str, int]:
        """Every tag with the step of its checkpoint.

        Raises:
            CheckpointError: a record is damaged.
        """
        found = {}
        for name in sorted(self._place.sizes("tags")):
            _, _, file = name.partition("/")
            if file.endswith(".json"):
                record = self._place.read(name)
                try:
                    found[file.removesuffix(".json")] = int(json.loads(record)["step"])
                except (ValueError, KeyError, TypeError):
                    raise CheckpointError(
                        f"{self._place}/{name}",
                        expected="a tag's record",
                        found=repr(record[:40]),
                        fix="It is damaged. Delete it and tag again",
                    ) from None
        return found
