"""`tapeline export --to tensorboard|mlflow|wandb`: what trackers hold of a run, read back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict

import numpy as np
import pytest
from helpers_ledger import begin, kill, new_clock, steps
from helpers_runs import COMMIT, new_record
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner
from wandb.proto.wandb_internal_pb2 import Record

from tapeline.cli import app
from tapeline.clock import SystemClock, utc
from tapeline.errors import ExportError
from tapeline.export.mlflow import MlflowServer
from tapeline.export.tensorboard import TensorBoard
from tapeline.export.tracking import Sent, send
from tapeline.export.wandb import WandbOffline
from tapeline.files import Journal, xxh3_file
from tapeline.ledger import account_of
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder
from tapeline.runs.view import RunView, run_id_of, view_of
from tapeline.signals import Series

WALL_S = 1_700_000_000
FINDING = {"attempt": 1, "watcher": "spike", "step": 4, "seen": "a jump", "means": "trouble"}


def live(run, number, first, last, *, clock, how=None):
    """A life that did steps from after `first` up to `last`; one without an end was killed."""
    here = {"attempt": number, "started": "s", "world_size": 1, "from_step": first}
    with Journal(run.attempts_path) as journal:
        journal.append({**here, "host": "elsewhere"})
    ledger = begin(run.path, clock, attempt=number, from_step=first)
    steps(ledger, clock, first, last, save_after=range(first, last + 1))
    with MetricsJournal(run.metrics_path(0), number) as metrics:
        losses = [10.0 * number + step for step in range(first + 1, last + 1)]
        metrics.losses(last, losses, learning_rate=0.5)
        metrics.validation(last, {"mse": 1 / number})
    if how is None:
        kill(ledger)
        return
    ledger.close()
    ended = {"attempt": number, "ended": utc(clock.wall_ns()), "how": how, "step": last}
    with Journal(run.attempts_path) as journal:
        journal.append(ended)


@pytest.fixture
def run(tmp_path):
    """A run that was killed after step 8 and resumed from step 5, to step 10."""
    run = RunFolder(tmp_path / "run", SystemClock())
    run.create(new_record("data.augment=[{name='noise', arguments={std=0.1}}]"))
    clock = new_clock(WALL_S)
    live(run, 1, 0, 8, clock=clock)
    with MetricsJournal(run.metrics_path(1), 1) as metrics:
        metrics.machine(8, MachineFigures(rss_bytes=77))
    with Journal(run.findings_path) as journal:
        journal.append(FINDING)
    clock.advance(60 * 10**9)
    live(run, 2, 5, 10, clock=clock, how="finished")
    saved = run.checkpoints_path / "step-00000005"
    saved.mkdir(parents=True)
    files = {"rank-0.safetensors": {"xxh3_128": "h", "bytes": 12}}
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    return run


# Losses as `live` makes them; a life's own steps are ten seconds apart.
LOSSES = {step: 10.0 + step if step <= 5 else 20.0 + step for step in range(1, 11)}
SECOND_S = WALL_S + 80 + 60


def export(run, *words):
    done = CliRunner().invoke(app, ["export", str(run.path), *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@contextlib.contextmanager
def export_process(run, *words, **environment):
    command = [sys.executable, "-m", "tapeline", "export", str(run.path), *words, "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def once(run, tracker):
    quiet = {"progress": lambda *_: None, "say": pytest.fail}
    return send(run.path, tracker, SystemClock(), follow_every_s=None, **quiet)


# What they are fed from


def test_times_of_steps_are_the_ledgers(run):
    view = view_of(run)
    loss = view.metrics["loss"]
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == LOSSES
    began_s = [WALL_S + 10 * step for step in range(1, 6)]
    resumed_s = [SECOND_S + 10 * step for step in range(1, 6)]
    assert (view.wall_ns(loss) / 1e9).tolist() == [*began_s, *resumed_s]
    (run.path / "ledger" / "rank-0.jsonl").unlink()
    assert view_of(run).wall_ns(loss).tolist() == [0] * 10


def test_a_view_has_lives_summary_and_other_ranks(run):
    view = view_of(run)
    account = account_of(run.path)
    assert view.begins == {1: 0, 2: 5}
    assert view.metrics["rank-1/rss_bytes"].values.tolist() == [77]
    assert view.summary["goodput"] == account.goodput
    assert view.summary["useful_s"] == account.job.buckets_ns["useful"] / 1e9
    assert (view.summary["attempts"], view.summary["findings"]) == (2, 1)
    assert view.summary["redone_steps"] == 3


def series(*entries):
    table = np.array(entries).reshape(-1, 3)
    whole = table.astype(np.int64)
    return Series(whole[:, 0], table[:, 1].astype(np.float64), whole[:, 2])


def viewed(**metrics):
    return RunView("r", "r", {}, {}, metrics, ())


def test_what_was_sent_is_not_sent_again_and_what_was_taken_back_is_noticed():
    sent = Sent()
    before = viewed(loss=series((1, 0.1, 1), (2, 0.2, 1), (3, 0.3, 1)))
    assert sent.news(before)["loss"].steps.tolist() == [1, 2, 3]
    assert sent.news(before) == {}
    thinned = viewed(loss=series((3, 0.3, 1), (4, 0.4, 1)))
    assert sent.take_back(thinned) is None
    assert sent.news(thinned)["loss"].steps.tolist() == [4]
    cut = viewed(loss=series((1, 0.1, 1), (2, 0.2, 1)))  # resumed, nothing done again yet
    assert sent.take_back(cut) is None
    assert sent.news(cut) == {}
    again = viewed(loss=series((1, 0.1, 1), (2, 0.2, 1), (3, 0.3, 2)))
    assert sent.take_back(again) == 3
    assert sent.news(again)["loss"].values.tolist() == [0.3]
    assert sent.take_back(again) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=6))
def test_a_tracker_that_drops_what_is_done_again_ends_with_what_stands(lives):
    """Lives as (steps back, steps done); each is looked at once it has done its steps."""
    standing: dict[int, int] = {}
    held: dict[int, int] = {}
    sent, at = Sent(), 0
    for attempt, (back, done) in enumerate(lives, 1):
        at = max(0, at - back)
        standing = {step: life for step, life in standing.items() if step <= at}
        standing |= dict.fromkeys(range(at + 1, at + done + 1), attempt)
        at += done
        view = viewed(loss=series(*((step, 0.0, life) for step, life in standing.items())))
        if (first := sent.take_back(view)) is not None:
            held = {step: life for step, life in held.items() if step < first}
        for one in sent.news(view).values():
            held |= dict(zip(one.steps.tolist(), one.attempts.tolist(), strict=True))
    shown = {step: life for step, life in held.items() if step <= at}
    assert shown == standing


# Following


class Fake:
    """A tracker that fails when told to, and notes what it was sent."""

    where = "fake"

    def __init__(self, *fails):
        self.fails, self.calls, self.closed = list(fails), 0, False

    def send(self, view, state, progress):
        self.calls += 1
        if self.fails and self.fails.pop(0):
            raise ExportError("it", expected="an answer", found="none", fix="Start it")
        return 1

    def close(self):
        self.closed = True


def followed(run, tracker, **options):
    said = []
    quiet = {"progress": lambda *_: None, "say": said.append}
    return send(run.path, tracker, SystemClock(), follow_every_s=0.01, **quiet), said


def test_a_failure_while_following_is_told_and_made_up_for(run):
    journal = run.attempts_path.read_text()
    run.attempts_path.write_text(journal[: journal.rindex('{"attempt":2,"ended"')])
    tracker = Fake(False, True, True, False)

    def end():
        while tracker.calls < 4:
            time.sleep(0.005)
        run.attempts_path.write_text(journal)

    ender = threading.Thread(target=end)
    ender.start()
    done, said = followed(run, tracker)
    ender.join()
    assert said == ["it: expected an answer, found none. Start it. It is tried again."] * 2
    assert done.seen.ended and tracker.closed


def test_a_first_or_last_failure_is_an_error(run):
    with pytest.raises(ExportError, match="expected an answer"):
        followed(run, tracker := Fake(True))
    assert tracker.closed


# TensorBoard


def read(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def texts(events, tag):
    return [one.tensor_proto.string_val[0].decode() for one in events.Tensors(tag)]


def test_tensorboard_has_each_step_once_at_its_time(run, tmp_path):
    out = tmp_path / "tensorboard"
    told = export(run, "--to", "tensorboard", "--out", str(out))
    assert told["values"] == 10 + 1 + 1 + 1  # losses, a rate, a validation, rank 1's memory
    assert (told["state"], told["where"]) == ("finished", str(out))
    events = read(out)
    loss = events.Scalars("loss")
    assert {one.step: one.value for one in loss} == LOSSES
    assert [one.step for one in loss] == sorted(LOSSES)
    assert [loss[0].wall_time, loss[-1].wall_time] == [WALL_S + 10, SECOND_S + 50]
    assert [(one.step, one.value) for one in events.Scalars("validation/mse")][-1] == (10, 0.5)
    assert events.Scalars("run/goodput")[-1].value == pytest.approx(account_of(run.path).goodput)
    (params,) = texts(events, "run/params/text_summary")
    assert json.loads(params)["training.batch"] == 16
    (tags,) = texts(events, "run/tags/text_summary")
    assert json.loads(tags)["commit"] == COMMIT
    assert texts(events, "run/state/text_summary") == ["finished"]
    assert texts(events, "findings/spike/text_summary") == [
        "step 4: a jump  \nIt usually means trouble"
    ]
    assert events.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == (
        "hparams"
    )


def test_exporting_again_replaces_the_runs_own_events(run, tmp_path):
    out = tmp_path / "tensorboard"
    for _ in range(2):
        export(run, "--to", "tensorboard", "--out", str(out))
    assert len(list(out.iterdir())) == 1
    assert {one.step: one.value for one in read(out).Scalars("loss")} == LOSSES


def test_another_runs_folder_is_refused(run, tmp_path):
    (tmp_path / "events.out.tfevents.1.host.1.0.other").touch()
    with pytest.raises(ExportError) as caught:
        TensorBoard(tmp_path, run_id_of(run))
    assert str(caught.value) == (
        f"{tmp_path}: expected a folder of this run's own, found events of another, "
        "events.out.tfevents.1.host.1.0.other. Give a new folder with --out; all below one are "
        "shown together."
    )


@contextlib.contextmanager
def before_its_resume(run):
    """The run as it was when its first life was killed."""
    whole = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    run.attempts_path.write_bytes(whole[run.attempts_path].split(b"\n")[0] + b"\n")
    metrics = run.metrics_path(0)
    metrics.write_bytes(b"".join(whole[metrics].splitlines(keepends=True)[:2]))
    ledger = run.path / "ledger" / "rank-0.jsonl"
    lines = whole[ledger].splitlines(keepends=True)
    ledger.write_bytes(b"".join(line for line in lines if b'":2' not in line[:13]))
    yield
    for path, content in whole.items():
        path.write_bytes(content)


def no_progress(done, total):
    pass


def test_a_board_that_shows_what_was_done_again_drops_it(run, tmp_path):
    tracker = TensorBoard(tmp_path / "tensorboard", run_id_of(run))
    with before_its_resume(run):
        tracker.send(view_of(run), "running", no_progress)
        board = read(tmp_path / "tensorboard")
        assert [one.step for one in board.Scalars("loss")] == list(range(1, 9))
    tracker.send(view_of(run), "finished", no_progress)
    tracker.close()
    board.Reload()
    assert [(one.step, one.value) for one in board.Scalars("loss")] == sorted(LOSSES.items())


def test_a_sidecar_follows_a_run_through_a_kill_thinning_and_a_torn_line(run, tmp_path):
    """The second life of the fixture is written while the sidecar looks, by this process."""
    out = tmp_path / "tensorboard"
    shutil.rmtree(run.path)
    run.create(new_record())
    clock = new_clock(WALL_S)
    live(run, 1, 0, 8, clock=clock)

    def shown():
        if not out.exists():
            return {}
        with contextlib.suppress(KeyError):  # no loss yet
            return {one.step: one.value for one in read(out).Scalars("loss")}
        return {}

    words = ("--to", "tensorboard", "--out", str(out), "--follow", "--interval-s", "0.1")
    with export_process(run, *words) as sidecar:
        while len(shown()) < 8:
            time.sleep(0.05)
        with run.metrics_path(0).open("ab") as stream:
            stream.write(b'{"attempt":1,"step":9,"losses":[1')
        time.sleep(0.3)  # some looks at the torn line
        clock.advance(60 * 10**9)
        here = {"attempt": 2, "started": "s", "world_size": 1, "from_step": 5, "host": "elsewhere"}
        with Journal(run.attempts_path) as journal:
            journal.append(here)
        with (
            begin(run.path, clock, attempt=2, from_step=5) as ledger,
            MetricsJournal(run.metrics_path(0), 2, budget_bytes=400) as metrics,  # thins
        ):
            for step in range(6, 41):
                steps(ledger, clock, step - 1, step, save_after=(step,))
                metrics.losses(step, [20.0 + step])
                time.sleep(0.02)
        assert b"thinned" in run.metrics_path(0).read_bytes()
        with Journal(run.attempts_path) as journal:
            journal.append({"attempt": 2, "ended": utc(0), "how": "finished", "step": 40})
        told, said = sidecar.communicate()
        assert sidecar.returncode == 0, said
    assert json.loads(told)["state"] == "finished"
    found = shown()
    assert found[40] == 60.0 and list(found) == sorted(found)
    assert all(found[step] == 20.0 + step for step in found if step > 5)


# MLflow, on a server of its own


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    storage = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    artifacts = ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *storage, *artifacts],
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        )
    uri = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{uri}/health", timeout=5).close()
                break
            time.sleep(0.2)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def history(client, run_id, name):
    return [(one.step, one.value, one.timestamp) for one in client.get_metric_history(run_id, name)]


@pytest.mark.timeout(400)
def test_mlflow_holds_the_run_and_goes_on_with_it(server, run, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    told = export(run, "--to", "mlflow", "--experiment", "prices")
    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("prices").experiment_id
    (found,) = client.search_runs([experiment])
    run_id = found.info.run_id
    assert told["where"] == f"{server}/#/experiments/{experiment}/runs/{run_id}"
    assert (found.info.run_name, found.info.status) == ("r", "FINISHED")
    assert found.info.start_time == WALL_S * 1000
    assert found.info.end_time == (SECOND_S + 50) * 1000
    assert found.data.params["training.batch"] == "16"
    assert found.data.params["data.augment"].startswith('[{"arguments"')
    tags = found.data.tags
    assert (tags["tapeline.commit"], tags["tapeline.data"]) == (COMMIT, "f1")
    assert tags["tapeline.code"] == "clean" and "bit-exact" in tags["tapeline.contract"]
    assert tags["mlflow.source.git.commit"] == COMMIT
    times_s = [*range(WALL_S + 10, WALL_S + 60, 10), *range(SECOND_S + 10, SECOND_S + 60, 10)]
    assert history(client, run_id, "loss") == [
        (step, loss, 1000 * at_s)
        for (step, loss), at_s in zip(LOSSES.items(), times_s, strict=True)
    ]
    assert found.data.metrics["run/goodput"] == pytest.approx(account_of(run.path).goodput)
    names = {one.path for one in client.list_artifacts(run_id)}
    assert names == {"run.json", "attempts.jsonl", "findings.jsonl", "files.json"}
    listed = {one["name"]: one for one in json.loads(downloaded(server, run_id, "files.json"))}
    assert listed["run.json"]["xxh3_128"] == xxh3_file(run.path / "run.json")
    assert listed["checkpoints/step-00000005/rank-0.safetensors"]["xxh3_128"] == "h"
    assert downloaded(server, run_id, "run.json") == (run.path / "run.json").read_bytes()

    again = export(run, "--to", "mlflow", "--experiment", "prices")
    assert (again["values"], again["where"]) == (0, told["where"])
    live(run, 3, 10, 12, clock=new_clock(SECOND_S + 500), how="failed")
    more = export(run, "--to", "mlflow", "--experiment", "prices")
    assert more["where"] == told["where"] and more["values"] == 2 + 1 + 1
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FAILED"
    assert [step for step, _, _ in history(client, run_id, "loss")] == list(range(1, 13))


def downloaded(server, run_id, name):
    url = f"{server}/get-artifact?run_id={run_id}&path={name}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


@pytest.mark.timeout(400)
def test_a_value_that_is_no_number_and_a_long_setting_reach_mlflow(server, tmp_path):
    run = RunFolder(tmp_path / "run", SystemClock())
    run.create(new_record(f"model.arguments={{text='{'x' * 6000}'}}", name="long"))
    with MetricsJournal(run.metrics_path(0), 1) as metrics:
        metrics.losses(2, [math.nan, 1.0])
        metrics.validation(2, {"a strange=name": 1.0})
    once(run, MlflowServer(server, "long", run_id_of(run)))
    client = MlflowClient(server)
    (found,) = client.search_runs([client.get_experiment_by_name("long").experiment_id])
    losses = history(client, found.info.run_id, "loss")
    assert math.isnan(losses[0][1]) and losses[1][1] == 1.0
    assert len(found.data.params["model.arguments.text"]) == 5000
    assert found.data.metrics["validation/a strange_name"] == 1.0


def test_a_server_that_is_not_there_is_told(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ExportError) as caught:
        once(run, MlflowServer("http://127.0.0.1:9", "tapeline", run_id_of(run)))
    text = str(caught.value)
    assert text.startswith("--uri http://127.0.0.1:9: expected an MLflow server that takes the run")
    assert text.endswith("Start one with `mlflow server`, or give another --uri.")


# W&B, offline


def records(folder):
    """Records of the one run in a folder: a log of blocks of 32 kB, after a header of 7 bytes."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content = path.read_bytes()
    at, whole = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        piece = content[at + 7 : at + 7 + length]
        at += 7 + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield Record.FromString(whole)


