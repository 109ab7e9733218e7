"""Configuration: what is refused and in which words, what overrides do, what the hash covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tapeline.config import RunConfig, WatchConfig
from tapeline.errors import ConfigError

DATA = '[data]\nstore = "s"\n'


@pytest.fixture
def load(tmp_path: Path):
    path = tmp_path / "c.toml"

    def load_(text: str = "", *overrides: str) -> RunConfig:
        path.write_text(text + DATA)
        return RunConfig.load(path, overrides)

    return load_


def refused(load, tmp_path: Path, text: str, *overrides: str) -> str:
    """The message, with the file named `C`."""
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value).replace(str(tmp_path / "c.toml"), "C")


def test_a_file_with_nothing_but_data_is_enough(load, tmp_path: Path) -> None:
    config = load()
    assert config.data.store == str(tmp_path / "s")
    assert (config.windows.length, config.windows.horizon) == (20, 10)
    assert (config.training.steps, config.training.learning_rate) == (300, 1e-3)


NAMES = (
    "name, seed, log_every, data, windows, model, training, validation, checkpoint, watch, stop, "
    "supervision"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # misspelt and unknown keys
        (
            "[windows]\nlenght = 3\n",
            "windows.lenght`: expected a key of windows, found one that doesn't exist. "
            "Write `length`, the nearest.",
        ),
        (
            "[window]\nlength = 3\n",
            "window`: expected a key of the configuration, found one that doesn't exist. "
            "Write `windows`, the nearest.",
        ),
        (
            "sede = 3\n",
            "sede`: expected a key of the configuration, found one that doesn't exist. "
            "Write `seed`, the nearest.",
        ),
        (
            "[training]\nlearning_rat = 1.0\n",
            "training.learning_rat`: expected a key of training, found one that doesn't exist. "
            "Write `learning_rate`, the nearest.",
        ),
        (
            "[checkpoint]\nxyz = 3\n",
            "checkpoint.xyz`: expected a key of checkpoint, found one that doesn't exist. "
            "Use one of every, mtbf_hours, keep, keep_every, keep_best, durable, durable_every, "
            "durable_keep, on_failure, grace_s, notice_file.",
        ),
        (
            "[xyz]\nq = 3\n",
            "xyz`: expected a key of the configuration, found one that doesn't exist. "
            f"Use one of {NAMES}.",
        ),
        # wrong types: strict, except that a whole number may stand for a float
        (
            '[training]\nsteps = "3"\n',
            "training.steps`: expected a valid integer, found '3'. Correct the value.",
        ),
        (
            "[training]\nsteps = 3.0\n",
            "training.steps`: expected a valid integer, found 3.0. Correct the value.",
        ),
        (
            "[training]\nsteps = true\n",
            "training.steps`: expected a valid integer, found True. Correct the value.",
        ),
        (
            "[training]\nlearning_rate = true\n",
            "training.learning_rate`: expected a valid number, found True. Correct the value.",
        ),
        (
            '[training]\nlearning_rate = "1e-3"\n',
            "training.learning_rate`: expected a valid number, found '1e-3'. Correct the value.",
        ),
        ("name = 1\n", "name`: expected a valid string, found 1. Put the value in quotes."),
        (
            "training = 5\n",
            "training`: expected a section, found 5. Correct the value.",
        ),
        (
            "[model]\narguments = 3\n",
            "model.arguments`: expected a valid dictionary, found 3. Correct the value.",
        ),
        # values out of range
        (
            "[training]\nbatch = 0\n",
            "training.batch`: expected a number greater than 0, found 0. Correct the value.",
        ),
        (
            "seed = -1\n",
            "seed`: expected a number greater than or equal to 0, found -1. Correct the value.",
        ),
        (
            "seed = 9223372036854775808\n",
            "seed`: expected a number less than 9223372036854775808, "
            "found 9223372036854775808. Correct the value.",
        ),
        (
            "[validation]\nfraction = 1\n",
            "validation.fraction`: expected a number less than 1, found 1. Correct the value.",
        ),
        (
            "[training]\nlearning_rate = 0\n",
            "training.learning_rate`: expected a number greater than 0, found 0. "
            "Correct the value.",
        ),
        (
            '[training]\nprecision = "float64"\n',
            "training.precision`: expected 'float32', 'bfloat16' or 'float16', found 'float64'. "
            "Correct the value.",
        ),
        (
            '[model]\nfactory = "torch.nn.Linear"\n',
            "model.factory`: expected a reference such as `package.module:callable`, "
            "found 'torch.nn.Linear'. Correct the value.",
        ),
        (
            f'[model]\nfactory = "{"x" * 80}"\n',
            "model.factory`: expected a reference such as `package.module:callable`, "
            f"found '{'x' * 56}…. Correct the value.",
        ),
        *(
            (
                f'name = "{name}"\n',
                f"name`: expected a name that a folder can have, found '{name}'. "
                "Correct the value.",
            )
            for name in ("", ".x", "a/b", "..")
        ),
        # what the record of a run, being JSON, can't keep
        *(
            (
                f"[model]\narguments = {{ a = {value} }}\n",
                "model.arguments`: expected strings, finite numbers, booleans, lists or tables, "
                f"found {{'a': {shown}}}. Correct the value.",
            )
            for value, shown in [
                ("nan", "nan"),
                ("[1, inf]", "[1, inf]"),
                ("2015-04-30", "datetime.date(2015, 4, 30)"),
            ]
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(load, tmp_path: Path, text: str, said: str) -> None:
    assert refused(load, tmp_path, text) == f"C, key `{said}"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "key",
    [
        "training.learning_rate",
        "training.weight_decay",
        "training.clip_norm",
        "training.dead_zone",
        "validation.fraction",
        "checkpoint.mtbf_hours",
        "checkpoint.grace_s",
        "supervision.first_steps_s",
    ],
)
def test_no_number_may_be_infinite_or_nan(load, tmp_path: Path, key: str, value: str) -> None:
    section, name = key.split(".")
    assert refused(load, tmp_path, f"[{section}]\n{name} = {value}\n") == (
        f"C, key `{key}`: expected a finite number, found {value}. Correct the value."
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(("key", "pair"), [("looks", "[[7, {}]]"), ("target", "[7, {}]")])
def test_no_loss_to_stop_at_may_be_infinite_or_nan(
    load, tmp_path: Path, key: str, pair: str, value: str
) -> None:
    said = refused(load, tmp_path, f"[stop]\n{key} = {pair.format(value)}\n")
    assert f"expected a finite number, found {value}." in said


def test_every_float_of_the_schema_is_covered_by_that() -> None:
    def floats(model: type[BaseModel], prefix: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            kind: Any = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= floats(kind, f"{prefix}{name}.")
            elif "float" in str(kind) and "Literal" not in str(kind):
                found.add(prefix + name)
        return found

    assert floats(RunConfig) == {
        "training.learning_rate",
        "training.weight_decay",
        "training.clip_norm",
        "training.dead_zone",
        "validation.fraction",
        "checkpoint.mtbf_hours",
        "checkpoint.grace_s",
        "stop.looks",
        "stop.target",
        "supervision.first_steps_s",
    }


def test_a_missing_key_says_how_to_give_it(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[data]\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value) == (
        f"{path}, key `data.store`: expected a value, since it has no default, found none. "
        "Add `store` to the file, or give `--set data.store=…`."
    )


@pytest.mark.parametrize(
    ("content", "expected", "found", "fix"),
    [
        (
            b"name = \n",
            "TOML",
            "Invalid value (at line 1, column 8)",
            "Correct the line it names",
        ),
        (
            b"\xff",
            "a readable TOML file",
            "bytes that aren't UTF-8",
            "Give the path of a configuration; `examples/reference.toml` is one",
        ),
        (
            None,
            "a readable TOML file",
            "No such file or directory",
            "Give the path of a configuration; `examples/reference.toml` is one",
        ),
    ],
)
def test_a_file_that_is_not_toml_is_refused(
    tmp_path: Path, content: bytes | None, expected: str, found: str, fix: str
) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(path)
    assert str(caught.value) == f"{path}: expected {expected}, found {found}. {fix}."


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found Is a directory"):
        RunConfig.load(tmp_path)


def test_a_whole_number_is_a_float_where_one_is_wanted(load) -> None:
    whole, point = (
        load("[training]\nlearning_rate = 1\n"),
        load("[training]\nlearning_rate = 1.0\n"),
    )
    assert type(whole.training.learning_rate) is float
    assert whole == point
    assert whole.hash() == point.hash()


def test_files_are_utf8_whatever_the_locale(load, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    seen = []
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda p, encoding=None: (seen.append(encoding), read_text(p, encoding))[1],
    )
    load()
    assert seen == ["utf-8"]


# --set


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.steps=5", 5),
        ("training.steps = 5", 5),
        ("training.steps=5 # a comment", 5),
        ("training.optimizer=sgd", "sgd"),
        ('training.optimizer="sgd"', "sgd"),
        ("training.clip_norm=1e-1", 0.1),
        ("data.normalise=false", False),
        ("name=2015-04-30b", "2015-04-30b"),
        ("name=a=b", "a=b"),
        ("name='1'", "1"),
        ("model.arguments.hidden=[64, 64]", [64, 64]),
        ("model.arguments.a.b=x", "x"),
    ],
)
def test_an_override_is_toml_where_it_parses_and_else_a_string(load, override, value) -> None:
    found: Any = load("[training]\nsteps = 4\n", override).resolved()
    for part in override.partition("=")[0].strip().split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_win_and_the_file_loses(load) -> None:
    text = "[training]\nsteps = 4\nbatch = 8\n"
    config = load(text, "training.steps=5", "training.steps=6", "seed=1")
    assert (config.training.steps, config.training.batch, config.seed) == (6, 8, 1)


@pytest.mark.parametrize(
    "override", ["training.steps", "=5", "training.=5", ".steps=5", "a..b=5", ""]
)
def test_an_override_without_key_or_value_is_refused(load, tmp_path: Path, override: str) -> None:
    assert refused(load, tmp_path, "", override) == (
        f"--set {override}: expected key=value, such as training.steps=500, "
        "found no key or no `=`. Write the dotted key, `=` and the value without spaces between."
    )


@pytest.mark.parametrize(
    ("override", "part"), [("training.steps.x=3", "steps"), ("seed.a.b=1", "seed")]
)
def test_an_override_into_a_value_is_refused(load, tmp_path: Path, override, part) -> None:
    assert refused(load, tmp_path, "seed = 1\n[training]\nsteps = 4\n", override) == (
        f"--set {override}: expected a section before each dot, found `{part}` is a value. "
        "Check the key against the configuration file."
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.step=3",
            "key `training.step`: expected a key of training, found one that doesn't exist. "
            "Write `steps`, the nearest.",
        ),
        (
            "training.steps=",
            "key `training.steps`: expected a valid integer, found ''. Correct the value.",
        ),
        (
            "name=1",
            "key `name`: expected a valid string, found 1. Put the value in quotes.",
        ),
        (
            "training=5",
            "key `training`: expected a section, found 5. Correct the value.",
        ),
        (
            "seed=5\nname='x'",
            "key `seed`: expected a valid integer, found \"5\\nname='x'\". Correct the value.",
        ),
    ],
)
def test_a_wrong_override_is_named_with_the_file(load, tmp_path, override: str, said: str) -> None:
    assert refused(load, tmp_path, "", override) == f"C with --set {override}, {said}"


def test_a_mapping_is_checked_and_left_as_it_was() -> None:
    values = {"data": {"store": "s"}}
    config = RunConfig.from_mapping(values, "here", ["seed=3", "training.steps=2"])
    assert (config.seed, config.training.steps) == (3, 2)
    assert values == {"data": {"store": "s"}}


# where the store is


def test_a_relative_store_belongs_to_the_file_and_an_overridden_one_to_the_command_line(
    load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load().data.store == str(tmp_path / "s")
    assert load("", "data.store=t").data.store == str(tmp_path / "elsewhere" / "t")
    assert load("", "data.store=/x/t").data.store == "/x/t"
    (tmp_path / "c.toml").rename(tmp_path / "elsewhere" / "c.toml")
    assert RunConfig.load(Path("c.toml")).data.store == str(tmp_path / "elsewhere" / "s")


# the hash


def test_the_hash_is_equal_under_key_order_and_spelled_out_defaults(load) -> None:
    one = load("seed = 1\n[training]\nsteps = 5\nbatch = 8\n")
    two = load(
        "[training]\nbatch = 8\nsteps = 5\naccumulate = 1\nweight_decay = 0\n"
        "[windows]\nlength = 20\nhorizon = 10\n",
        "seed=1",
    )
    assert one.hash() == two.hash()
    assert RunConfig.from_mapping(one.resolved(), "record").hash() == one.hash()


FREE = [
    "data.verify=false",
    "model.folder=elsewhere",
    "data.cache=elsewhere",
    "data.cache_bytes=7",
    "name=other",
    "log_every=7",
    "data.store=elsewhere",
    "validation.every=7",
    "checkpoint.every=7",
    "checkpoint.every=auto",
    "checkpoint.mtbf_hours=7",
    "checkpoint.keep=7",
    "checkpoint.keep_every=7",
    "checkpoint.keep_best=7",
    "checkpoint.durable=elsewhere",
    "checkpoint.durable_every=7",
    "checkpoint.durable_keep=7",
    "checkpoint.on_failure=go_on",
    "checkpoint.grace_s=7",
    "checkpoint.notice_file=elsewhere",
    *(f"watch.{name}=halt" for name in WatchConfig().actions()),
    "watch.rollbacks=7",
    "stop.window=7",
    "stop.patience=7",
    "stop.looks=[[7, 0.1]]",
    "stop.target=[7, 0.1]",
    "stop.after=7",
    "supervision.first_steps_s=7",
]
DECIDING = [
    "data.augment=[{name='noise',arguments={std=0.1}}]",
    "seed=7",
    "data.target=bid",
    "data.normalise=false",
    "windows.length=7",
    "windows.horizon=7",
    "windows.horizon=[5,10]",
    "model.factory=a:b",
    "model.arguments.hidden=7",
    "training.objective=direction",
    "training.dead_zone=0.5 training.objective=direction",
    "training.steps=7",
    "training.batch=7",
    "training.accumulate=8",
    "training.strategy=ddp",
    "training.lanes=8",
    "training.tensor_parallel=2 training.strategy=fsdp2",
    "training.learning_rate=7",
    "training.lr_rescale=sqrt training.base_batch=300",
    "training.base_batch=300 training.lr_rescale=linear",
    "training.optimizer=sgd",
    "training.fused=true",
    "training.weight_decay=7",
    "training.schedule=cosine",
    "training.warmup_steps=7",
    "training.clip_norm=7",
    "training.precision=bfloat16",
    "training.threads=7",
    "training.device=cuda",
    "validation.fraction=0.7",
]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            "training.lanes=3 training.batch=24",
            "lanes to be a power of two, found lanes = 3",
        ),
        ("training.lanes=512", "lanes to divide batch, found lanes = 512, batch = 256"),
        (
            "training.lanes=2 training.accumulate=2",
            "accumulate 1 with lanes, each of which is a micro-batch already, "
            "found accumulate = 2, lanes = 2",
        ),
        (
            "training.lanes=2 training.strategy=ddp",
            "lanes 1 with strategy ddp, which knows none, found lanes = 2, strategy = 'ddp'",
        ),
        (
            "training.tensor_parallel=2",
            "strategy fsdp2 with tensor_parallel, found strategy = 'lanes', tensor_parallel = 2",
        ),
        (
            "training.tensor_parallel=2 training.strategy=fsdp2 training.precision=float16",
            "precision bfloat16 or float32 with tensor_parallel, "
            "found precision = 'float16', tensor_parallel = 2",
        ),
        (
            "training.lr_rescale=sqrt",
            "lr_rescale and base_batch to be given together, found lr_rescale = 'sqrt'",
        ),
        (
            "training.base_batch=8",
            "lr_rescale and base_batch to be given together, "
            "found lr_rescale = 'none', base_batch = 8",
        ),
        (
            "training.base_batch=64 training.lr_rescale=linear",
            "warmup_steps with a rescaled learning rate: it diverges early else, "
            "found warmup_steps = 0",
        ),
    ],
)
def test_ways_to_share_a_batch_that_exclude_each_other_are_refused(load, overrides, wanted) -> None:
    with pytest.raises(ConfigError) as caught:
        load("", *overrides.split())
    assert f", key `training`: expected {wanted}. Correct the section." in str(caught.value)


def test_the_learning_rate_grows_with_the_batch_where_that_is_asked_for(load) -> None:
    def rate(*overrides: str) -> float:
        return load("", "training.warmup_steps=5", *overrides).training.scaled_learning_rate

    assert rate("training.batch=4096") == 1e-3
    grown = ("training.batch=1024", "training.base_batch=256")
    assert rate(*grown, "training.lr_rescale=linear") == 4e-3
    assert rate(*grown, "training.lr_rescale=sqrt") == 2e-3
    shrunk = ("training.batch=64", "training.base_batch=256", "training.warmup_steps=0")
    assert rate(*shrunk, "training.lr_rescale=linear") == 2.5e-4


def test_the_hash_covers_what_decides_the_bits_and_nothing_else(load) -> None:
    plain = load().hash()
    assert {load("", override).hash() for override in FREE} == {plain}
    hashes = [load("", *overrides.split()).hash() for overrides in DECIDING]
    assert len({plain, *hashes}) == len(DECIDING) + 1


def test_every_field_is_either_free_or_deciding(load) -> None:
    def leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
        return set().union(
            *(
                leaves(v, f"{prefix}{k}.") if isinstance(v, dict) and v else {prefix + k}
                for k, v in values.items()
            )
        )

    listed = {override.partition("=")[0] for override in [*FREE, *DECIDING]}
    assert {key.removesuffix(".hidden") for key in listed} == leaves(load().resolved())


@settings(deadline=None, max_examples=40)
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**63 - 1),
            "training": st.fixed_dictionaries(
                {
                    "learning_rate": st.floats(0, 1e30, exclude_min=True),
                    "steps": st.integers(1, 2**40),
                }
            ),
            "model": st.fixed_dictionaries(
                {"arguments": st.dictionaries(st.text(max_size=5), st.integers() | st.text())}
            ),
        }
    )
)
def test_a_resolved_configuration_is_the_same_configuration(values: dict[str, Any]) -> None:
    config = RunConfig.from_mapping({**values, "data": {"store": "/s"}}, "here")
    again = RunConfig.from_mapping(config.resolved(), "record")
    assert again == config
    assert again.hash() == config.hash()


def test_a_configuration_is_frozen(load) -> None:
    config = load()
    for section, name in ((config, "seed"), (config.training, "steps"), (config.data, "store")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 5)


def test_two_configurations_share_nothing_that_can_change(load) -> None:
    load().model.arguments["hidden"] = 3
    assert load().model.arguments == {}


def test_a_store_behind_a_url_stays_a_url_and_the_cache_is_anchored(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[data]\nstore = "s3://bucket/market"\ncache = "cache"\n')
    config = RunConfig.load(path)
    assert config.data.store == "s3://bucket/market"
    assert config.data.cache == str(tmp_path / "cache")
    elsewhere = RunConfig.load(path, ["data.cache=/other", "data.cache_bytes=10"])
    assert elsewhere.hash() == config.hash()
