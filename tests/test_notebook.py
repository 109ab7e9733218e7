"""The notebook: every cell runs, and git keeps none of what it showed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "look_at_a_run.ipynb"


def test_every_cell_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="nbclient isn't installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat isn't installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [
        output.data
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "display_data"
    ]
    assert sum("image/png" in data for data in shown) == 4


def test_it_is_kept_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and not cell.get("execution_count")
