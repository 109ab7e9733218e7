"""The record of a run: code with all that differs from its commit, environment, and no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tapeline.clock import FakeClock
from tapeline.config import RunConfig
from tapeline.runs import RunFolder, code_state, record
from tapeline.runs.checkout import code_elsewhere, code_record, hunks_of, sections_of, source_of
from tapeline.runs.environment import container, environment, installed, variables
from tapeline.runs.record import SURROUNDINGS, given
from tapeline.runs.secrecy import (
    is_secret_file,
    looks_secret,
    redacted,
    redacted_command,
    without_credentials,
    without_secrets,
)

ANYONE = ("-c", "user.name=anyone", "-c", "user.email=anyone@localhost")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *ANYONE, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def repository(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    for name, text in {"model.py": "a = 1\nb = 2\n", **files}.items():
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


@pytest.fixture
def checkout(tmp_path):
    return repository(tmp_path / "code")


def test_a_clean_checkout_is_its_commit(checkout):
    found = code_record(checkout)
    assert found["state"] == "clean"
    assert found["commit"] == git(checkout, "rev-parse", "HEAD").strip()
    assert (found["files"], found["diff"], found["left_out"]) == ({}, "", {})


def test_what_differs_comes_back_from_the_patch(checkout, tmp_path):
    """Changed, staged, deleted, binary and untracked files, names with spaces and accents."""
    (checkout / "gone.py").write_text("x = 1\n")
    (checkout / "staged.py").write_text("y = 1\n")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "more")
    (checkout / "model.py").write_text("a = 1\nb = 3\n")
    (checkout / "gone.py").unlink()
    (checkout / "staged.py").write_text("y = 2\n")
    git(checkout, "add", "staged.py")
    (checkout / "new folder").mkdir()
    (checkout / "new folder" / "número.py").write_text("z = 1\n")
    (checkout / "weights.bin").write_bytes(bytes(range(256)))
    before = git(checkout, "status", "--porcelain"), list((checkout / ".git").rglob("*"))
    found = code_record(checkout)
    assert (git(checkout, "status", "--porcelain"), list((checkout / ".git").rglob("*"))) == before
    assert (found["state"], found["changed"], found["untracked"]) == ("dirty", 3, 2)
    assert found["left_out"] == {}
    assert found["files"]["gone.py"] == {"status": "D", "bytes": None, "sha256": None}

    again = tmp_path / "again"
    git(checkout, "worktree", "add", "-q", "--detach", str(again), found["commit"])
    (tmp_path / "patch").write_text(found["diff"])
    git(again, "apply", str(tmp_path / "patch"))
    here = {p.relative_to(checkout): p.read_bytes() for p in checkout.rglob("*") if p.is_file()}
    there = {p.relative_to(again): p.read_bytes() for p in again.rglob("*") if p.is_file()}
    assert {p: b for p, b in here.items() if p.parts[0] != ".git"} == {
        p: b for p, b in there.items() if p.parts[0] != ".git"
    }


def test_a_change_of_the_same_length_within_the_second_is_seen(checkout):
    (checkout / "model.py").write_text("a = 1\nb = 7\n")
    found = code_record(checkout)
    assert "+b = 7" in found["diff"]
    assert found["left_out"] == {}


def test_the_patch_is_bounded_and_says_what_it_lacks(checkout):
    (checkout / "small.py").write_text("x = 1\n")
    (checkout / "large.py").write_text("# a line\n" * 1000)
    (checkout / "middle.py").write_text("# a line\n" * 100)
    found = code_record(checkout, diff_bytes=1000)
    assert list(sections_of(found["diff"])) == ["small.py"]
    assert found["left_out"] == {
        "large.py": "it has 9,000 bytes",
        "middle.py": "the patch would have more than 1,000 bytes",
    }
    assert found["files"]["large.py"]["sha256"]


def test_keys_are_never_read_and_secrets_never_kept(checkout):
    (checkout / ".env").write_text("DATABASE=hunter2hunter2\n")
    (checkout / "id_rsa").write_text("hunter2hunter2\n")
    (checkout / "model.py").write_text(
        'a = 1\nAPI_KEY = "hunter2hunter2"\nurl = "https://me:hunter2hunter2@host/x"\n'
    )
    found = code_record(checkout)
    assert "hunter2" not in json.dumps(found)
    assert set(found["left_out"]) == {".env", "id_rsa", "model.py"}
    assert found["files"][".env"]["sha256"] is None
    assert "looks like a secret" in found["left_out"]["model.py"]


def test_what_runs_wrote_is_no_code(checkout):
    run = checkout / "runs" / "first"
    (run / "metrics").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "metrics" / "rank-0.jsonl").write_text("")
    assert code_record(checkout)["state"] == "clean"
    assert code_state(checkout)["untracked"] == 0
    (checkout / "runs" / "note.py").write_text("")
    assert code_state(checkout)["untracked"] == 1


def test_no_repository_and_a_failing_git_are_not_clean(tmp_path, checkout, monkeypatch):
    assert code_record(tmp_path)["state"] == "not a repository"
    (checkout / ".git" / "HEAD").write_text("damaged")
    found = code_record(checkout)
    assert found["state"] in ("not a repository", "unknown")  # git calls it no repository at all
    assert found["commit"] is None
    (checkout / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (checkout / ".git" / "index").write_text("damaged")
    found = code_record(checkout)
    assert found["state"] == "unknown"
    assert "index" in found["problem"]
    monkeypatch.setenv("PATH", str(tmp_path))
    found = code_record(checkout)
    assert found["state"] == "unknown"
    assert "git could not be asked" in found["problem"]


def test_a_repository_without_a_commit_is_dirty(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("a = 1\n")
    found = code_record(tmp_path)
    assert (found["state"], found["commit"], found["problem"]) == ("dirty", None, "no commit yet")
    assert list(sections_of(found["diff"])) == ["model.py"]


def test_submodules_are_part_of_the_code(checkout, tmp_path):
    inner = repository(tmp_path / "inner")
    git(
        checkout, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "m"
    )
    git(checkout, "commit", "-q", "-m", "with a submodule")
    commit = git(inner, "rev-parse", "HEAD").strip()
    assert code_record(checkout)["submodules"] == [
        {"path": "m", "commit": commit, "state": "clean"}
    ]
    (checkout / "m" / "new.py").write_text("")
    found = code_record(checkout)
    assert found["state"] == "dirty"
    assert found["submodules"][0]["state"] == "dirty"


def test_checkouts_elsewhere_are_recorded_once_each(checkout, tmp_path):
    other = repository(tmp_path / "other", **{"lib.py": "x = 1\n"})
    (other / "lib.py").write_text("x = 2\n")
    (other / "sub").mkdir()
    folders = {"model": checkout, "library": other, "again": other / "sub", "no": tmp_path}
    (found,) = code_elsewhere(folders, code_record(checkout))
    assert (found["of"], found["state"]) == ("library", "dirty")
    assert "+x = 2" in found["diff"]


def test_hunks_are_counted_by_file():
    diff = (
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n"
        "@@ -1 +1 @@\n-a\n+b\n@@ -9 +9 @@\n-c\n+d\n"
        "diff --git a/b.bin b/b.bin\nBinary files differ\n"
    )
    assert hunks_of(sections_of(diff).items()) == {"a.py": 2, "b.bin": 1}


def test_the_source_of_a_model_is_found_without_importing_it(tmp_path):
    (tmp_path / "net.py").write_text("raise SystemExit\n")
    found = source_of("net:build", tmp_path)
    assert found is not None
    assert (found["file"], found["package"]) == (str(tmp_path / "net.py"), False)
    (tmp_path / "net.py").write_text("raise SystemExit(1)\n")
    assert source_of("net:build", tmp_path)["sha256"] != found["sha256"]
    assert source_of("tapeline.training.models:perceptron", None)["package"] is True
    assert source_of("nowhere.at_all:f", tmp_path) is None


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "apiKey",
        "db_password",
        "--auth",
        "PGPASSWORD",
        "X_DSN",
    ],
)
def test_names_of_secrets_are_told(name):
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "monkey", "keyboard", "data.store", "passes"])
def test_other_names_are_not_secret(name):
    assert not looks_secret(name)


def test_names_of_secret_files_are_told():
    for name in (
        ".env",
        ".env.local",
        "server.pem",
        "id_ed25519",
        "credentials.json",
        "secret.toml",
    ):
        assert is_secret_file(name), name
    for name in ("model.py", "tokenizer.py", "keys_of_sessions.py", "environment.py"):
        assert not is_secret_file(name), name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s3://id:secret@host/x and b", "s3://***@host/x and b"),
        ("https://ghp_token@github.com/a", "https://***@github.com/a"),
        ("ssh://git@github.com/a", "ssh://git@github.com/a"),
        (
            "https://h/x?page=2&X-Amz-Signature=abc&b=1",
            "https://h/x?page=2&X-Amz-Signature=***&b=1",
        ),
        ("mail me@host", "mail me@host"),
    ],
)
def test_urls_lose_their_credentials(text, told):
    assert without_credentials(text) == told


def test_secrets_go_from_values_commands_and_sources():
    assert redacted({"a": ["s3://k:s@h", 1], "b": None}) == {"a": ["s3://***@h", 1], "b": None}
    words = [
        "tapeline",
        "--token",
        "abc",
        "--set",
        "x.api_key=abc",
        "--set",
        "data.store=s3://a:b@c",
    ]
    assert redacted_command(words) == [
        *("tapeline", "--token", "***", "--set", "x.api_key=***", "--set", "data.store=s3://***@c")
    ]
    assert without_secrets("password: 'longenough'\nkeyed = 'longenough'") == (
        "password: '***'\nkeyed = 'longenough'"
    )


def test_variables_are_read_by_name_and_never_if_secret():
    class Reluctant(dict):
        def __getitem__(self, name):
            assert name != "CUDA_API_KEY"
            return super().__getitem__(name)

    given = Reluctant(OMP_NUM_THREADS="2", CUDA_API_KEY="x", HOME="/h", TORCH_HOME="http://a:b@c")
    assert variables(given) == {"OMP_NUM_THREADS": "2", "TORCH_HOME": "http://***@c"}


def test_the_image_of_a_container_is_told_where_it_can_be(tmp_path):
    assert container({}, tmp_path) is None
    assert container({"TAPELINE_IMAGE": "r/i@sha256:ab"}, tmp_path) == {
        "image": "r/i@sha256:ab",
        "digest": "r/i@sha256:ab",
    }
    (tmp_path / ".dockerenv").touch()
    assert container({}, tmp_path) == {"image": None, "digest": None}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").write_text('engine="podman"\nimage="i:1"\nimageid="cd"\n')
    assert container({}, tmp_path) == {"image": "i:1", "digest": "cd"}


def test_installed_packages_are_those_that_metadata_names():
    from importlib.metadata import version

    packages, origins = installed()
    for name in ("numpy", "torch", "typer", "pytest"):
        assert packages[name] == version(name)
    assert all(set(origin) == {"url", "editable", "commit"} for origin in origins.values())


def test_the_environment_is_json_without_secrets(monkeypatch):
    monkeypatch.setenv("NCCL_TOKEN", "hunter2")
    monkeypatch.setattr(sys, "argv", ["tapeline", "--password", "hunter2"])
    text = json.dumps(environment())
    assert "hunter2" not in text
    assert json.loads(text)["torch"]["threads"] == 1


@pytest.fixture
def config(tmp_path):
    (tmp_path / "run.toml").write_text(
        'seed = 3\n[data]\nstore = "s3://id:hunter2@host/x"\n[training]\nsteps = 7\n'
    )
    return RunConfig.load(tmp_path / "run.toml", ["training.batch=8"])


def test_the_record_says_what_was_given_and_what_is_default(config):
    assert given(config) == [
        *("data.store", "model.folder", "seed", "training.batch", "training.steps")
    ]


def test_the_record_holds_everything_but_secrets(config, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    (checkout / "net.py").write_text("")
    found = record(config, {"store": "s3://id:hunter2@host/x", "fingerprint": "f"}, FakeClock())
    del found["other_code"]  # this file itself may be among what differs there
    assert "hunter2" not in json.dumps(found)
    assert found["config"]["data"]["store"] == "s3://***@host/x"
    assert found["config_hash"] == config.hash()
    assert found["seeds"] == {"run": 3}
    assert found["code"]["state"] == "dirty"
    assert found["sources"]["model.factory"]["package"] is True
    assert set(SURROUNDINGS) - {"other_code"} < set(found)


def test_each_life_has_a_record_of_its_own(config, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout)
    run = RunFolder(tmp_path / "run", FakeClock())
    run.create(record(config, {}, FakeClock()))
    assert run.begin_attempt(from_step=0, world_size=1) == 1
    (checkout / "net.py").write_text("")
    again = RunFolder(tmp_path / "run", FakeClock())
    saved = run.checkpoints_path / "step-00000007"
    saved.mkdir(parents=True)
    about = {"run": "r", "attempt": 1, "contract": {"scope": "statistical"}, "code": {}}
    manifest = {"metadata": about, "files": {"a": {"xxh3_128": "h", "bytes": 1}}}
    (saved / "manifest.json").write_text(json.dumps(manifest))
    said = {"config": {"data": {"store": "s3://id:hunter2@host"}}}
    assert again.begin_attempt(from_step=7, world_size=2, said=said) == 2
    first, second = run.attempt_record(1), run.attempt_record(2)
    assert first is not None
    assert second is not None
    assert (first["code"]["state"], second["code"]["state"]) == ("clean", "dirty")
    assert first["origin"] is None
    assert second["origin"] == {
        "step": 7,
        "run": "r",
        "attempt": 1,
        "files": {"a": "h"},
        "contract": {"scope": "statistical"},
    }
    assert second["config"]["data"]["store"] == "s3://***@host"
    assert run.attempt_record(3) is None
    assert run.origin(99) == {"step": 99}


def test_the_record_survives_a_folder_that_is_gone(tmp_path, monkeypatch):
    """A checkout whose folder was deleted under the process is unknown, not clean."""
    gone = tmp_path / "gone"
    gone.mkdir()
    assert code_record(gone)["state"] == "not a repository"
    os.rmdir(gone)  # noqa: PTH106
    assert code_record(gone)["state"] == "unknown"
