"""The audit: every obstacle with what it leaves of a re-run, and the sentence to publish."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
from helpers_runs import CODE, COMMIT, ENVIRONMENT, MACHINE, new_record, write_life, write_run

from tapeline.clock import FakeClock
from tapeline.runs import RunFolder
from tapeline.runs.audit import audit_run, data_fault, judge
from tapeline.runs.diff import RunFacts
from tapeline.runs.spread import spread_of
from tapeline.runs.unkeyed import Draw, unkeyed_draws
from tapeline.store import Shards, append_shards, write_shards
from tapeline.tape import synthetic_sessions

HERE = {"environment": ENVIRONMENT, "machine": MACHINE, "code": CODE}
LIFE = {"attempt": 1, "world_size": 1, "from_step": 0, "record": None}


def audited(record, lives=(LIFE,), *, here=HERE, data=None, draws=(), saved=None, spread=None):
    return judge(
        "r",
        RunFacts(record, lives),
        here=here,
        data=data,
        draws=draws,
        saved=saved or {},
        spread=spread,
    )


def test_a_clean_run_is_bit_exact_and_says_on_what():
    found = audited(new_record("training.lanes=4"))
    assert (found.verdict, found.obstacles) == ("bit-exact", ())
    assert found.sentence == (
        "Bit-exact on EPYC (AVX512) with torch 2.13.0, threads = 1 and 1 to 4 ranks: code "
        f"{COMMIT[:12]}, data f1, seed 0."
    )
    assert "training.threads = 1: another number sums in another order" in found.leave_alone
    assert "training.lanes = 4; ranks may be 1 to that many" in found.leave_alone


def test_the_commits_of_all_checkouts_are_named():
    record = new_record()
    record["code"] = {"state": "not a repository", "commit": None}
    record["other_code"] = [{"of": "x", **CODE}, {"of": "y", **CODE, "commit": "b" * 40}]
    assert f"code {'a' * 12} and {'b' * 12}, data f1" in audited(record).sentence


def test_a_statistical_run_names_its_interval_and_what_it_covers():
    draw = Draw("net.py:4", "numpy.random.default_rng", seeded=False)
    unknown = audited(new_record(), draws=[draw])
    assert unknown.verdict == "statistical"
    assert unknown.sentence == (
        "Not bit-exact, since net.py:4 calls numpy.random.default_rng, unseeded. Validation loss: "
        "how far seeds spread it isn't known: train them with `tapeline replicate`."
    )
    known = audited(new_record(), draws=[draw], spread=spread_of([1.0, 2.0, 3.0]))
    assert known.sentence.endswith(
        "Validation loss: 2 ± 2.5 (95 % interval for the mean) over k = 3 seeds, which covers "
        "initialisation and data order; a next run falls within ± 5."
    )
    assert known.obstacles[0].change.startswith("Draw with torch")


def test_a_broken_run_says_what_is_lost():
    record = new_record()
    record["code"] |= {"state": "dirty", "changed": 1, "untracked": 1}
    record["code"]["left_out"] = {"net.py": "it has 900,000 bytes", ".env": "its name looks like"}
    found = audited(record, draws=[Draw("net.py:4", "os.urandom", seeded=False)])
    assert found.verdict == "nothing"
    assert [one.leaves for one in found.obstacles] == ["nothing", "statistical"]
    assert found.sentence == (
        "This result can't be re-created: the checkout /home/someone/project: 2 files differ from "
        f"{COMMIT[:12]}; not in the record: net.py (it has 900,000 bytes)."
    )


def test_dirty_code_whose_patch_is_kept_is_still_exact():
    record = new_record()
    record["code"] |= {"state": "dirty", "changed": 1, "untracked": 0}
    record["code"]["left_out"] = {".env": "its name looks like that of a key"}
    found = audited(record, spread=spread_of([1.0, 2.0]))
    assert found.verdict == "bit-exact"
    assert f"code {COMMIT[:12]} with the recorded patch" in found.sentence
    assert "Over seeds, validation loss: 1.5 ±" in found.sentence
    assert "1 file differs from" in found.obstacles[0].evidence


def changed(**parts):
    record = new_record()
    for path, value in parts.items():
        *sections, name = path.split("__")
        section = record
        for part in sections:
            section = section[part]
        section[name] = value
    return record


GONE = {"scope": "statistical", "text": "statistical from step 7 on: ranks 2 → 1", "condition": ""}


@pytest.mark.parametrize(
    ("record", "what", "leaves", "evidence"),
    [
        (
            changed(code__state="unknown", code__problem="git could not be asked: timed out"),
            *("code unknown", "nothing", "git could not be asked: timed out"),
        ),
        (
            changed(sources={"model.factory": {"file": "/n/m.py", "sha256": "", "package": False}}),
            *("code not kept", "nothing", "/n/m.py is in no repository"),
        ),
        (
            changed(sources={"model.factory": None}),
            *("code not kept", "nothing", "the source of model.factory wasn't found"),
        ),
        (
            changed(code__submodules=[{"path": "m", "commit": "c", "state": "dirty"}]),
            *("submodule", "nothing", "m in the checkout /home/someone/project is dirty"),
        ),
        (
            changed(environment__origins={"x": {"url": "u", "editable": False, "commit": None}}),
            *("package not from an index", "statistical", "came from u"),
        ),
        (
            changed(environment={}),
            *("packages unknown", "statistical", "the record names no packages"),
        ),
        (
            changed(determinism__deterministic_algorithms=False),
            *("non-deterministic operations", "statistical", "aren't repeatable"),
        ),
        (changed(contract=GONE), "contract given up", "statistical", GONE["text"]),
        (
            changed(environment__packages={**ENVIRONMENT["packages"], "torch": "2.12.0"}),
            *("this machine", "statistical", "packages.torch is 2.13.0 here, was 2.12.0"),
        ),
        (
            changed(machine__processor="Xeon"),
            *("this machine", "statistical", "machine.processor is EPYC here, was Xeon"),
        ),
    ],
)
def test_each_obstacle_is_found_with_what_it_leaves(record, what, leaves, evidence):
    found = audited(record)
    assert [(one.what, one.leaves) for one in found.obstacles] == [(what, leaves)]
    assert evidence in found.obstacles[0].evidence
    assert found.verdict == leaves


def test_noise_is_no_obstacle():
    here = copy.deepcopy(HERE)
    here["environment"]["system"]["host"] = "b"
    here["environment"]["packages"]["rich"] = "15"
    here["machine"] |= {"load_1min": 9.0, "device": "unknown"}
    here["environment"]["torch"] = None
    assert audited(new_record(), here=here).obstacles == ()


def test_a_contract_given_up_later_counts():
    by_life = audited(new_record(), [{**LIFE, "record": {"contract": GONE}}])
    by_save = audited(new_record(), saved={"contract": GONE})
    assert by_life.obstacles == by_save.obstacles
    assert by_life.obstacles[0].what == "contract given up"


def test_ranks_that_changed_count_where_the_contract_holds_at_one_number():
    record = new_record()
    lives = [LIFE, {**LIFE, "attempt": 2, "world_size": 2}]
    assert audited(record, lives).verdict == "bit-exact"
    record["contract"]["scope"] = "at this world size"
    found = audited(record, lives)
    assert found.obstacles[0].evidence == (
        "its lives had 1, 2 ranks, and the contract holds at one"
    )
    alone = audited(record)
    assert "and 1 rank: code" in alone.sentence
    assert "the number of ranks, 1" in alone.leave_alone


def test_a_seeded_draw_outside_the_state_counts_from_the_second_life_on():
    draw = Draw("net.py:4", "numpy.random.rand", seeded=True)
    once = audited(new_record(), draws=[draw])
    assert (once.verdict, once.obstacles[0].leaves) == ("bit-exact", "bit-exact")
    twice = audited(new_record(), [LIFE, {**LIFE, "attempt": 2}], draws=[draw])
    assert twice.verdict == "statistical"
    assert "the run has 2 lives" in twice.obstacles[0].evidence


def test_a_checkpoint_of_another_run_can_only_be_kept():
    origin = {"step": 5, "run": "x, begun then"}
    found = audited(new_record(), [LIFE, {**LIFE, "attempt": 2, "record": {"origin": origin}}])
    assert found.verdict == "nothing"
    assert found.obstacles[0].evidence == "life 2 began from a checkpoint of x, begun then"


SOURCE = """
import numpy as np
import random, time, os
import torch
from numpy.random import default_rng
from helper import noise

