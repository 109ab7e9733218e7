"""`tapeline prove`: passes where bits outlast kills, and names the fault where they don't."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_prove import Forked
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tapeline.checkpoint import Shelf, capture_state, save_state
from tapeline.cli.output import whole_numbers
from tapeline.errors import ConfigError, RunError
from tapeline.files import read_journal
from tapeline.prove import Certificate, Trial, prove
from tapeline.prove.cause import MANY_THREADS, find_causes
from tapeline.prove.killing import plan_kills, ranks_of_life
from tapeline.prove.outside import changes, fingerprint, kept_outside
from tapeline.prove.parting import first_parting
from tapeline.prove.processes import Command
from tapeline.prove.tracing import BATCH, OUTSIDE, Trace, first_difference
from tapeline.runs import MetricsJournal
from tapeline.store import write_shards
from tapeline.tape import synthetic_sessions

EXAMPLES = Path(__file__).parents[1] / "examples"
FAULTS = '''
import itertools, os, time
import numpy as np
import torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.002)
        return x

class Counter(nn.Module):
    """Every call scales a little differently; the number of calls is in no state."""
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x * (1 + 1e-3 * (self.calls % 7))

class Hidden(nn.Module):
    """Counts where neither a checkpoint nor a look at attributes finds it."""
    def __init__(self):
        super().__init__()
        calls = itertools.count()
        self.next_call = lambda: next(calls)
    def forward(self, x):
        return x * (1 + 1e-3 * (self.next_call() % 7))

class Unrepeatable(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x).put_(torch.arange(x.numel()), x.flatten())

class Noise(nn.Module):
    def forward(self, x):
        return x + 1e-3 * torch.from_numpy(np.random.standard_normal(x.shape).astype(np.float32))

class Pooled(nn.Module):
    """A sum by as many workers as the machine lends: its order depends on their number."""
    def forward(self, x):
        workers = int(os.environ["OMP_NUM_THREADS"])
        total = sum(part.sum(dim=1) for part in torch.chunk(x * 1.1, workers, dim=1))
        return x - 0.1 * total[:, None]

class Entropy(nn.Module):
    def forward(self, x):
        draws = np.random.default_rng().standard_normal(x.shape)
        return x + 1e-3 * torch.from_numpy(draws.astype(np.float32))

def net(num_inputs, part):
    middle = [globals()[part]()] if part else [nn.BatchNorm1d(16), nn.Dropout(0.3)]
    return nn.Sequential(Slow(), nn.Linear(num_inputs, 16), nn.ReLU(), *middle, nn.Linear(16, 1))

def ranked(num_inputs, part):
    """A weight that moves by the rank, which no gradient shows."""
    model = net(num_inputs, part)

    def shift(module, _):
        with torch.no_grad():
            module.bias += 1e-3 * int(os.environ.get("RANK", 0))

    model[-1].register_forward_pre_hook(shift)
    return model

def threaded(num_inputs):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return net(num_inputs, "")
'''
CONFIG = """
name = "tiny"
[data]
store = "store"
[model]
factory = "faults:net"
arguments = { part = "" }
[training]
steps = 24
batch = 32
lanes = 4
clip_norm = 1.0
[validation]
every = 10
fraction = 0.5
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("proofs")
    write_shards(synthetic_sessions(2, rows=800), folder / "store", "mmap")
    (folder / "faults.py").write_text(FAULTS)
    (folder / "tiny.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("tapeline.prove.processes.start", Forked)


def proved(workplace, out, *overrides, kills=1, ranks=(1, 2), file="tiny.toml") -> Certificate:
    trial = Trial(workplace / file, overrides, kills, ranks)
    return prove(trial, workplace / out, lambda _: None)


# What passes


def test_a_command_is_a_new_program(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")  # not taken for the library's
    monkeypatch.chdir(tmp_path)
    words = ("plan", "checkpoint", "--mtbf-hours", "6", "--checkpoint-seconds", "180", "--json")
    with Command(*words, threads=3) as command:
        (process,) = command.processes
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert command.data()
    assert {b"OMP_NUM_THREADS=3", b"MKL_NUM_THREADS=3"} <= set(environment)


def test_the_command_prints_a_certificate(forked, workplace, tapeline, monkeypatch):
    monkeypatch.chdir(workplace)
    code, out, said = tapeline(
        "prove", "tiny.toml", "--kills", 1, "--ranks", 1, "--out", "command", "--json"
    )
    assert code == 0, said
    found = json.loads(out)
    assert found["holds"] is True
    assert (found["parting"], found["failure"], found["causes"]) == (None, None, [])
    assert found["contract"] == "bit-exact across world sizes 1–4 on this platform and version"
    assert {"parameters", "optimiser", "loader", "losses", "validation"} <= set(found["hashes"])
    assert all(both["uninterrupted"] == both["killed"] for both in found["hashes"].values())
    assert [(life["ranks"], life["how"]) for life in found["lives"]] == [
        (1, "killed"),
        (1, "finished"),
    ]
    assert found["subject"]["ranks"] == 1
    assert found["platform"]["determinism"]["threads"] == 1
    cost = found["determinism_cost"]
    assert cost["ratio"] == cost["deterministic_ms"] / cost["free_ms"] > 0
    assert json.loads((workplace / "command" / "certificate.json").read_text()) == found
    planned, killed = read_journal(workplace / "command" / "kills.jsonl")
    assert killed["killed"]["signal"] == "SIGKILL"
    assert planned["planned"]["at_step"] <= killed["killed"]["after_step"] < 24
    assert "life 1, on 1 rank: SIGKILL to all ranks at step " in said


@pytest.mark.parametrize("example", ["conv_order_book", "transformer"])
def test_the_examples_pass(forked, workplace, example):
    for end in ("py", "toml"):
        shutil.copy(EXAMPLES / f"{example}.{end}", workplace)
    found = proved(
        workplace,
        example,
        f"data.store={workplace / 'store'}",
        "training.steps=10",
        "training.batch=16",
        "checkpoint.durable=copies",
        "checkpoint.durable_every=5",
        ranks=(1, 2),
        file=f"{example}.toml",
    )
    assert found.holds, found.sentence()
    assert [life.ranks for life in found.lives] == [2, 1]
    assert found.sentence() == (
        "The same bits through 1 SIGKILL, ranks 2 → 1: bit-exact across world sizes 1–4 on "
        "this platform and version."
    )
    assert (workplace / example / "durable-killed").is_dir(), "a user's own copies are left alone"
    assert not (workplace / "copies").exists()


# What fails, and why


@pytest.mark.parametrize(
    ("model", "ranks", "kind"),
    [("Noise", (1, 2), "unkeyed draw"), ("Pooled", (1,), "thread count")],
)
def test_a_planted_fault_is_named(forked, workplace, model, ranks, kind):
    found = proved(workplace, model, f'model.arguments={{part = "{model}"}}', ranks=ranks)
    assert not found.holds
    assert found.parting is not None
    told = " → ".join(str(life.ranks) for life in found.lives)
    assert found.sentence().startswith(f"Other bits after 1 SIGKILL, ranks {told}: the runs part")
    cause = found.causes[0]
    assert (cause.kind, cause.where, cause.shown) == (kind, f"3 ({model})", True)
    assert found.parting.tensor == "model/1.bias"
    assert found.parting.distance and found.parting.distance > 0
    assert found.hashes["parameters"][0] != found.hashes["parameters"][1]
    assert found.hashes["loader"][0] == found.hashes["loader"][1]


def test_an_operation_that_does_not_repeat_is_named(forked, workplace):
    run = workplace / "entropy"
    sets = ("--set", 'model.arguments={part = "Entropy"}')
    with Command("train", str(workplace / "tiny.toml"), "--out", str(run), "--json", *sets) as one:
        one.data()
    (cause,) = find_causes(run, run, 0)
    assert (cause.kind, cause.where) == ("non-deterministic operation", "3 (Entropy)")


def test_a_counter_parts_where_the_run_resumes(forked, workplace):
    """On one rank nothing differs before the first kill: the step is right, not only the cause."""
    found = proved(workplace, "resumed", 'model.arguments={part = "Counter"}', ranks=(1,))
    begun = found.lives[-1].from_step
    assert found.parting and begun
    assert found.parting.step == begun + 1
    assert found.parting.losses is not None
    assert found.parting.equal_up_to == begun
    (cause,) = found.causes
    assert (cause.kind, cause.shown) == ("state outside the checkpoint", True)
    assert cause.where == "attribute `calls` of 3 (Counter)"
    assert cause.evidence.startswith("1 → 13 over three steps")


def test_a_count_that_no_look_finds_is_told_as_state(forked, workplace):
    run = workplace / "hidden"
    sets = ("--set", 'model.arguments={part = "Hidden"}')
    with Command("train", str(workplace / "tiny.toml"), "--out", str(run), "--json", *sets) as one:
        one.data()
    (cause,) = find_causes(run, run, 0)
    assert (cause.kind, cause.where) == ("state outside the checkpoint", "3 (Hidden)")
    assert "closure" in cause.fix


@pytest.mark.parametrize(
    ("overrides", "ranks", "kind", "changed"),
    [
        (
            ("model.factory=faults:threaded", "model.arguments={}"),
            (1,),
            "thread count",
            f"threads 1 → {MANY_THREADS}",
        ),
        (("training.strategy=ddp", "training.lanes=1"), (1, 2), "changed contract", "ranks 2 → 1"),
    ],
)
def test_a_contract_that_a_life_gave_up_says_why(
    forked, workplace, overrides, ranks, kind, changed
):
    found = proved(workplace, "contract", *overrides, ranks=ranks)
    assert not found.holds
    (cause,) = found.causes
    assert cause.kind == kind
    assert "statistical from step" in cause.evidence
    assert cause.evidence.endswith(changed)
    rests_on = json.loads((workplace / "contract" / "whole" / "run.json").read_text())["contract"][
        "condition"
    ]
    assert rests_on.endswith(f"threads = {MANY_THREADS if kind == 'thread count' else 1}")


def test_a_life_that_ends_by_itself_is_a_finding(forked, workplace):
    """Ranks that part among themselves end the run, and leave no end to compare."""
    found = proved(workplace, "ranked", "model.factory=faults:ranked", ranks=(1, 1, 2))
    assert not found.holds
    assert [(life.ranks, life.how) for life in found.lives] == [(1, "killed"), (2, "failed")]
    assert found.failure is not None
    assert found.failure.startswith("life 2, 2 ranks: tapeline: rank 1 of 2: expected the same")
    assert found.failure in found.sentence()
    assert found.parting is not None


# What is refused


def test_what_cannot_be_proved_is_told(workplace):
    with pytest.raises(ConfigError) as caught:
        proved(workplace, "x", kills=12)
    assert str(caught.value) == (
        "training.steps: expected at least 26, for 12 kills between them, found 24. Train more "
        "steps, or kill less often."
    )
    with pytest.raises(ConfigError, match=r"training\.lanes: expected at least 5, one for each"):
        proved(workplace, "x", ranks=(1, 5))
    (workplace / "mine").mkdir()
    (workplace / "mine" / "precious").touch()
    with pytest.raises(RunError) as refused:
        proved(workplace, "mine")
    assert str(refused.value) == (
        f"{workplace / 'mine'}: expected a new folder, or that of an earlier proof, found files "
        "that no proof wrote. Give another folder with --out."
    )
    assert not (workplace / "x").exists()


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("model.factory=faults:absent", r"model\.factory = faults:absent: "),
        (
            'model.arguments={part = "Unrepeatable"}',
            r"model Sequential: expected operations that repeat their bits, found put_, ",
        ),
    ],
)
def test_a_run_that_cannot_be_trained_is_told(forked, workplace, setting, told):
    with pytest.raises(RunError, match=rf"found 2: tapeline: {told}"):
        proved(workplace, "absent", setting)


