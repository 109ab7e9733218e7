"""Saves by several ranks with the ranks as threads: who writes what, faults, other cuts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers_checkpoint import Run, files_of
from helpers_sharded import as_threads, by_rows, cut
from hypothesis import given, settings
from hypothesis import strategies as st

from tapeline.checkpoint import (
    Checkpointer,
    State,
    direct,
    load_state,
    read_manifest,
    state_sha256,
    verify,
)
from tapeline.checkpoint import commit as commit_module
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.sharded import Box, Share, owned, tiles
from tapeline.checkpoint.snapshot import Snapshot
from tapeline.errors import CheckpointError
from tapeline.files import ASIDE
from tapeline.testing import Crash, Fault, FaultyDisk
from tapeline.world import World


@pytest.fixture(scope="module")
def states() -> dict[int, State]:
    """A run's state after each of three steps; of a model and optimiser of their own."""
    return {n: Run(seed=1).train(n).capture() for n in (1, 2, 3)}


def save(folder: Path, state: State, num_ranks: int, threshold: int = 0, **options):
    """Save on some ranks, each its rows; what the save returned or raised on each."""
    grid = by_rows(state, num_ranks)

    def on_rank(ranks):
        with Checkpointer(
            folder, ranks=ranks, background_from_bytes=threshold, **options
        ) as checkpoints:
            checkpoints.save(cut(state, grid, ranks.rank))

    return as_threads(num_ranks, on_rank)


def load(folder: Path, like: State, num_ranks: int):
    """Load on some ranks, each its rows; what each got, and the whole they make up."""
    grid = by_rows(like, num_ranks)

    def on_rank(ranks):
        mine = cut(like, grid, ranks.rank)
        return Checkpointer(folder, ranks=ranks).load(like=mine)

    return as_threads(num_ranks, on_rank)


def assert_holds(loaded, state: State, num_ranks: int) -> None:
    grid = by_rows(state, num_ranks)
    for rank, one in enumerate(loaded):
        if isinstance(one, BaseException):
            raise one
        mine = cut(state, grid, rank)
        assert one.state.shares == mine.shares
        assert one.state.tensors.keys() >= mine.shares.keys()
        for name in mine.shares:
            assert torch.equal(one.state.tensors[name], mine.tensors[name]), name


