"""The documentation: its code runs, its links lead somewhere, the tests it names are there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapeline.tape import demo_tape

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([DOCS / "index.md", DOCS / "tour.md", *DOCS.glob("parts/*"), *DOCS.glob("howto/*")])
WITHOUT_CODE = {"howto/slurm"}  # its script is run by `test_the_slurm_script_is_requeued`


def script_of(page: Path, folder: Path) -> str:
    """The page as one script: each block in a shell, or an interpreter, of its own."""
    lines = ["set -eu"]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for number, (kind, code) in enumerate(blocks):
        if kind == "python":
            (folder / f"block_{number}.py").write_text(code)
            lines.append(f"python block_{number}.py")
        else:
            lines.append(f"(\n{code})")
    return "\n".join(lines)


def run_script(script: str, folder: Path, environment: dict) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", [str(p.relative_to(DOCS).with_suffix("")) for p in PAGES])
def test_every_block_of_a_page_runs(page, tmp_path, warm):
    if page == "tour" and demo_tape() is None:
        pytest.skip("the data package of the demo extra is missing")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = script_of(DOCS / f"{page}.md", tmp_path)
    assert (script == "set -eu") == (page in WITHOUT_CODE)
    done = run_script(script, tmp_path, warm)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(200)
def test_the_slurm_script_is_requeued(tmp_path, warm):
    """Notified like Slurm does it, the job script saves, asks to be requeued, and goes on."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "tools").mkdir()
    scontrol = tmp_path / "tools" / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    scontrol.chmod(0o755)
    page = (DOCS / "howto" / "slurm.md").read_text()
    job = re.search(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL).group(1)
    assert "--ranks 1:4" in job
    (tmp_path / "job.sh").write_text(job.replace("--ranks 1:4", "--ranks 1:2"))
    notice = """
set -eu
tapeline ingest --synthetic 8 --out stores/market
export SLURM_JOB_ID=7
bash job.sh & job=$!
while ! ls runs/reference/checkpoints/step-* > /dev/null 2>&1; do sleep 0.1; done
kill -USR1 $job
code=0; wait $job || code=$?
test $code = 75
bash job.sh
"""
    path = os.pathsep.join([str(tmp_path / "tools"), warm["PATH"]])
    done = run_script(notice, tmp_path, {**warm, "PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


@pytest.mark.timeout(200)
def test_the_site_is_built_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "checkpoint" / "index.html").read_text()
    assert "Checkpointer" in page and "Commit a state as" in page


def test_every_test_that_a_guarantee_names_exists():
    written = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    there = set(re.findall(r"def (test_\w+)", written))
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "guarantees.md").read_text()))
    assert len(named) > 50
    assert named <= there, named - there


def test_links_within_the_documents_lead_somewhere():
    for page in DOCS.glob("**/*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
