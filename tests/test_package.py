"""What is handed out: the sdist, the wheel with only what it asks for, and the public names."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tapeline

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tapeline"

pytestmark = pytest.mark.timeout(300)  # a build, and kernels compiled anew


def ran(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command without what this session's environment says about where Python looks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=kept, capture_output=True, text=True, check=False
    )


def well(*command: object, cwd: Path) -> str:
    done = ran(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needed_by(requirements: list[str], found: dict[str, metadata.Distribution]) -> None:
    """Add the distributions that are asked for, and those that they ask for in turn."""
    for requirement in map(Requirement, requirements):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            one = found[requirement.name] = metadata.distribution(requirement.name)
            needed_by(one.requires or [], found)
            for extra in requirement.extras:
                of_extra = [r for r in one.requires or [] if f'extra == "{extra}"' in r]
                needed_by([r.partition(";")[0] for r in of_extra], found)


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Let an environment see what is installed in this one."""
    for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(distribution.locate_file(name))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Made from the sdist, which is made from a copy of the sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    well(sys.executable, "-m", "build", "--no-isolation", folder, cwd=folder)
    assert len(list(folder.glob("dist/*.tar.gz"))) == 1
    (made,) = folder.glob("dist/*.whl")
    return made


@pytest.fixture(scope="module")
def tools(wheel, tmp_path_factory) -> Path:
    """The commands of an environment with the wheel and what it asks for; nothing is fetched."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    well(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (about,) = metadata.distributions(path=[str(site)])
    assert (about.name, about.version) == ("tapeline", tapeline.__version__)
    needed: dict[str, metadata.Distribution] = {}
    needed_by(about.requires, needed)
    for one in needed.values():
        link(one, site)
    return folder / "bin"


def test_the_wheel_holds_every_file_of_the_package(wheel):
    there = {
        str(path.relative_to(ROOT / "src"))
        for path in SOURCE.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert {"tapeline/py.typed", "tapeline/report/page.css"} < there
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == there


@pytest.fixture(scope="module")
def project(tools, tmp_path_factory) -> Path:
    """Made, with a store and a run, by the wheel's own commands from an empty folder."""
    folder = tmp_path_factory.mktemp("empty")
    well(tools / "tapeline", "new", "mine", cwd=folder)
    folder /= "mine"
    well(tools / "tapeline", "ingest", "--synthetic", 4, cwd=folder)
    steps = ("--set", "training.steps=20", "--out", "run")
    well(tools / "tapeline", "train", "train.toml", *steps, cwd=folder)
    (folder / "bars.csv").write_text("time,price\n2024-01-02T15:00:00Z,1.5\n")
    return folder


def test_from_an_empty_folder_the_wheel_makes_a_store_and_trains(tools, project):
    place = well(tools / "python", "-c", "import tapeline; print(tapeline.__file__)", cwd=project)
    assert Path(place.strip()).is_relative_to(tools.parent)
    assert "ingest" in well(tools / "tapeline", "--help", cwd=project)
    well(tools / "tapeline", "report", "run", cwd=project)
    assert "<style>" in (project / "run" / "report.html").read_text()
    (packages, *_) = json.loads(well(tools / "tapeline", "doctor", "--json", cwd=project))["checks"]
    assert (packages["part"], packages["status"]) == ("packages", "ok")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("markets", "ingest bars.csv --instrument A --sessions calendar:XNYS --out out"),
        ("remote", "ingest --synthetic 2 --format zarr --out out"),
        ("search", "search run search.toml"),
        ("metrics", "export run --to prometheus --textfile x.prom"),
        ("trackers", "export run --to tensorboard --out out"),
        ("trackers", "export run --to mlflow --uri http://127.0.0.1:1"),
        ("trackers", "export run --to wandb --out out"),
    ],
)
def test_a_verb_whose_extra_is_missing_names_it(tools, project, extra, words):
    done = ran(tools / "tapeline", *words.split(), cwd=project)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tapeline: ")
    assert f'pip install "tapeline[{extra}]"' in done.stderr


ROOMS = [
    "tapeline",
    *(
        f"tapeline.{path.parent.name}"
        for path in sorted(SOURCE.glob("*/__init__.py"))
        if "__all__" in path.read_text()
    ),
]


def test_every_room_of_the_reference_says_what_is_public():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    assert {f"tapeline.{page.stem}" for page in pages} - {"tapeline.tapeline"} < {*ROOMS}


def own_names(room: str) -> Iterator[str]:
    """What a room's face defines, or takes from its own modules."""
    text = Path(importlib.import_module(room).__file__).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{room}."):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_all_that_is_public(room):
    module = importlib.import_module(room)
    assert len(module.__all__) == len({*module.__all__})
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert {*own_names(room)} <= {*module.__all__}


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    heavy = "{'torch', 'numpy', 'scipy', 'numba', 'pyarrow', 'matplotlib', 'pydantic'}"
    code = f"import sys, tapeline; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_the_version_stands_in_one_place():
    written = f'"{tapeline.__version__}"'
    holding = [path for path in SOURCE.rglob("*.py") if written in path.read_text()]
    assert holding == []
    assert f"version = {written}" in (ROOT / "pyproject.toml").read_text()
