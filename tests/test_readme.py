"""The README, run from top to bottom as a newcomer would, in an empty folder."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(400)
def test_every_block_runs(tmp_path, warm):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "python.py").write_text("".join(code for kind, code in BLOCKS if kind == "python"))
    commands = [code for kind, code in BLOCKS if kind == "sh" and not code.startswith("make ")]
    assert len(commands) >= 4
    first, *rest = commands  # the Python blocks use the store that the first one makes
    script = "set -eu\n" + "\n".join([first, "python python.py", *rest])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=warm,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "budget.svg").exists()
    assert (tmp_path / "runs" / "reference" / "run.json").exists()
    assert (tmp_path / "tutorial" / "tutorial.json").exists()


def test_the_two_commands_are_targets():
    """`make test` is what runs this; `make demo` runs what test_tours.py runs, once set up."""
    made = [code.strip() for kind, code in BLOCKS if kind == "sh" and code.startswith("make ")]
    assert made == ["make demo", "make test"]
    for command in made:
        done = subprocess.run(
            [*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert ".venv/bin/pytest" in done.stdout


def test_the_tree_of_the_code_is_the_tree():
    told = re.search(r"^src/tapeline/\n(.*?)^```", README, re.MULTILINE | re.DOTALL).group(1)
    names = {line.split()[0].rstrip("/") for line in told.splitlines()[:-1]}
    names |= {f"{name}.py" for name in told.splitlines()[-1].split()}
    here = {p.name for p in (ROOT / "src" / "tapeline").iterdir() if not p.name.startswith("__")}
    assert names == here - {"py.typed"}


def test_links_and_pictures_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
