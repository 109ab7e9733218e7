"""`tapeline new`: a project whose own README works."""

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.errors import RunError
from tapeline.project import create


def test_a_new_project_passes_its_own_tests_and_trains(tmp_path, warm):
    folder = tmp_path / "midprice"
    result = CliRunner().invoke(app, ["new", str(folder)])
    assert result.exit_code == 0
    assert [Path(line).name for line in result.stdout.split()] == [
        "README.md",
        ".gitignore",
        "model.py",
        "test_model.py",
        "train.toml",
    ]
    readme = (folder / "README.md").read_text()
    commands = [
        line.split("#")[0].split()
        for line in re.findall(r"^    ((?:tapeline|pytest).*)$", readme, re.MULTILINE)
    ]
    assert [command[0] for command in commands] == ["tapeline", "tapeline", "pytest", "tapeline"]
    for program, *arguments in commands:
        if arguments[:1] == ["train"]:
            arguments += ["--set", "training.steps=20"]
        command = ["python", "-m", program, *arguments]
        done = subprocess.run(
            command, cwd=folder, env=warm, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "runs" / "midprice" / "checkpoints" / "step-00000020").is_dir()


@pytest.mark.parametrize("name", ["1st", "a b", "", "née", "x;y"])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(RunError) as error:
        create(Path(name) if not name else tmp_path / name)
    assert str(error.value) == (
        "the project's name: expected a letter, then letters, digits, - or _, "
        f"found {name!r}. Choose another name."
    )


def test_a_folder_in_use_is_left_alone(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "work.py").write_text("x = 1")
    with pytest.raises(RunError, match="expected a new folder, found one in use"):
        create(folder)
    assert [path.name for path in folder.iterdir()] == ["work.py"]
