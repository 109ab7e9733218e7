"""What may be searched: the file, its mistakes, rungs after the warm-up, grids and suggestions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapeline.errors import ConfigError
from tapeline.search.space import SearchConfig
from tapeline.search.suggest import Trial, suggest

BASE = """
[data]
store = "nowhere"
[training]
steps = 900
warmup_steps = 50
"""
HEAD = 'base = "base.toml"\nbudget_steps = 9000\n'
RATE = "[space]\ntraining.learning_rate = { log = [1e-4, 1e-1] }\n"


def load(tmp_path, text, base=BASE):
    (tmp_path / "base.toml").write_text(base)
    (tmp_path / "space.toml").write_text(text)
    config = SearchConfig.load(tmp_path / "space.toml")
    return config, config.rules(config.base_config())


def refused(tmp_path, text, base=BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, base)
    return str(caught.value).replace(str(tmp_path), "…")


def test_a_nested_table_and_a_quoted_key_are_one_setting(tmp_path):
    nested, _ = load(tmp_path, HEAD + RATE)
    quoted, _ = load(
        tmp_path, HEAD + '[space]\n"training.learning_rate" = { log = [1e-4, 1e-1] }\n'
    )
    assert nested.space == quoted.space
    assert list(nested.space) == ["training.learning_rate"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[space]\ntraining.learning_rat = { log = [1e-4, 1e-1] }\n",
            "…/base.toml with --set training.learning_rat=0.0001, key `training.learning_rat`: "
            "expected a key of training, found one that doesn't exist. "
            "Write `learning_rate`, the nearest.",
        ),
        (
            "[space]\ntraining.steps = { integer = [10, 20] }\n",
            "space, key `training.steps`: expected a setting of the model, the windows or the "
            "training, found one that has to be the same in all trials. Leave it out, and set "
            "it in the base.",
        ),
        (
            "[space]\nwindows.horizon = { integer = [10, 20] }\n",
            "space, key `windows.horizon`: expected a setting of the model, the windows or the "
            "training, found one that has to be the same in all trials. Leave it out, and set "
            "it in the base.",
        ),
        (
            'metric = "validation.mes"\n' + RATE,
            "…/space.toml, key `metric`: expected 'loss', 'validation.loss', 'validation.mse' or "
            "'validation.skill', found 'validation.mes'. Correct the value.",
        ),
        (
            "[space]\n",
            "…/space.toml, key `space`: expected 1 or more, found {}. Correct the value.",
        ),
        (
            "[space]\ntraining.batch = [1, 20]\n",
            "…/space.toml, key `space.training.batch`: expected a table such as { log = [1e-4, "
            "1e-1] }, found [1, 20]. Correct the value.",
        ),
        (
            "[space]\ntraining.batch = { integer = [1, 20, 30] }\n",
            "…/space.toml, key `space.training.batch.integer`: expected 2 at most, found (1, 20, "
            "30). Correct the value.",
        ),
        (
            '[space]\ntraining.optimizer = { choice = ["adam", "adam"] }\n',
            "…/space.toml, key `space.training.optimizer`: expected two choices or more, each "
            "once, found choice = ['adam', 'adam']. Correct the section.",
        ),
        (
            "[space]\ntraining.batch = { integer = [0, 20] }\n",
            "…/base.toml with --set training.batch=0, key `training.batch`: expected a number "
            "greater than 0, found 0. Correct the value.",
        ),
        (
            "[space]\ntraining.batch = { integr = [1, 20] }\n",
            "…/space.toml, key `space.training.batch.integr`: expected a key of "
            "space.training.batch, found one that doesn't exist. Write `integer`, the nearest.",
        ),
        (
            "[space]\ntraining.batch = { integer = [1, 20], log = [1, 2] }\n",
            "…/space.toml, key `space.training.batch`: expected one of choice, integer, log, "
            "uniform, found integer = [1, 20], log = [1, 2]. Correct the section.",
        ),
        (
            "[space]\ntraining.learning_rate = { log = [0, 1e-1] }\n",
            "…/space.toml, key `space.training.learning_rate`: expected a lower end above 0 for a "
            "logarithm, found log = [0, 0.1]. Correct the section.",
        ),
        (
            RATE + "[rungs]\nmin_steps = 10\neta = 100\n",
            "rungs.min_steps: expected a rung after the warm-up's 50 steps and an eta-th of 900, "
            "found 10 with eta 100. Lower min_steps or eta, train longer, or leave [rungs] out.",
        ),
    ],
)
def test_what_is_wrong_with_a_space_is_said(tmp_path, text, told):
    assert refused(tmp_path, HEAD + text) == told


def test_a_grid_wants_points(tmp_path):
    assert refused(tmp_path, HEAD + 'sampler = "grid"\n' + RATE) == (
        "…/space.toml: expected `points` for `training.learning_rate`, with sampler grid, found "
        "sampler = 'grid'. Correct the section."
    )


def test_a_budget_of_less_than_a_full_run_is_refused(tmp_path):
    text = HEAD.replace("9000", "899") + RATE
    assert refused(tmp_path, text) == (
        "budget_steps: expected a full run's 900 steps or more, found 899. Raise the budget, or "
        "lower training.steps of the base."
    )


def test_without_a_split_there_is_nothing_to_judge_by(tmp_path):
    assert refused(tmp_path, HEAD + RATE, BASE + "[validation]\nfraction = 0.0\n") == (
        "…/base.toml, key `validation.fraction`: expected a share held out, to judge trials by "
        'validation.loss, found 0. Set validation.fraction in the base, or metric = "loss".'
    )


@pytest.mark.parametrize(
    ("rungs", "wanted"),
    [
        ("", (900,)),
        ("[rungs]\nmin_steps = 100\n", (100, 300, 900)),
        ("[rungs]\nmin_steps = 90\n", (90, 270, 900)),
        ("[rungs]\nmin_steps = 20\n", (60, 180, 900)),  # 20 is within the warm-up of 50
        ("[rungs]\nmin_steps = 20\nwarmup_steps = 0\n", (20, 60, 180, 900)),
        ("[rungs]\nmin_steps = 1\neta = 2\n", (64, 128, 256, 900)),
    ],
)
def test_rungs_are_absolute_and_nobody_is_cut_within_the_warm_up(tmp_path, rungs, wanted):
    _, rules = load(tmp_path, HEAD + RATE + rungs)
    assert rules.rungs == wanted


def test_the_longest_warm_up_that_can_be_drawn_counts(tmp_path):
    text = HEAD + "[space]\ntraining.warmup_steps = { integer = [0, 100] }\n"
    _, rules = load(tmp_path, text + "[rungs]\nmin_steps = 20\n")
    assert rules.rungs == (180, 900)


def grid_config(seed, *points):
    space = {
        f"model.arguments.a{n}": {"uniform": [0, 1], "points": p} for n, p in enumerate(points)
    }
    values = {"base": "/b", "budget_steps": 1, "sampler": "grid", "seed": seed, "space": space}
    return SearchConfig.from_mapping(values, "test")


@given(st.integers(0, 9), st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_a_grid_has_each_point_once(seed, points):
    config = grid_config(seed, *points)
    found = [tuple(suggest(config, [], n, 1).values()) for n in range(math.prod(points))]
    assert len(set(found)) == math.prod(points)


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp"])
def test_a_suggestion_is_a_function_of_what_is_known_and_its_number(tmp_path, sampler):
    text = HEAD + f'sampler = "{sampler}"\n' + RATE
    text += 'training.optimizer = { choice = ["adam", "sgd"] }\n'
    text += "training.batch = { integer = [1, 64] }\n"
    config, _ = load(tmp_path, text)
    known = [
        Trial(number, suggest(config, [], number, 900), {900: number % 5 * 1.0})
        for number in range(12)
    ]
    known[3].results = {90: math.nan}
    known[4].results = {}
    found = suggest(config, known, 12, 900)
    assert found == suggest(config, known, 12, 900)
    assert found != suggest(config, known, 13, 900)
    assert 1e-4 <= found["training.learning_rate"] <= 1e-1
    better = [Trial(one.number, one.values, {900: -one.results.get(900, 0.0)}) for one in known]
    learns = sampler != "random"
    assert (suggest(config, better, 12, 900) != found) == learns