@pytest.mark.parametrize("text", ["", "1,x", "0", "1,,2"])
def test_ranks_that_are_none_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        whole_numbers(text, "--ranks", "1,2")
    assert str(caught.value) == (
        f"--ranks: expected whole numbers from 1, with commas between, found {text!r}. Write, for "
        "example, --ranks 1,2."
    )
    assert whole_numbers("1,2, 3", "--ranks", "1,2") == [1, 2, 3]


# The moments


@given(
    num=st.integers(1, 12),
    ranks=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    room=st.integers(0, 300),
    seed=st.integers(0, 2**32),
)
def test_kills_are_in_order_and_inside_the_run(num, ranks, room, seed):
    steps = 2 * (num + 1) + room
    kills = plan_kills(num, ranks, steps, seed)
    moments = [kill.at_step for kill in kills]
    assert moments == sorted(moments)
    assert moments[0] >= 1 and moments[-1] < steps
    for number, kill in enumerate(kills):
        assert kill.ranks == ranks_of_life(number, ranks)
        assert kill.victims in [tuple(range(kill.ranks)), *((r,) for r in range(kill.ranks))]
        assert 0 <= kill.later < 1
    assert kills == plan_kills(num, ranks, steps, seed)
    if len(ranks) > 1:
        assert kills[0].ranks == ranks[1]


