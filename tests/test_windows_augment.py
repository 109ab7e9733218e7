"""Augmentation: a function of (seed, position), the same wherever and whenever it is drawn."""

from itertools import islice

import numpy as np
import pytest
import torch
from helpers_windows import arrays

from tapeline.errors import WindowError
from tapeline.windows import (
    ColumnDropout,
    Draws,
    Feed,
    Form,
    Loader,
    Noise,
    Scaling,
    Shuffled,
    WindowIndex,
    named,
)
from tapeline.windows.order import mix

CPU = torch.device("cpu")
WORD = 2**64


def draws(seed=1, first=0, batch=4):
    return Draws(seed, first, batch, CPU)


def splitmix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def slow_word(seed, call, position, place):
    """The construction in whole numbers without a size."""
    key = mix(seed, 1 << 62, call)
    row = splitmix((position ^ key) * 0xBF58476D1CE4E5B9 % WORD)
    return splitmix((row + (place + 1) * 0x9E3779B97F4A7C15) % WORD)


def test_draws_are_the_construction():
    ours = draws(seed=-7, first=10**12, batch=3)
    uniform, normal = ours.uniform(2, 5), ours.normal(3)
    for row in range(3):
        position = 10**12 + row
        wanted = [(slow_word(-7, 1, position, p) >> 40) / 2**24 for p in range(10)]
        assert uniform[row].reshape(-1).tolist() == wanted
        for place in range(3):
            total = sum(slow_word(-7, 2, position, place).to_bytes(8, "little"))
            value = np.float32(total - 1020) * np.float32(1 / (8 * 65535 / 12) ** 0.5)
            assert normal[row, place].item() == value


def test_the_bits_have_not_changed():
    # A run with augmentation resumes by these numbers.
    assert draws().uniform(2)[0].tolist() == [0.38660383224487305, 0.6429336667060852]
    assert draws(first=7).normal(2)[0].tolist() == [1.564432144165039, 0.7463346123695374]


def test_a_part_of_a_batch_draws_what_the_whole_one_does():
    whole, part = draws(batch=10), draws(first=6, batch=3)
    for shape in ((5,), (2, 3), ()):
        assert torch.equal(whole.normal(*shape)[6:9], part.normal(*shape))
        assert torch.equal(whole.uniform(*shape)[6:9], part.uniform(*shape))


def test_seeds_calls_positions_and_places_all_differ():
    values = [draws(seed=seed, first=first).uniform(50) for seed in range(5) for first in (0, 4)]
    ours = draws()
    values += [ours.uniform(50) for _ in range(4)][1:]
    flat = torch.cat([v.reshape(-1) for v in values])
    assert len(flat.unique()) > 0.999 * len(flat)


def test_moments():
    ours = draws(batch=1000)
    uniform, normal = ours.uniform(1000).double(), ours.normal(1000).double()
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=5e-4)
    assert normal.mean().item() == pytest.approx(0, abs=5e-3)
    assert normal.var().item() == pytest.approx(1, abs=1e-2)
    assert (normal**4).mean().item() == pytest.approx(3 - 0.15, abs=3e-2)
    neighbours = (normal[:, 1:] * normal[:, :-1]).mean(), (normal[1:] * normal[:-1]).mean()
    assert max(abs(n.item()) for n in neighbours) < 5e-3


@pytest.fixture
def batch():
    return torch.ones(400, 5, 8), torch.arange(400.0)


def test_noise_has_its_deviation_in_every_value(batch):
    x, y = Noise(0.25)(*batch, draws(batch=400))
    assert (x - 1).std().item() == pytest.approx(0.25, rel=0.03)
    assert len((x - 1).unique()) > 1000
    assert torch.equal(y, torch.arange(400.0))


def test_scaling_is_one_factor_a_window(batch):
    x, _ = Scaling(0.1)(*batch, draws(batch=400))
    assert (x == x[:, :1, :1]).all()
    assert x[:, 0, 0].std().item() == pytest.approx(0.1, rel=0.15)


