"""`tapeline export --to prometheus`: what a scrape and a text file say of a run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from helpers_runs import new_record, write_run
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from tapeline.cli import app
from tapeline.clock import FakeClock, SystemClock, utc
from tapeline.errors import ExportError
from tapeline.export import needed
from tapeline.export.prometheus import RunCollector, Served
from tapeline.files import Journal
from tapeline.ledger import Ledger, account_of
from tapeline.runs import MachineFigures, MetricsJournal, RunFolder
from tapeline.world import World


def samples_of(text):
    """(name, labels but the run's) to value."""
    return {
        (
            one.name,
            *sorted(f"{key}={value}" for key, value in one.labels.items() if key != "run"),
        ): (one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def written(run, path, clock=None):
    RunCollector(run.path, clock or SystemClock()).write(path)
    return samples_of(path.read_text())


@pytest.fixture
def run(tmp_path):
    """Two ranks, three lives' lines, findings: a run that goes on in this process."""
    run = RunFolder(tmp_path / 'ru"n', SystemClock())
    run.create(new_record())
    here = {"started": "s", "world_size": 2, "host": socket.gethostname()}
    with Journal(run.attempts_path) as journal:
        journal.append({**here, "attempt": 1, "from_step": 0})
        journal.append({"attempt": 1, "how": "killed", "evidence": "no end was recorded"})
        journal.append({**here, "attempt": 2, "from_step": 0})
    with Journal(run.findings_path) as journal:
        journal.append(*({"attempt": 2, "watcher": w} for w in ("spike", "spike", "flat")))
    return run


def test_a_run_that_goes_on(run, tmp_path):
    with (
        Ledger(run.path, world=World(0, 2, 0), attempt=2) as first,
        Ledger(run.path, world=World(1, 2, 1), attempt=2) as second,
        MetricsJournal(run.metrics_path(0), 2) as metrics,
    ):
        for ledger in (first, second):
            ledger.switch("compute")
            ledger.step_done(1)
            with ledger.span("checkpoint"):
                pass
        metrics.losses(1, [0.25])
        metrics.machine(1, MachineFigures(samples_per_s=64.0))
        before_s = time.time()
        found = written(run, tmp_path / "run.prom")
    name = "tapeline_run"
    told = {
        (f"{name}_state", "state=running"): 1,
        (f"{name}_healthy",): 1,
        (f"{name}_ended",): 0,
        (f"{name}_steps",): 1,
        (f"{name}_target_steps",): 40,
        (f"{name}_loss",): 0.25,
        (f"{name}_attempts_total",): 2,
        (f"{name}_restarts_total",): 1,
        (f"{name}_findings_total", "watcher=spike"): 2,
        (f"{name}_findings_total", "watcher=flat"): 1,
        (f"{name}_rank_steps", "rank=1"): 1,
        (f"{name}_rank_alive", "rank=1"): 1,
        (f"{name}_samples_per_second", "rank=0"): 64,
    }
    assert told.items() <= found.items()
    assert (f"{name}_samples_per_second", "rank=1") not in found, "unknown isn't 0"
    assert 0 <= found[f"{name}_heartbeat_age_seconds", "rank=0"] < 60
    assert 0 < found[f"{name}_goodput_ratio",] < 1
    assert before_s <= found[f"{name}_export_timestamp_seconds",] <= time.time()
    text = (tmp_path / "run.prom").read_text()
    assert 'commit="aaaa' in text and r"ru\"n" in text
    assert "python_info" not in text, "a registry of its own"


def test_seconds_by_bucket_are_the_account_s(run, tmp_path):
    with Ledger(run.path, attempt=2) as ledger:
        ledger.switch("compute")
        ledger.step_done(1)
    found = written(run, tmp_path / "run.prom")
    (rank,) = account_of(run.path).ranks
    for bucket, spent_ns in rank.times.buckets_ns.items():
        assert found["tapeline_run_bucket_seconds", f"bucket={bucket}", "rank=0"] == spent_ns / 1e9


def test_a_finished_run_without_a_ledger_says_what_it_does_not_know(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", new_record()), FakeClock())
    found = written(run, tmp_path / "run.prom")
    assert found["tapeline_run_state", "state=finished"] == 1
    assert found["tapeline_run_healthy",] == found["tapeline_run_ended",] == 1
    assert found["tapeline_run_account_known",] == 0
    assert ("tapeline_run_goodput_ratio",) not in found
    assert not [key for key in found if key[0] == "tapeline_run_heartbeat_age_seconds"]


def test_a_loss_that_is_no_number_is_one(tmp_path):
    run = RunFolder(write_run(tmp_path / "run", new_record(), losses=[math.nan]), FakeClock())
    assert math.isnan(written(run, tmp_path / "run.prom")["tapeline_run_loss",])


def test_a_run_whose_processes_are_gone_is_not_healthy(run, tmp_path):
    code = f"from tapeline.ledger import Ledger; Ledger({str(run.path)!r}, attempt=2); " + (
        "import os; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    found = written(run, tmp_path / "run.prom")
    assert found["tapeline_run_rank_alive", "rank=0"] == 0
    assert found["tapeline_run_healthy",] == 0
    assert ("tapeline_run_heartbeat_age_seconds", "rank=0") in found


def test_names_follow_the_conventions(run, tmp_path):
    text_of = tmp_path / "run.prom"
    with Ledger(run.path, attempt=2):
        written(run, text_of)
    for family in text_string_to_metric_families(text_of.read_text()):
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"tapeline_run_[a-z_]+", family.name)
        assert not re.search(r"_(ns|ms|percent|count)$", family.name)
        for one in family.samples:
            assert one.name.endswith("_total") == (family.type == "counter")


def test_a_scrape_sees_the_run_as_it_is_then(run):
    collector = RunCollector(run.path, SystemClock())
    with contextlib.closing(Served(collector, "127.0.0.1", 0)) as served:
        assert "127.0.0.1" in served.url

        def scraped():
            with urllib.request.urlopen(served.url, timeout=30) as answer:
                return samples_of(answer.read().decode())

        assert scraped()["tapeline_run_ended",] == 0
        assert not collector.end_seen.is_set()
        with Journal(run.attempts_path) as journal:
            journal.append({"attempt": 2, "ended": utc(0), "how": "finished", "step": 40})
        assert scraped()["tapeline_run_ended",] == 1
        assert collector.end_seen.is_set()


def test_an_address_that_is_taken_is_told(run):
    collector = RunCollector(run.path, SystemClock())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ExportError, match=rf"--port {port}: expected an address to listen on"):
            Served(collector, "127.0.0.1", port)


def test_a_text_file_is_written_once_and_told(run, tmp_path):
    path = tmp_path / "run.prom"
    words = ["export", str(run.path), "--to", "prometheus", "--textfile", str(path), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "run": str(run.path),
        "to": "prometheus",
        "state": "unknown",
        "step": 0,
        "attempts": 2,
    }
    assert path.exists()


def start(run, *words):
    command = [sys.executable, "-m", "tapeline", "export", str(run.path), "--to", "prometheus"]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_sidecar_follows_to_the_end_and_writes_it(run, tmp_path):
    path = tmp_path / "run.prom"
    sidecar = start(run, "--textfile", str(path), "--follow", "--interval-s", "0.1")
    while not path.exists():
        time.sleep(0.02)
    assert samples_of(path.read_text())["tapeline_run_ended",] == 0
    with Journal(run.attempts_path) as journal:
        journal.append({"attempt": 2, "ended": utc(0), "how": "finished", "step": 40})
    _, said = sidecar.communicate()
    assert sidecar.returncode == 0, said
    assert samples_of(path.read_text())["tapeline_run_ended",] == 1


def test_a_server_follows_until_the_end_was_scraped(run):
    sidecar = start(run, "--port", "0", "--follow", "--interval-s", "0.1", "--json")
    url = re.search(r"http://\S+", sidecar.stderr.readline())[0]
    with Journal(run.attempts_path) as journal:
        journal.append({"attempt": 2, "ended": utc(0), "how": "failed", "step": 4})
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert 'state="failed"' in answer.read().decode()
    out, said = sidecar.communicate()
    assert sidecar.returncode == 0, said
    assert json.loads(out)["state"] == "failed"


def test_ctrl_c_ends_a_server_without_a_traceback(run):
    sidecar = start(run, "--port", "0")
    sidecar.stderr.readline()
    os.kill(sidecar.pid, signal.SIGINT)
    out, said = sidecar.communicate()
    assert (sidecar.returncode, out, said) == (0, "", "")


def test_what_is_not_for_a_target_is_told(run, tmp_path):
    words = ["export", str(run.path), "--to", "prometheus", "--textfile", "x", "--port", "7"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "--port does nothing with --to prometheus --textfile" in done.output


def test_a_package_that_is_not_installed_is_told_with_its_extra():
    with pytest.raises(ExportError) as caught, needed("prometheus", "prometheus_client", "metrics"):
        raise ModuleNotFoundError(name="prometheus_client.core")
    assert str(caught.value) == (
        "--to prometheus: expected the package prometheus-client, found none installed. "
        'Install it with `pip install "tapeline[metrics]"`.'
    )
    with pytest.raises(ModuleNotFoundError), needed("prometheus", "prometheus_client", "metrics"):
        raise ModuleNotFoundError(name="numpy")