def test_seeds_draw_other_moments_and_victims():
    drawn = [plan_kills(4, (2, 3), 1000, seed) for seed in range(20)]
    assert len({kill.at_step for kills in drawn for kill in kills}) > 60
    assert {len(kill.victims) for kills in drawn for kill in kills} == {1, 2, 3}


# Where two runs part


def run_of(folder, losses, saved):
    """A run with these losses, and at each of some steps a weight and a momentum."""
    with MetricsJournal(folder / "metrics" / "rank-0.jsonl", 1) as metrics:
        metrics.losses(len(losses), losses)
    torch.manual_seed(0)  # the generators are part of a state
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    shelf = Shelf(folder / "checkpoints")
    for step, (weight, momentum) in saved.items():
        model.weight.data[:] = weight
        optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 2), momentum)
        state = capture_state(model, optimizer, step=step)
        save_state(shelf.path(step), state)
    return folder


@pytest.mark.parametrize("first", range(5))
def test_the_first_parting_checkpoint_is_found_by_bisection(tmp_path, first):
    steps = [10, 20, 30, 40]
    even = dict.fromkeys(steps, (1.0, 1.0))
    odd = {step: (1.0, 1.0 if number < first else 1.5) for number, step in enumerate(steps)}
    one, other = run_of(tmp_path / "a", [1.0] * 40, even), run_of(tmp_path / "b", [1.0] * 40, odd)
    found = first_parting(one, other)
    if first == 4:
        assert found is None
        return
    assert found is not None
    assert (found.step, found.checkpoint, found.losses) == (steps[first], steps[first], None)
    assert found.equal_up_to == (steps[first - 1] if first else 0)
    assert (found.part, found.tensor) == ("optimizer", "optimizer/state/weight/momentum_buffer")
    assert (found.num_differing, found.distance) == (1, 0.5)