def forward(x):
    a = np.random.rand(3)
    b = random.random()
    c = default_rng()
    d = default_rng(3)
    e = time.time()
    f = torch.rand(3)
    g = np.random.Generator(np.random.Philox(3))
    h = random.Random(4)
    i = x.random.rand()
    return os.urandom(3)
"""


def test_unkeyed_draws_are_found_in_a_module_and_what_it_imports(tmp_path):
    (tmp_path / "net.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text("import net\nfrom random import gauss\ngauss(0, 1)\n")
    (tmp_path / "unused.py").write_text("import random\nrandom.random()\n")
    found = {(d.where, d.call, d.seeded) for d in unkeyed_draws(tmp_path / "net.py")}
    assert found == {
        ("net.py:9", "numpy.random.rand", True),
        ("net.py:10", "random.random", True),
        ("net.py:11", "numpy.random.default_rng", False),
        ("net.py:13", "time.time", False),
        ("net.py:18", "os.urandom", False),
        ("helper.py:3", "random.gauss", True),
    }
    (tmp_path / "net.py").write_text("def (")
    assert unkeyed_draws(tmp_path / "net.py") == []
    assert unkeyed_draws(tmp_path / "gone.py") == []


def test_the_reference_models_draw_nothing_unkeyed():
    import tapeline.training.models as models

    assert unkeyed_draws(Path(models.__file__)) == []


@pytest.fixture
def stored(tmp_path):
    """A store and the record of a run on it."""
    write_shards(synthetic_sessions(2, rows=100), tmp_path / "store", "mmap")
    record = new_record(f"data.store='{tmp_path / 'store'}'")
    shards = Shards(tmp_path / "store")
    names = [str(key) for key in shards.keys]
    record["data"] |= {"fingerprint": shards.fingerprint, "session_names": names}
    return tmp_path / "store", record


def test_the_data_is_read_and_compared(stored):
    store, record = stored
    assert data_fault(record, verify=True) is None
    file = next(path for path in (store / "mmap").iterdir() if path.suffix != ".json")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert data_fault(record, verify=False) is None
    assert data_fault(record, verify=True).what == "changed data"
    shutil.rmtree(store)
    write_shards(synthetic_sessions(2, rows=100, seed=9), store, "mmap")
    assert data_fault(record, verify=True).what == "other data"
    shutil.rmtree(store)
    assert data_fault(record, verify=True).what == "data out of reach"


def test_sessions_that_came_later_are_no_other_data(stored):
    store, record = stored
    assert append_shards(synthetic_sessions(5, rows=100), store, "mmap") == 3
    found = data_fault(record, verify=True)
    assert (found.what, found.leaves) == ("later sessions", "bit-exact")
    assert found.evidence == f"{store} holds the run's 2 sessions and 3 that came later"
    assert found.change == "Re-run on a store of the run's sessions alone"
    assert audited(record, data=found).verdict == "bit-exact"
    shutil.rmtree(store)
    write_shards(synthetic_sessions(5, rows=100)[1:], store, "mmap")
    found = data_fault(record, verify=True)
    assert (found.what, found.leaves) == ("other data", "nothing")
    assert f"{store} has fingerprint " in found.evidence
    assert (
        f" over the run's sessions, the run had {record['data']['fingerprint']}" in found.evidence
    )


def test_a_run_is_audited_from_its_folder(stored, tmp_path):
    _, record = stored
    path = write_run(tmp_path / "run", record)
    write_life(path, 2, {"contract": GONE}, from_step=20)
    saved = RunFolder(path, FakeClock()).checkpoints_path / "step-00000040"
    saved.mkdir(parents=True)
    found = audit_run(path)
    assert "contract given up" in {one.what for one in found.obstacles}
    assert found.verdict == "statistical"  # this machine isn't the record's, either
    assert "this machine" in {one.what for one in found.obstacles}
