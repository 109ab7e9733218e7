"""The loader's state: how small it is, what it belongs to, and what may change under it."""

import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
from helpers_windows import arrays

from tapeline.errors import WindowError
from tapeline.session import Session, SessionKey
from tapeline.store import Shards, append_shards, write_shards
from tapeline.windows import (
    Eras,
    Feed,
    Form,
    Loader,
    Noise,
    Normaliser,
    Scaling,
    Shuffled,
    WindowIndex,
    WithReplacement,
    data_fingerprint,
)
from tapeline.windows.augment import described
from tapeline.world import World

T, HORIZON, BATCH = 4, 3, 8
DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30, 25))


def loader_of(store, seed=3, batch=BATCH, **options):
    options = {"order": Shuffled(seed), "form": Form(0), "feed": Feed(0)} | options
    index = options.pop("index", None) or WindowIndex(store, T, HORIZON)
    return Loader(store, index, batch=batch, **options)


def taken(loader, num):
    """The bytes of the next batches."""
    return [b"".join(p.numpy().tobytes() for p in batch) for batch in islice(loader, num)]


def shifted(x, y, draws, by=0.0):
    return x + by, y


def test_the_state_is_small(new_store, store):
    big = loader_of(new_store(arrays(40)), seed=2**32, batch=4096, order=Eras(2**32, 1 << 20))
    big.skip_to(10**12)
    for ours in (loader_of(store), big):
        text = json.dumps(ours.state_dict(), separators=(",", ":"))
        assert len(text) <= 100


def test_ranks_depth_and_the_size_of_a_store_elsewhere_are_no_part_of_it(store):
    other = loader_of(store, feed=Feed(5), world=World(1, 2))
    assert loader_of(store).state() == other.state()


SCALE = Normaliser(np.zeros(3), np.ones(3), 1)
HASH = r"\w{6}"