def test_a_loss_that_differs_says_the_step(tmp_path):
    losses = [1.0] * 40
    other = [1.0] * 24 + [np.nextafter(1.0, 2)] + [1.0] * 15
    saved = ({20: (1.0, 1.0), 40: (1.0, 1.0)}, {20: (1.0, 1.0), 40: (2.0, 1.0)})
    runs = run_of(tmp_path / "a", losses, saved[0]), run_of(tmp_path / "b", other, saved[1])
    found = first_parting(*runs)
    assert found is not None
    assert (found.step, found.losses) == (25, (1.0, other[24]))
    assert (found.equal_up_to, found.checkpoint, found.tensor) == (20, 40, "model/weight")


# What a model keeps and draws


class Keeper(nn.Module):
    """One attribute of each kind, and one way to change it."""

    shared = 0

    def __init__(self):
        super().__init__()
        self.number, self.words = 1, ["a"]
        self.table = {"x": np.zeros(2)}
        self.generator = torch.Generator()
        self.rng = np.random.default_rng(0)
        self.cache = torch.zeros(2)
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(1))


KEEPS = {
    "attribute `number` of inner (Keeper)": lambda m: setattr(m, "number", 2),
    "attribute `words` of inner (Keeper)": lambda m: m.words.append("b"),
    "attribute `table` of inner (Keeper)": lambda m: m.table["x"].__setitem__(1, 1.0),
    "attribute `generator` of inner (Keeper)": lambda m: torch.rand(1, generator=m.generator),
    "attribute `rng` of inner (Keeper)": lambda m: m.rng.random(),
    "attribute `cache` of inner (Keeper)": lambda m: m.cache.add_(1),
    "buffer `mask` of inner (Keeper), which isn't saved": lambda m: m.mask.add_(1),
    "attribute `late` of inner (Keeper)": lambda m: setattr(m, "late", 1),
    "attribute `shared` of class Keeper": lambda m: setattr(Keeper, "shared", Keeper.shared + 1),
    "global `COUNTED` of test_prove": lambda m: COUNTED.append(1),
}
COUNTED: list[int] = []