def by_step(folder, name):
    """A metric's values by the column `step`."""
    found = defaultdict(list)
    for record in records(folder):
        row = {one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
        if name in row:
            found[row["step"]].append((row[name], row["_timestamp"]))
    return dict(found)


def test_wandb_is_written_offline_without_any_connection(run, tmp_path):
    out = tmp_path / "wandb-runs"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for _ in range(2):  # the second replaces the first
            words = ("--to", "wandb", "--out", str(out), "--experiment", "prices")
            surroundings = {
                "WANDB_BASE_URL": url,
                "WANDB_API_KEY": "0" * 40,
                "HOME": str(tmp_path / "home"),
            }
            with export_process(run, *words, **surroundings) as process:
                told, said = process.communicate()
                assert process.returncode == 0, said
        with pytest.raises(TimeoutError):
            listener.accept()
    told = json.loads(told)
    run_id = run_id_of(run)
    assert told["where"].endswith(run_id) and told["values"] == 13
    assert not (tmp_path / "home").exists(), "all of it is in the folder"
    found = by_step(out, "loss")
    assert found == {
        step: [(loss, (WALL_S if step <= 5 else SECOND_S - 50) + 10 * step)]
        for step, loss in LOSSES.items()
    }
    (about,) = [one.run for one in records(out) if one.HasField("run")]
    assert (about.run_id, about.project, about.display_name) == (run_id, "prices", "r")
    config = {one.key: json.loads(one.value_json) for one in about.config.update}
    assert config["training.batch"] == 16 and config["tags"]["commit"] == COMMIT
    summary = {}
    for record in records(out):
        summary |= {one.key: one.value_json for one in record.summary.update}
    assert json.loads(summary["state"]) == "finished"
    assert json.loads(summary["goodput"]) == account_of(run.path).goodput
    (artifact,) = [one.artifact for one in records(out) if one.HasField("artifact")]
    names = {one.path for one in artifact.manifest.contents}
    assert names == {"run.json", "attempts.jsonl", "findings.jsonl", "files.json"}


def test_wandb_is_written_anew_where_steps_were_done_again(run, tmp_path, monkeypatch):
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "put back afterwards")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    tracker = WandbOffline(tmp_path, "prices", run_id_of(run))
    with before_its_resume(run):
        tracker.send(view_of(run), "running", no_progress)
    tracker.send(view_of(run), "finished", no_progress)
    tracker.close()
    found = by_step(tmp_path, "loss")
    assert {step: [loss for loss, _ in rows] for step, rows in found.items()} == {
        step: [loss] for step, loss in LOSSES.items()
    }


# Wrong use


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "tensorboard"], "--to tensorboard needs --out, a folder"),
        (["--to", "wandb"], "--to wandb needs --out, a folder"),
        (["--to", "mlflow"], "--to mlflow needs --uri or MLFLOW_TRACKING_URI"),
        (["--to", "mlflow", "--out", "x"], "--out does nothing with --to mlflow"),
        (["--to", "wandb", "--out", "x", "--port", "1"], "--port does nothing with --to wandb"),
    ],
)
def test_wrong_use_is_told(run, words, said, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = CliRunner().invoke(app, ["export", str(run.path), *words])
    assert done.exit_code == 2
    assert said in done.output
