"""What the ranks of a run agree on before it begins: its start, its checkpoint, its bits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers_ranks import on_ranks
from helpers_training import adam, network

from tapeline.attempt.origin import restore
from tapeline.attempt.parts import check_ranks
from tapeline.attempt.promise import Promise
from tapeline.checkpoint import Checkpointer, Shelf, capture_state
from tapeline.clock import FakeClock
from tapeline.config import TrainingConfig
from tapeline.errors import CheckpointError, ConfigError, TrainingError
from tapeline.runs import RunFolder
from tapeline.training import contract_of
from tapeline.training.build import build_optimizer
from tapeline.training.determinism import make_deterministic
from tapeline.training.ranks import device_of, from_all, from_first
from tapeline.world import World

RECORD = {"format": "tapeline run", "version": 1, "created": "now", "config": {"name": "r"}}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A run with checkpoints of steps 1 to 3, as its only life left it."""
    folder = RunFolder(tmp_path / "run", FakeClock())
    folder.create(RECORD)
    folder.begin_attempt(from_step=0, world_size=2)
    model = network()
    metadata = {"run": "r, begun now", "attempt": 1}
    with Checkpointer(folder.checkpoints_path, metadata=metadata) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(capture_state(model, adam(model), step=step))
    return folder


def unreadable_on_rank_1(rank, world_size, path, bad):
    run = RunFolder(path, FakeClock())
    shelf = Shelf(run.checkpoints_path)

    def read(step):
        if rank == 1 and step in bad:
            raise CheckpointError("here", expected="bytes", found="none", fix="Look")
        return shelf.load_step(step)

    try:
        origin = restore(run, None, {}, world=World(rank, world_size), read=read)
    except CheckpointError as error:
        return str(error)
    return origin.step, origin.state.step, [one.reason for one in origin.skipped]


def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(run):
    told = "rank 1: here: expected bytes, found none. Look."
    assert on_ranks(2, unreadable_on_rank_1, run.path, ()) == [(3, 3, [])] * 2
    assert on_ranks(2, unreadable_on_rank_1, run.path, (2, 3)) == [(1, 1, [told, told])] * 2
    first, second = on_ranks(2, unreadable_on_rank_1, run.path, (1, 2, 3))
    assert first == second
    assert first.startswith(f"{run.checkpoints_path}: expected a checkpoint that verifies, found 3")


def other_settings(rank, world_size):
    make_deterministic(threads=1)
    if rank == 1:
        torch.set_float32_matmul_precision("medium")
    contract = contract_of("lanes", num_lanes=4, world_size=world_size, threads=1)
    with pytest.raises(TrainingError) as error:
        Promise.of_new(SimpleNamespace(world=World(rank, world_size), contract=contract))
    return str(error.value)


def test_ranks_that_would_compute_other_bits_are_refused():
    told = on_ranks(2, other_settings)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1 of 2: expected ")
    assert "matmul_precision highest" in told[0]
    assert told[0].endswith("Start all ranks alike, on one kind of processor.")


def fails_on_rank_0(rank, world_size):
    def make():
        if rank == 0:
            raise KeyError("weights")
        raise AssertionError("called on rank 0 only")

    world = World(rank, world_size)
    try:
        from_first(world, make)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return failure, from_first(world, lambda: rank), from_all(world, rank)


def test_what_rank_0_makes_or_fails_to_make_reaches_every_rank():
    first, second = on_ranks(2, fails_on_rank_0)
    assert first == ("KeyError: 'weights'", 0, [0, 1])
    told = "TrainingError: rank 0: expected to begin, found KeyError: 'weights'. "
    assert second == (told + "Correct that; the other ranks end with it.", 0, [0, 1])


def promise(scope_of="lanes", lanes=4, world_size=2) -> Promise:
    contract = contract_of(scope_of, num_lanes=lanes, world_size=world_size, threads=1)
    parts = SimpleNamespace(world=World(), contract=contract)
    return replace(Promise.of_new(parts), world_size=world_size)


def test_a_promise_is_kept_as_long_as_nothing_changes():
    record = promise().as_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kept, saved in (
            (promise(), {**record, "world_size": 3}),  # lanes don't mind the ranks
            (promise("ddp", 1), promise("ddp", 1).as_dict()),
            (promise("ddp", 1), {}),
        ):
            assert kept.kept(5, record, saved) is kept


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_another_number_of_ranks_gives_up_what_was_promised_for_one(strategy):
    before, now = promise(strategy, 1, 2), promise(strategy, 1, 4)
    with pytest.warns(RuntimeWarning) as told:
        after = now.kept(1200, before.as_dict(), before.as_dict())
    assert str(told[0].message) == (
        "This run no longer keeps its contract: statistical from step 1,200 on: ranks 2 → 4. "
        "It goes on with other bits than it would have had."
    )
    assert after.contract.scope == "statistical"


def test_every_rank_of_a_node_has_a_device_of_its_own():
    assert device_of("cuda:1", World()) == "cuda:1"
    assert device_of("cpu", World(1, 2, 1)) == "cpu"
    assert device_of("cuda", World(5, 8, 1)) == "cuda:1"
    with pytest.raises(TrainingError) as error:
        device_of("cuda:0", World(1, 2, 1))
    assert str(error.value) == (
        "training.device: expected cuda, of which each rank takes the one of its local rank, "
        "found cuda:0. Leave out the number; CUDA_VISIBLE_DEVICES chooses among devices."
    )


def test_the_optimiser_starts_at_the_rescaled_rate():
    config = TrainingConfig(batch=1024, base_batch=256, lr_rescale="sqrt", warmup_steps=9)
    assert build_optimizer(config, network()).param_groups[0]["lr"] == 2e-3


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (
            {"lanes": 4},
            5,
            "training.lanes: expected at least 5, one for each rank, found 4. Start fewer ranks, "
            "or another run with more lanes: they decide its bits.",
        ),
        (
            {"strategy": "ddp", "batch": 64, "accumulate": 4},
            3,
            "training.batch: expected a multiple of accumulate times the 3 ranks, found 64. Start "
            "another number of ranks, or choose another batch.",
        ),
        (
            {"strategy": "fsdp2", "tensor_parallel": 2},
            3,
            "training.batch: expected a multiple of accumulate times the 3 ranks over "
            "tensor_parallel 2, found 256. Start another number of ranks, or choose another batch.",
        ),
    ],
)
def test_numbers_of_ranks_that_a_configuration_cannot_have(settings, world_size, message):
    for fitting in (1, 2, 4):
        check_ranks(TrainingConfig(**settings), World(0, fitting))
    with pytest.raises(ConfigError) as error:
        check_ranks(TrainingConfig(**settings), World(0, world_size))
    assert str(error.value) == message
