"""The documentation names tests and files: they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_a_guarantee_names_exists():
    written = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    there = set(re.findall(r"def (test_\w+)", written))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text()))
    assert len(named) > 50
    assert named <= there, named - there


def test_links_within_the_documents_lead_somewhere():
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