def test_dropout_takes_whole_columns_of_a_window(batch):
    x, _ = ColumnDropout(0.25)(*batch, draws(batch=400))
    assert (x == x[:, :1]).all()
    assert set(x.unique().tolist()) == {0.0, 1.0}
    assert (x[:, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    for share, kept in ((0.0, 1.0), (1.0, 0.0)):
        x = torch.ones(9, 2, 3)
        assert (ColumnDropout(share)(x, x, draws(batch=9))[0] == kept).all()


@pytest.mark.parametrize("kind", [Noise, Scaling])
@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_deviation_is_finite_and_not_negative(kind, std):
    with pytest.raises(WindowError, match="expected a finite number, 0 or more, found"):
        kind(std)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_probability(share):
    with pytest.raises(WindowError) as error:
        ColumnDropout(share)
    assert str(error.value) == (
        f"share of columns dropped: expected a probability, 0 to 1, found {share}. "
        "Take 0.1 for a tenth."
    )


# Through the loader


def mirrored(x, y, draws, share=0.5):
    """Someone's own: turns some windows over."""
    flip = draws.uniform() < share
    return torch.where(flip[:, None, None], -x, x), torch.where(flip, -y, y)


@pytest.fixture(scope="module")
def store(new_store):
    return new_store(arrays(40, 30))


def loader(store, feed=Feed(), dtype="float32"):  # noqa: B008 - a value
    steps = (Noise(0.1), named(f"{__name__}:mirrored", share=0.3), ColumnDropout(0.2))
    form = Form(0, dtype=dtype, augment=steps)
    return Loader(store, WindowIndex(store, 4, 3), Shuffled(5), 8, form=form, feed=feed)


def bits(loader, num):
    return [tuple(p.float().clone().numpy().tobytes() for p in b) for b in islice(loader, num)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_depth_and_residence_give_the_same_bits(store, dtype):
    wanted = bits(loader(store, Feed(0), dtype), 20)  # into the third epoch
    assert len(set(wanted)) == 20
    assert bits(loader(store, Feed(3), dtype), 20) == wanted
    assert bits(loader(store, Feed(resident=True), dtype), 20) == wanted
    resumed = loader(store, dtype=dtype)
    resumed.set_state(resumed.state_after(9))
    assert bits(resumed, 11) == wanted[9:]


def test_epochs_differ(store):
    index = WindowIndex(store, 4, 3)
    form = Form(0, augment=(Noise(0.1),))
    ours = Loader(store, index, Shuffled(5), index.num_windows, "short", form)
    (first,), (second,) = list(ours), list(ours)
    by_y = first[1].sort().indices, second[1].sort().indices
    assert torch.equal(first[1][by_y[0]], second[1][by_y[1]])
    assert not torch.equal(first[0][by_y[0]], second[0][by_y[1]])


def test_the_store_is_not_written_to(store):
    before = store.mm.tobytes()
    bits(loader(store), 10)
    bits(loader(store, Feed(resident=True)), 10)
    assert store.mm.tobytes() == before


def shorter(x, y, draws):
    return x[1:], y


def test_an_augmentation_that_changes_the_shape_is_refused(store):
    form = Form(0, augment=(shorter,))
    ours = Loader(store, WindowIndex(store, 4, 3), batch=8, form=form)
    with pytest.raises(WindowError) as error:
        next(iter(ours))
    assert str(error.value) == (
        "augmentation shorter: expected x and y of the shape and dtype they had: "
        "float32 [8, 4, 3] and float32 [8], found float32 [7, 4, 3] and float32 [8]. "
        "Return what was given, changed in its values only."
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "found No module named 'no_such_module'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        ("", "found Empty module name"),
        (f"{__name__}:CPU", "expected a function of x, y and draws, found device"),
    ],
)
def test_a_name_without_a_function_is_refused(name, message):
    with pytest.raises(WindowError) as error:
        named(name)
    assert message in str(error.value)