@pytest.mark.parametrize(
    ("other", "expected", "found"),
    [
        ({"batch": 16}, "batch 8", "batch 16"),
        ({"tail": "short"}, "batch 8", "batch 8 with tail short"),
        ({"order": Eras(3, 9)}, "order shuffled1", "order eras1/9"),
        ({"order": WithReplacement(3)}, "order shuffled1", "order replacement1"),
        ({"T": 5}, f"T 4, 77 windows, windows {HASH}", f"T 5, 74 windows, windows {HASH}"),
        ({"data": True}, f"data {HASH}", f"data {HASH}"),
        ({"split": True}, f"77 windows, windows {HASH}, data", f"36 windows, windows {HASH}, data"),
        ({"horizon": 1}, f"77 windows, windows {HASH}", f"83 windows, windows {HASH}"),
        ({"form": Form(1)}, f"form {HASH}", f"form {HASH}"),
        ({"form": Form((0,))}, f"form {HASH}", f"form {HASH}"),
        ({"form": Form(0, SCALE)}, f"form {HASH}", f"form {HASH}"),
        ({"form": Form(0, dtype="bfloat16")}, f"form {HASH}", f"form {HASH}"),
        ({"form": Form(0, layout="rows")}, f"form {HASH}", f"form {HASH}"),
        ({"form": Form(0, augment=(Noise(0.1),))}, f"form {HASH}", f"form {HASH}"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    new_store, store, other, expected, found
):
    options = dict(other)
    data = new_store(arrays(40, 30, 25, seed=9)) if options.pop("data", False) else store
    index = WindowIndex(data, options.pop("T", T), options.pop("horizon", HORIZON))
    if options.pop("split", False):
        index = index.split(train=0.5, validation="rest")["train"]
    theirs, ours = loader_of(data, index=index, **options), loader_of(store)
    taken(ours, 2)
    before = ours.state()
    with pytest.raises(
        WindowError,
        match=rf"^loader state: expected one of {expected}.*, as this loader has, found one of "
        rf"{found}.*\. Resume with the data, split, T, batch, tail, order and form it was saved "
        r"under, or start anew\.$",
    ):
        ours.load_state_dict(theirs.state_dict())
    assert ours.state() == before


@pytest.mark.parametrize(
    "change",
    [{"position": 1.5}, {"position": None}, {"position": True}, {"seed": "4"}, {"of": "x"}],
)
def test_a_damaged_state_is_refused_and_changes_nothing(store, change):
    ours = loader_of(store)
    taken(ours, 2)
    before = ours.state()
    with pytest.raises(WindowError, match="expected a whole position and seed, and what they are"):
        ours.set_state(before | change)
    with pytest.raises(WindowError, match="expected a position of 0 or more, found -8"):
        ours.set_state(before | {"position": -8})
    assert ours.state() == before


@pytest.mark.parametrize("state", [None, 7, "position", {}])
def test_what_is_no_state_is_refused(store, state):
    with pytest.raises(WindowError) as error:
        loader_of(store).load_state_dict(state)
    assert str(error.value) == (
        f"loader state: expected a whole position and seed, and what they are of, found {state!r}. "
        "Pass what `Loader.state_dict()` returned."
    )


def test_an_augmentation_is_known_by_its_name_and_its_arguments():
    module = shifted.__module__
    assert described(Noise(0.5)) == "tapeline.windows.augment:Noise Noise(std=0.5)"
    assert described(shifted) == f"{module}:shifted"
    assert described(partial(shifted, by=2.0)) == f"{module}:shifted(by=2.0)"
    forms = [
        Form(augment=steps)
        for steps in (
            (),
            (Noise(0.1),),
            (Noise(0.2),),
            (Scaling(0.1),),
            (Noise(0.1), Scaling(0.1)),
            (shifted,),
            (partial(shifted, by=1.0),),
            (partial(shifted, by=2.0),),
        )
    ]
    assert len({form.fingerprint() for form in forms}) == len(forms)


# A store that grows


def sessions(days, seed=0):
    return [
        Session(
            SessionKey("A", f"2024-01-{day:02}"),
            values,
            times=(day * DAY_NS + 10**9 * np.arange(len(values))).astype(np.int64),
        )
        for day, values in zip(days, arrays(*[40] * len(days), seed=seed), strict=True)
    ]


def chosen(store):
    return WindowIndex(store, T, HORIZON, sessions=[0, 2])


def before_the_fourth(store):
    return WindowIndex(store, T, HORIZON).split(train=3 * DAY_NS + 1, validation="rest")["train"]


@pytest.mark.parametrize("index_of", [chosen, before_the_fourth])
def test_a_state_is_taken_up_in_a_store_that_has_grown(tmp_path, index_of):
    write_shards(sessions([1, 2, 3]), tmp_path, "mmap")
    old = Shards(tmp_path)
    ours = loader_of(old, index=index_of(old))
    taken(ours, 3)
    state, rest = ours.state(), taken(ours, 12)
    assert append_shards(sessions([4, 5], seed=1), tmp_path, "mmap") == 2
    new = Shards(tmp_path)
    assert (new.fingerprint == old.fingerprint, len(new)) == (False, 5)
    grown = loader_of(new, index=index_of(new))
    grown.set_state(state)
    assert taken(grown, 12) == rest


def test_a_state_is_refused_where_a_session_in_use_is_another(tmp_path, new_store):
    old = new_store(sessions([1, 2, 3]))
    other = sessions([1, 2, 3])
    other[2].values[39, 2] += 1
    new = new_store(other)
    theirs = loader_of(old, index=chosen(old)).state()
    with pytest.raises(WindowError, match=rf"expected one of data {HASH}, as this loader has"):
        loader_of(new, index=chosen(new)).set_state(theirs)
    # the session that isn't in use may be another
    subset = partial(WindowIndex, T=T, horizons=HORIZON, sessions=[0, 1])
    loader_of(new, index=subset(new)).set_state(loader_of(old, index=subset(old)).state())


def test_the_data_of_several_indexes_is_that_of_all_their_sessions(store):
    one, two, both = (
        WindowIndex(store, T, HORIZON, sessions=which) for which in ([0], [2], [0, 2])
    )
    assert data_fingerprint(store, one, two) == data_fingerprint(store, both)
    prints = {data_fingerprint(store, index) for index in (one, two, both)}
    assert len(prints) == 3
