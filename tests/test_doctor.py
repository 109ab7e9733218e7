"""What `tapeline doctor` tries, and that it sees each fault."""

import fcntl
import json
import time
from collections import namedtuple
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from tapeline import doctor, files
from tapeline.cli import app
from tapeline.errors import RunError


def found(checks, part):
    return next(check for check in checks if check.part == part)


def test_a_sound_installation_has_no_fault(tmp_path):
    checks = doctor.examine(tmp_path)
    assert [check for check in checks if check.status == "fault"] == []
    assert {"packages", "devices", "threads", "kernel", "clock", "space"} <= {
        check.part for check in checks
    }
    assert list(tmp_path.iterdir()) == []  # nothing stays behind


def disk_that(fails):
    def refuse(*_, **__):
        raise OSError(95, "Operation not supported")

    return refuse if fails else None


@pytest.mark.parametrize(
    ("part", "place", "name", "broken"),
    [
        ("threads", torch, "get_num_threads", lambda: 10_000),
        ("locks", fcntl, "flock", lambda *_: None),
        ("clock", time, "gmtime", lambda: time.struct_time((1970, 1, 1, 0, 0, 0, 3, 1, 0))),
        (
            "space",
            doctor.shutil,
            "disk_usage",
            lambda _: namedtuple("usage", "total used free")(10, 9, 1),
        ),
        ("memory map", doctor.mmap, "mmap", disk_that(fails=True)),
        ("packages", metadata, "version", lambda _: "0.0.1"),
    ],
)
def test_each_fault_is_seen_and_says_what_to_do(tmp_path, monkeypatch, part, place, name, broken):
    monkeypatch.setattr(place, name, broken)
    check = found(doctor.examine(tmp_path), part)
    assert check.status == "fault"
    assert check.found and check.fix


def test_a_disk_that_can_not_rename_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(files.Path, "replace", disk_that(fails=True))
    check = found([doctor._rename(tmp_path)], "rename")
    assert (check.status, check.found) == ("fault", "Operation not supported")


def test_an_absent_extra_is_a_note_with_its_command(tmp_path, monkeypatch):
    version = metadata.version

    def without_zarr(name):
        if name == "zarr":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_zarr)
    check = found(doctor.examine(tmp_path), "extra remote")
    assert (check.status, check.fix) == ("note", 'pip install "tapeline[remote]"')
    assert "zarr (absent)" in check.found


def test_no_folder_is_a_sentence(tmp_path):
    with pytest.raises(RunError) as error:
        doctor.examine(tmp_path / "none")
    assert str(error.value) == (
        f"{tmp_path / 'none'}: expected a folder, found none. Make it, or name the one runs go to."
    )


def test_the_verb_prints_what_was_tried_and_exits_with_1_for_a_fault(tmp_path, monkeypatch):
    result = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert result.exit_code == 0
    assert {"part": "memory map", "status": "ok", "found": "stores can be mapped", "fix": ""} in (
        json.loads(result.stdout)["checks"]
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert "OMP_NUM_THREADS" in result.stdout