@pytest.mark.parametrize("path", KEEPS)
def test_what_a_model_keeps_in_python_is_seen(path):
    model = nn.ModuleDict({"inner": Keeper()})
    before = kept_outside(model)
    KEEPS[path](model["inner"])
    assert list(changes(before, kept_outside(model))) == [path]


def test_what_the_state_holds_and_what_does_not_change_is_not_told():
    model = nn.ModuleDict({"inner": Keeper()})
    before = kept_outside(model)
    model["inner"].weight.data += 1
    model["inner"].seen += 1
    model.eval()
    assert changes(before, kept_outside(model)) == {}


def test_values_are_told_apart_by_what_they_are():
    values = [0, 0.0, False, "0", b"0", None, [0], (0,), {0: 0}, {0}, np.zeros(1), torch.zeros(1)]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint({2, 1}) == fingerprint({1, 2})
    assert fingerprint(len) is None


class Caller(nn.Module):
    """Changes what it hands to a part of it, or what the part gives back."""

    def __init__(self, before, after):
        super().__init__()
        self.part, self.before, self.after = nn.Linear(2, 1), before, after

    def forward(self, x):
        return self.part(x + self.before) + self.after


def told(model, x):
    trace = Trace(model, 0)
    with trace.watching():
        loss = model(x).sum()
        loss.backward()
        trace.step_done(1, loss)
    return trace


def test_the_module_that_makes_something_else_of_the_same_is_named():
    x = torch.ones(3, 2)
    model = Caller(0.0, 0.0)

    def with_(before=0.0, after=0.0, x=x, part=None):
        other = Caller(before, after)
        other.load_state_dict(model.state_dict())
        if part is not None:
            other.part.bias.data += part
        return first_difference(told(model, torch.ones(3, 2)).entries, told(other, x).entries)

    assert with_() is None
    assert with_(part=0.1) == "part (Linear)"
    assert with_(before=0.1) == "model (Caller)"
    assert with_(after=0.1) == "model (Caller)"
    assert with_(x=2 * x) == BATCH


def test_a_draw_is_told_by_the_innermost_module_that_makes_it():
    class Drawing(nn.Module):
        def forward(self, x):
            return x + np.random.random()  # noqa: NPY002 - what is to be found

    model = nn.Sequential(nn.Linear(2, 1), nn.Sequential(Drawing()))
    assert told(model, torch.ones(3, 2)).moved == {"np.random": "1.0 (Drawing)"}
    trace = Trace(nn.Linear(1, 1), 0)
    with trace.watching():
        np.random.random()  # noqa: NPY002
    assert trace.moved == {"np.random": OUTSIDE}