@pytest.mark.parametrize("threshold", [0, 1_000_000], ids=["background", "in the loop"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_each_rank_writes_its_rows_and_any_number_reads_them(
    tmp_path: Path, states, num_ranks: int, threshold: int
):
    assert save(tmp_path, states[3], num_ranks, threshold) == [None] * num_ranks
    folder = tmp_path / "step-00000003"
    manifest = verify(folder)
    assert state_sha256(load_state(folder)) == state_sha256(states[3])
    for others in (1, 2, 3, 4, 7):
        assert_holds(load(tmp_path, states[3], others), states[3], others)
    # Each element once: what is cut, and the rest in rank 0's file.
    cut_bytes = sum(states[3].tensors[name].nbytes for name in manifest.split)
    pieces = [
        (piece.file, piece.start, Box(tuple(piece.offsets), tuple(piece.sizes)))
        for entry in manifest.split.values()
        for piece in entry.pieces
    ]
    assert sum(box.num_elements * 4 for _, _, box in pieces) == cut_bytes
    for rank, entry in enumerate(manifest.ranks):
        owned_names = {
            name for name, s in manifest.split.items() for p in s.pieces if p.file == entry.file
        }
        if rank:
            assert entry.parts == []
            assert bool(entry.file) == bool(owned_names)  # the fifth of five has no row
        else:
            owned_names |= states[3].tensors.keys() - manifest.split.keys()
        if entry.file:
            tensors = safetensors.torch.load_file(folder / entry.file)
            assert tensors.keys() == owned_names


def test_a_checkpoint_by_one_process_is_read_in_shares(tmp_path: Path, states):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(states[2])
    assert_holds(load(tmp_path, states[2], 3), states[2], 3)


def test_a_share_is_cut_like_its_parameter_before_the_optimizer_has_stepped(tmp_path, states):
    save(tmp_path, states[2], 2)
    fresh = Run(seed=5).capture()
    grid = by_rows(fresh, 3)
    found = as_threads(
        3,
        lambda ranks: Checkpointer(tmp_path, ranks=ranks).load(like=cut(fresh, grid, ranks.rank)),
    )
    assert_holds(found, states[2], 3)


def test_a_share_goes_back_only_to_what_is_cut_alike(tmp_path: Path, states):
    save(tmp_path, states[2], 2)
    mine = load(tmp_path, states[2], 2)[1].state
    run = Run(seed=1)
    before = state_sha256(run.capture())
    with pytest.raises(CheckpointError) as error:
        run.restore(mine)
    assert str(error.value) == (
        "model/0.bias: expected the whole tensor, found the part [4] at [4] of [8]. "
        "Load with like=capture_state(…) of the objects that the state is for."
    )
    assert state_sha256(run.capture()) == before


# What is not cut


def replica(state: State, rank: int, **values) -> State:
    """A state as another rank has it, with generators of its own."""
    tensors = dict(state.tensors)
    tensors["generators/torch"] = torch.full_like(tensors["generators/torch"], rank)
    return State(tensors, {**state.values, **values})


def test_of_replicas_rank_0_writes_and_others_what_is_theirs(tmp_path: Path, states):
    def on_rank(ranks):
        with Checkpointer(tmp_path, ranks=ranks) as checkpoints:
            checkpoints.save(states[1])
            checkpoints.save(replica(states[2], ranks.rank))

    as_threads(3, on_rank)
    manifest = verify(tmp_path / "step-00000001")
    assert list(manifest.files) == ["rank-0.safetensors"]
    assert [entry.file for entry in manifest.ranks] == ["rank-0.safetensors", None, None]
    manifest = verify(tmp_path / "step-00000002")
    assert [entry.parts for entry in manifest.ranks[1:]] == [["generators"]] * 2
    for rank in range(3):
        found = load_state(tmp_path / "step-00000002", world=World(rank, 3))
        assert state_sha256(found) == state_sha256(replica(states[2], rank))


def generators_of(folder: Path, rank: int, size: int) -> torch.Tensor:
    return load_state(folder, world=World(rank, size)).tensors["generators/torch"]


def test_generators_on_another_number_of_ranks(tmp_path: Path, states):
    def on_rank(ranks):
        with Checkpointer(tmp_path, ranks=ranks) as checkpoints:
            checkpoints.save(states[1])
            checkpoints.save(replica(states[2], ranks.rank))

    as_threads(2, on_rank)
    torch.manual_seed(99)
    alike, unlike = tmp_path / "step-00000001", tmp_path / "step-00000002"
    for rank in range(3):
        assert torch.equal(generators_of(alike, rank, 3), states[1].tensors["generators/torch"])
    for rank in range(2):
        assert bool((generators_of(unlike, rank, 3) == rank).all())
    assert torch.equal(generators_of(unlike, 2, 3), torch.get_rng_state())
    assert bool((generators_of(unlike, 0, 1) == 0).all())
    alone = Checkpointer(tmp_path / "alone")
    alone.save(states[1])
    for rank, kept in enumerate([states[1].tensors["generators/torch"], torch.get_rng_state()]):
        assert torch.equal(generators_of(alone.path(1), rank, 2), kept)


def test_a_sampler_that_differs_needs_its_number_of_ranks(tmp_path: Path, states):
    def on_rank(ranks):
        position = {"num_rows": 64, "position": ranks.rank}
        with Checkpointer(tmp_path, ranks=ranks) as checkpoints:
            checkpoints.save(replica(states[2], ranks.rank, sampler=position))

    as_threads(2, on_rank)
    folder = tmp_path / "step-00000002"
    assert load_state(folder, world=World(1, 2)).values["sampler"]["position"] == 1
    with pytest.raises(CheckpointError) as error:
        Run(seed=1).restore(load_state(folder))
    assert str(error.value) == (
        "sampler: expected 2 ranks: at the save each had a state of its own, found another number "
        "of ranks. Resume on 2 ranks, or give up the state that differs."
    )


# What the ranks must agree on


def test_ranks_at_different_steps_are_told(tmp_path: Path, states):
    def on_rank(ranks):
        with Checkpointer(tmp_path, ranks=ranks) as checkpoints:
            checkpoints.save(states[1 + ranks.rank])

    for error in as_threads(2, on_rank):
        assert str(error) == (
            "save: expected the same step on every rank, found steps 1, 2. "
            "Call save after the same step on every rank."
        )
    assert not any(tmp_path.glob("*"))


def test_parts_that_are_no_whole_are_told(tmp_path: Path, states):
    grid = by_rows(states[1], 2)
    grid["model/0.weight"][1] = grid["model/0.weight"][0]

    def on_rank(ranks):
        with Checkpointer(tmp_path, ranks=ranks) as checkpoints:
            checkpoints.save(cut(states[1], grid, ranks.rank))

    for error in as_threads(2, on_rank):
        assert str(error) == (
            "model/0.weight: expected parts on the ranks that make up the tensor, found [4, 6] at "
            "[0, 0] of [8, 6]. Give Ranks.joined the ranks that hold the model between them."
        )


def test_going_back_is_refused_on_every_rank(tmp_path: Path, states):
    save(tmp_path, states[2], 2)
    for error in save(tmp_path, states[1], 2):
        assert str(error) == (
            f"rank 0, {tmp_path / 'step-00000001'}: expected a step beyond every checkpoint of the "
            "run, found step 2 here already. "
            "Resume from the newest checkpoint, or save into another folder."
        )


def test_a_folder_that_isnt_shared_is_told(tmp_path: Path, states):
    grid = by_rows(states[1], 2)

    def on_rank(ranks):
        with Checkpointer(tmp_path / str(ranks.rank), ranks=ranks) as checkpoints:
            checkpoints.save(cut(states[1], grid, ranks.rank))

    (tmp_path / "1").mkdir()
    errors = as_threads(2, on_rank)
    assert "No such file or directory" in str(errors[0])
    assert str(errors[0]).startswith("rank 1, ")
    assert str(errors[0]) == str(errors[1])


def test_other_metadata_is_refused_on_every_rank(tmp_path: Path, states):
    save(tmp_path, states[1], 2, metadata={"run": "a"})
    errors = as_threads(
        2, lambda ranks: Checkpointer(tmp_path, ranks=ranks).load(expect={"run": "b"})
    )
    for error in errors:
        assert "run: expected 'b', found 'a'" in str(error)


# Faults


@pytest.mark.parametrize(("num_ranks", "again"), [(2, True), (3, False)], ids=["again", "first"])
def test_a_crash_at_any_operation_leaves_the_old_or_the_new(
    tmp_path: Path, states, num_ranks: int, again: bool
):
    """All ranks die at once, in the middle of any operation of any of them."""
    old, new = (states[3], states[3]) if again else (states[1], states[3])
    if again:
        new = State({**old.tensors, "model/0.bias": old.tensors["model/0.bias"] + 1}, old.values)
    found = set()
    for number in itertools.count():
        folder = tmp_path / str(number)
        save(folder, old, num_ranks)
        with FaultyDisk(folder, Fault("crash", number)) as disk:
            outcomes = save(folder, new, num_ranks, threshold=1_000_000)
        loaded = load(folder, old, num_ranks)
        assert all(one.skipped == () for one in loaded)
        step = loaded[0].state.step
        is_new = torch.equal(
            torch.cat([one.state.tensors["model/0.bias"] for one in loaded]),
            new.tensors["model/0.bias"],
        )
        assert_holds(loaded, new if is_new else old, num_ranks)
        found.add(is_new)
        if not disk.crashed:
            break
        assert all(isinstance(one, (Crash, CheckpointError)) for one in outcomes)
        assert step in (old.step, new.step)
        assert save(folder, new, num_ranks) == [None] * num_ranks  # and the next save cleans up
        assert_holds(load(folder, old, num_ranks), new, num_ranks)
        assert not any(path.name.startswith(ASIDE) for path in folder.rglob("*"))
        names = {path.name for path in files_of(folder / "step-00000003")}
        assert names == {"manifest.json", *verify(folder / "step-00000003").files}
    assert is_new
    assert outcomes == [None] * num_ranks
    assert found == {False, True}
    assert number > 10


# The last two are seen by reading back, and have to lie within the file, which is small.
@pytest.mark.parametrize(
    ("kind", "rank", "found"),
    [
        ("io_error", 1, "Input/output error"),
        ("full_disk", 2, "No space left on device"),
        ("truncated", 0, None),
        ("bit_flip", 0, None),
    ],
)
def test_one_ranks_fault_is_told_on_all_and_nothing_is_committed(
    tmp_path: Path, states, kind, rank: int, found: str | None
):
    save(tmp_path, states[1], 3)
    before = {file: file.read_bytes() for file in files_of(tmp_path)}
    with FaultyDisk(tmp_path, Fault(kind, 0, f"*rank-{rank}*")) as disk:
        errors = save(tmp_path, states[2], 3)
    assert disk.struck
    assert len({str(error) for error in errors}) == 1
    # A disk that is full is so for all.
    assert str(errors[0]).startswith("rank") and f"{rank}" in str(errors[0]).split(",")[0]
    assert isinstance(errors[0], CheckpointError)
    if found:
        assert errors[0].found == found
    assert {file: file.read_bytes() for file in files_of(tmp_path)} == before
    assert_holds(load(tmp_path, states[1], 3), states[1], 3)
    assert save(tmp_path, states[2], 3) == [None] * 3
    assert_holds(load(tmp_path, states[2], 3), states[2], 3)


def test_a_slow_rank_is_waited_for(tmp_path: Path, states):
    with FaultyDisk(tmp_path, Fault("slow_fsync", 0, "*rank-1*", delay_s=0.3)) as disk:
        assert save(tmp_path, states[1], 2) == [None] * 2
    assert disk.struck
    verify(tmp_path / "step-00000001")


def test_a_flipped_byte_in_any_file_makes_every_rank_fall_back(tmp_path: Path, states):
    save(tmp_path, states[1], 3)
    save(tmp_path, states[2], 3)
    newest = tmp_path / "step-00000002"
    generator = random.Random(2)
    for file in files_of(newest):
        whole = file.read_bytes()
        for position in {0, len(whole) - 1, *generator.sample(range(len(whole)), 4)}:
            flipped = bytearray(whole)
            flipped[position] ^= generator.randrange(1, 256)
            file.write_bytes(flipped)
            for num_ranks in (2, 3):
                loaded = load(tmp_path, states[1], num_ranks)
                assert_holds(loaded, states[1], num_ranks)
                assert len({str(one.skipped) for one in loaded}) == 1
                (skipped,) = loaded[0].skipped
                assert skipped.path == newest
                assert skipped.reason.startswith("rank")
                assert file.name in skipped.reason
        file.write_bytes(whole)
    assert_holds(load(tmp_path, states[2], 3), states[2], 3)


# Behind the loop


def test_where_one_rank_lacks_memory_all_write_in_the_loop(
    tmp_path: Path, states, monkeypatch: pytest.MonkeyPatch
):
    calls = itertools.count()
    monkeypatch.setattr(Snapshot, "lacks_bytes", lambda *_: 5 if next(calls) == 0 else 0)
    grid = by_rows(states[1], 3)

    def on_rank(ranks):
        with Checkpointer(tmp_path, ranks=ranks, background_from_bytes=0) as checkpoints:
            checkpoints.save(cut(states[1], grid, ranks.rank))
            assert not checkpoints.busy
            return checkpoints.stats().background_saves

    with pytest.warns(RuntimeWarning, match="5 more than may be taken"):
        assert as_threads(3, on_rank) == [0, 0, 0]
    verify(tmp_path / "step-00000001")


def test_a_save_that_finds_one_in_flight_is_skipped_on_all_ranks(tmp_path: Path, states):
    grid = by_rows(states[1], 2)

    def on_rank(ranks):
        with Checkpointer(
            tmp_path, ranks=ranks, background_from_bytes=0, when_busy="skip"
        ) as checkpoints:
            checkpoints.save(cut(states[1], grid, ranks.rank))
            second = checkpoints.save(cut(states[2], grid, ranks.rank))
            checkpoints.wait()
            return second, checkpoints.save(cut(states[3], grid, ranks.rank))

    with FaultyDisk(tmp_path, Fault("slow_fsync", 0, "*rank-1*", delay_s=1.0)):
        assert as_threads(2, on_rank) == [(None, tmp_path / "step-00000003")] * 2


def test_a_durable_copy_holds_the_files_of_all_ranks(tmp_path: Path, states):
    save(tmp_path / "run", states[2], 3)
    tier = DurableTier(tmp_path / "durable")
    tier.copy(tmp_path / "run" / "step-00000002")
    fetched = tier.fetch(2, tmp_path / "fetched" / "step-00000002")
    assert len(verify(fetched).files) == 3
    assert_holds(load(tmp_path / "fetched", states[2], 2), states[2], 2)


# Byte ranges


def test_only_the_blocks_of_a_share_are_read_and_each_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (direct, commit_module):
        monkeypatch.setattr(module, "HASHED_BYTES", 4096)
    model = torch.nn.Linear(64, 1024, bias=False)
    state = Run(seed=1).capture()
    state = State(
        {**state.tensors, "extra/w": model.weight.detach()},
        {**state.values, "extra": {"w": {"$tensor": "extra/w"}}},
    )
    with Checkpointer(tmp_path, background_from_bytes=0) as checkpoints:
        checkpoints.save(state)
    folder = tmp_path / "step-00000000"
    (entry,) = read_manifest(folder).files.values()
    assert entry.block_bytes == 4096
    assert len(entry.blocks_xxh3_128) == -(-entry.bytes // 4096) > 64
    file = folder / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    weight = safetensors.torch.load_file(file)["extra/w"]
    at = bytes(data).index(weight.numpy().tobytes())
    data[at + 900 * 64 * 4] ^= 1  # in row 900
    file.write_bytes(data)

    def rows(first: int, last: int) -> torch.Tensor:
        share = Share((1024, 64), Box((first, 0), (last - first, 64)))
        like = State({}, {}, {"extra/w": share})
        return load_state(folder, like=like).tensors["extra/w"]

    assert torch.equal(rows(0, 512), weight[:512])
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: expected bytes [\d,]+ to "):
        rows(512, 1024)
    with pytest.raises(CheckpointError):
        load_state(folder)


def spans(draw, size: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) if size > 1 else ())
    ends = [0, *cuts, size]
    return [(a, b - a) for a, b in itertools.pairwise(ends)]


@st.composite
def grids(draw, shape: tuple[int, ...]) -> list[Box]:
    """A tensor of this shape cut into boxes: straight through, in every dimension."""
    products = itertools.product(*(spans(draw, size) for size in shape))
    return [Box(tuple(a for a, _ in one), tuple(n for _, n in one)) for one in products]


@st.composite
def two_grids(draw, smallest: int):
    shape = tuple(draw(st.lists(st.integers(smallest, 7), min_size=0, max_size=3)))
    return shape, draw(grids(shape)), draw(grids(shape))


@given(case=two_grids(smallest=0))
@settings(max_examples=40)
def test_any_cut_is_read_back_from_any_other(tmp_path_factory, case):
    shape, stored, wanted = case
    count = 1
    for size in shape:
        count *= size
    whole = torch.arange(count, dtype=torch.int32).view(shape)
    values = dict.fromkeys(("optimizer", "scheduler", "sampler"))
    values |= {"step": 1, "epoch": 0, "model": {}, "generators": {}}
    state = State({"extra/x": whole}, {**values, "extra": {"x": {"$tensor": "extra/x"}}})
    folder = tmp_path_factory.mktemp("cut")

    def save_mine(ranks):
        mine = cut(state, {"extra/x": stored}, ranks.rank)
        Checkpointer(folder, ranks=ranks).save(mine)

    assert as_threads(len(stored), save_mine) == [None] * len(stored)
    for box in [*wanted, *stored]:
        like = State({}, {}, {"extra/x": Share(shape, box)})
        read = load_state(folder / "step-00000001", like=like)
        assert torch.equal(read.tensors["extra/x"], whole[box.within(Box.whole(shape))])
    assert torch.equal(load_state(folder / "step-00000001").tensors["extra/x"], whole)


@given(case=two_grids(smallest=1), data=st.data())
def test_a_grid_tiles_and_one_with_a_box_less_or_moved_does_not(case, data):
    shape, boxes, _ = case
    assert tiles(shape, boxes)
    index = data.draw(st.integers(0, len(boxes) - 1))
    assert not tiles(shape, boxes[:index] + boxes[index + 1 :])
    assert not tiles(shape, [*boxes, boxes[index]])
    if shape:
        box = boxes[index]
        moved = Box((box.offsets[0] + 1, *box.offsets[1:]), box.sizes)
        assert not tiles(shape, [*boxes[:index], moved, *boxes[index + 1 :]])


def test_each_part_is_written_once_and_evenly():
    whole, half = Share((4, 2), Box.whole((4, 2))), Share((4, 2), Box((0, 0), (2, 2)))
    rest = Share((4, 2), Box((2, 0), (2, 2)))
    nothing = Share((4, 2), Box((4, 0), (0, 2)))
    empty = Share((0, 2), Box.whole((0, 2)))
    assert owned(
        [
            {"a": whole, "b": half, "c": half, "e": empty},
            {"a": whole, "b": rest, "c": half, "e": empty},
            {"a": whole, "b": nothing, "c": rest, "e": empty},
        ]
    ) == [{"a", "b"}, {"b", "c"}, {"c", "e"}]
