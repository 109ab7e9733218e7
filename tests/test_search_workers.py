"""Workers that share a journal: killed, restarted, too slow; what they decide, and what is kept."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import helpers_search
import pytest
from helpers_ranks import FORKS
from helpers_search import RUNGS, Walk, height, new_search

from tapeline.errors import RunError
from tapeline.search.journal import SearchJournal, open_storage, without_password
from tapeline.search.replay import Replay, departures
from tapeline.search.worker import Worker


def started(folder: Path) -> BaseProcess:
    process = FORKS.Process(target=helpers_search.work, args=[str(folder)])
    process.start()
    return process


def entries_of(search) -> list[dict]:
    return [entry for _, entry in search.journal().new_entries()]


def replayed(search) -> Replay:
    replay = Replay(search.config, search.rules)
    for place, entry in enumerate(entries_of(search)):
        replay.apply(place, entry)
    return replay


def wait_for(journal: SearchJournal, count: int, more: int, workers) -> int:
    """Until so many entries more are there than were; how many there are then."""
    wanted = count + more
    while count < wanted:
        assert any(worker.is_alive() for worker in workers), "they ended by themselves"
        count += sum(1 for _ in journal.new_entries())
        time.sleep(0.2)  # each look is a few queries
    return count


def check_accounted(search) -> None:
    """Every trial came to the rungs that it was given, each step of it was done once."""
    replay = replayed(search)
    schedule = replay.schedule
    assert schedule.is_over
    assert not schedule.running
    assert sorted(replay.trials) == list(range(schedule.num_trials))
    for number, trial in replay.trials.items():
        assert list(trial.results) == list(RUNGS[: len(trial.results)]), "no rung is left out"
        assert len(trial.results) >= 1
        last = max(trial.results)
        assert Path(search.path, "trials", str(number), "steps").stat().st_size == last
        assert trial.results[last] == pytest.approx(height(trial.values), nan_ok=True)
        assert (trial.reason is None) == math.isfinite(trial.results[last])
    done = sum(max(trial.results) for trial in replay.trials.values())
    assert schedule.spent_steps == done <= search.rules.budget_steps
    assert departures(search.config, search.rules, entries_of(search)) == []


@pytest.fixture(scope="module")
def database():
    """URL of a PostgreSQL server of our own, on a socket in a folder of its own."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not binaries:
        pytest.skip("no PostgreSQL server is installed: /usr/lib/postgresql/*/bin/initdb")
    control = binaries[-1].with_name("pg_ctl")
    with tempfile.TemporaryDirectory(
        prefix="pg-", dir="/tmp"
    ) as folder:  # a socket's path is short
        user = "nobody" if os.getuid() == 0 else None  # the server refuses to run as root
        if user:
            shutil.chown(folder, user)
        data, log = f"{folder}/data", f"{folder}/log"

        def run(*words: str) -> None:
            subprocess.run(words, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

        run(str(binaries[-1]), "-D", data, "-U", "tapeline", "-A", "trust", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run(str(control), "-D", data, "-l", log, "-w", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://tapeline@/postgres?host={folder}"
        finally:
            run(str(control), "-D", data, "-m", "immediate", "-w", "stop")


@pytest.mark.parametrize(("kind", "sampler"), [("file", "random"), ("postgresql", "tpe")])
def test_four_workers_two_killed_and_then_all_lose_no_trial_and_decide_as_a_replay(
    tmp_path, request, kind, sampler
):
    storage = None if kind == "file" else request.getfixturevalue("database")
    search = new_search(tmp_path / "s", sampler=sampler, storage=storage, budget_steps=70)
    moments = random.Random(sampler)
    journal, seen = search.journal(), 0
    workers = [started(search.path) for _ in range(4)]
    try:
        for victim in (0, 1):
            seen = wait_for(journal, seen, moments.randrange(3, 8), workers)
            time.sleep(moments.random() / 10)
            workers[victim].kill()
        seen = wait_for(journal, seen, moments.randrange(3, 8), workers)
        for worker in workers:
            worker.kill()  # SIGKILL to all: the whole search is gone
            worker.join()
        assert not replayed(search).schedule.is_over
        workers = [started(search.path) for _ in range(2)]
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    check_accounted(search)
    assert replayed(search).num_given_back["died"] >= 1


def test_a_stopped_worker_s_job_goes_back_at_once(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=60)

    class Stopping(Walk):
        def poll(self):
            worker.stopping = True
            return 75

    worker = Worker(search, Stopping, poll_s=0.0)
    worker.work()
    replay = replayed(search)
    assert replay.num_given_back == {"died": 0, "stopped": 1}
    assert replay.schedule.spent_steps == RUNGS[0]
    Worker(search, Walk, poll_s=0.0).work()
    check_accounted(search)


def test_a_worker_whose_lease_was_taken_ends_its_process_and_goes_on(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=60)
    killed = []

    class Slow(Walk):
        def poll(self):
            if killed:
                return super().poll()
            if not self.done():
                entry = {"kind": "give back", "lease": 0, "worker": "another", "died": True}
                search.journal().append(entry)
                super().poll()
            return None

        def kill(self):
            killed.append(self._stretch.job)

    Worker(search, Slow, poll_s=0.01).work()
    check_accounted(search)
    assert [job.trial for job in killed] == [0]


def test_a_dead_worker_is_missed_by_its_silence_not_by_a_clock(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=27)
    dead = search.journal()
    dead.show_life("dead", 1)
    dead.append({"kind": "ask", "worker": "dead"})
    Worker(search, Walk, poll_s=0.01).work()
    replay = replayed(search)
    assert replay.num_given_back["died"] == 1
    check_accounted(search)


def test_a_job_that_kills_everyone_counts_as_failed(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=60)

    class Deadly(Walk):
        def poll(self):
            return -signal.SIGKILL if self._stretch.job.trial == 0 else super().poll()

    Worker(search, Deadly, poll_s=0.0).work()
    trial = replayed(search).trials[0]
    assert math.isnan(trial.results[RUNGS[0]])
    assert trial.reason == "whoever ran it died 5 times"


def test_a_replay_finds_a_worker_that_did_something_else(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=60)
    Worker(search, Walk, poll_s=0.0).work()
    entries = entries_of(search)
    assert departures(search.config, search.rules, entries) == []
    changed = next(entry for entry in entries if entry["kind"] == "begin")
    changed["values"]["model.arguments.hidden"] += 1
    another = [entry for entry in entries if entry["kind"] == "begin"][1]
    another["job"]["trial"] = 99
    told = departures(search.config, search.rules, entries)
    assert any("(Job(trial=99, rung=0, seed=None)" in one for one in told)
    assert told[0].startswith("entry 1: (Job(trial=0, rung=0, seed=None), {'model.arguments.hidden")


def test_a_line_that_a_crash_tore_is_cut_and_the_journal_goes_on(tmp_path):
    search = new_search(tmp_path / "s")
    search.journal().append({"kind": "ask", "worker": "a"})
    with (search.path / "journal.log").open("a") as file:
        file.write('{"op_code": 4, "worker_id"')
    search.journal().append({"kind": "ask", "worker": "b"})
    assert [entry["worker"] for entry in entries_of(search)] == ["a", "b"]
    lines = (search.path / "journal.log").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_a_killed_writer_holds_up_nobody(tmp_path):
    search = new_search(tmp_path / "s")
    search.journal()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
            "print(flush=True); time.sleep(600)",
            str(search.path / "journal.log"),
        ],
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    os.kill(holder.pid, signal.SIGKILL)
    search.journal().append({"kind": "ask", "worker": "a"})
    holder.communicate()
    assert len(entries_of(search)) == 1


def test_a_database_that_does_not_answer_is_told_without_its_password(tmp_path):
    url = f"postgresql+psycopg://someone:hunter2@/none?host={tmp_path}"
    with pytest.raises(RunError) as caught:
        new_search(tmp_path / "s", storage=url)
    assert not (tmp_path / "s" / "search.json").exists()
    said = str(caught.value)
    assert said.startswith("postgresql+psycopg://someone@/none?host=")
    assert "expected a database that answers" in said
    assert said.endswith("Check the URL, such as postgresql+psycopg://host/name, and that it runs.")
    assert "hunter2" not in said


@pytest.mark.parametrize("url", ["nonsense", "postgresql://host:port/name"])
def test_what_is_no_url_is_told(tmp_path, url):
    with pytest.raises(RunError) as caught:
        new_search(tmp_path / "s", storage=url)
    assert str(caught.value) == (
        "--storage: expected the URL of a database, such as postgresql+psycopg://host/name, found "
        "something else. Correct it; without --storage the journal is a file in the search's "
        "folder."
    )


def test_a_search_goes_on_only_in_the_storage_that_it_began_with(tmp_path):
    search = new_search(tmp_path / "s")
    elsewhere = f"sqlite:///{tmp_path}/other.db"
    with pytest.raises(RunError) as caught:
        new_search(tmp_path / "s", storage=elsewhere).journal()
    assert str(caught.value) == (
        f"the journal of {search.identity}: expected the storage that the search began with, found "
        "another one. Give --storage as it was then; without one it is a file in the folder."
    )


def test_no_password_is_written_down():
    url = "postgresql+psycopg://someone:hunter2@host/name?sslpassword=hunter2"
    assert without_password(url) == "postgresql+psycopg://someone@host/name"


def test_full_runs_are_trials_that_optuna_s_own_tools_show(tmp_path):
    search = new_search(tmp_path / "s", budget_steps=90)
    Worker(search, Walk, poll_s=0.0).work()
    storage = open_storage(None, search.path)
    (study,) = storage.get_all_studies()
    best = storage.get_best_trial(study._study_id)
    ((trial, _, score),) = replayed(search).schedule.best(1)
    assert best.value == score
    assert best.params == replayed(search).trials[trial].values
