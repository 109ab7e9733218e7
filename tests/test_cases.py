"""The worked cases of docs/cases: every command of each runs, and says what the case rests on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT / "docs" / "cases"
SAID = {
    "slow_run": ["checkpoint-bound", "the same bits in all 150 steps"],
    "checkpoint_strategy": ["save every 312 s of work", "Take spot (1.10 a useful hour", "2 tiers"],
    "reproducibility_audit": [
        "Bit-exact on",
        "the same bits in 60 losses and in the state after step 60",
        "training.learning_rate",
    ],
}


def test_every_case_is_run_here():
    assert {path.stem for path in CASES.glob("*.md")} == SAID.keys()


@pytest.mark.parametrize("case", SAID)
def test_its_commands_run(case, tmp_path, warm):
    page = (CASES / f"{case}.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = subprocess.run(
        ["bash", "-c", "set -eu\n" + "".join(blocks)],
        cwd=tmp_path,
        env=warm,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in SAID[case]:
        assert words in done.stdout + done.stderr
        assert words in page, "the page shows it too"
