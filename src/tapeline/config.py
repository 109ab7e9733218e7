"""Configuration: a TOML file plus `--set key=value`, checked strictly, frozen, hashed.

Covers the schema of a run and how it is read. Does not build anything: `run.py` does, from the
finished `RunConfig`.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tapeline.errors import ConfigError
from tapeline.files import canonical_json

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class DataConfig(_Section):
    """Where the rows come from, and what is predicted."""

    store: str = Field(description="folder of a store, relative to the configuration file")
    target: str = Field("mid", description="name of the column whose change is predicted")
    normalise: bool = Field(True, description="scale each column by its training rows")


class WindowsConfig(_Section):
    """The shape of an example."""

    length: Positive = Field(20, description="rows in a window (T)")
    horizon: Positive = Field(10, description="rows from the last one to the target's")


class ModelConfig(_Section):
    """What is trained: `factory(num_inputs, **arguments)` returns a torch module."""

    factory: str = "tapeline.training.models:perceptron"
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("factory")
    @classmethod
    def _is_reference(cls, value: str) -> str:
        module, colon, name = value.partition(":")
        if not (module and colon and name):
            raise ValueError("should be a reference such as `package.module:callable`")
        return value

    @field_validator("arguments")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        # The record of a run is JSON: a resumed run must get back the arguments it began with.
        try:
            canonical_json(value)
        except (TypeError, ValueError):
            raise ValueError(
                "should be strings, finite numbers, booleans, lists or tables"
            ) from None
        return value


class TrainingConfig(_Section):
    """How it is trained. `batch` is global: accumulation and ranks divide it, never multiply."""

    steps: Positive = 300
    batch: Positive = Field(256, description="windows per step, over all ranks and micro-batches")
    accumulate: Positive = Field(1, description="micro-batches per step; divides `batch`")
    learning_rate: PositiveFloat = 1e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    clip_norm: PositiveFloat | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: Positive = Field(1, description="threads of torch; other numbers, other bits")
    device: str = "cpu"

    @model_validator(mode="after")
    def _accumulates_evenly(self) -> Self:
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate to divide batch, not {self.accumulate} to divide {self.batch}"
            )
        return self


class ValidationConfig(_Section):
    """What is held out: the last rows in time, with whole windows on one side of the cut."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.2
    every: Positive = Field(100, description="steps between evaluations")


class CheckpointConfig(_Section):
    """When state is saved, and how much of it is kept."""

    every: Positive = Field(100, description="steps between checkpoints; one more at the end")
    keep: Annotated[int, Field(ge=1)] = 3


class RunConfig(_Section):
    """Everything a run is made from."""

    name: str = "run"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log_every: Positive = 10
    data: DataConfig
    windows: WindowsConfig = WindowsConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, value: str) -> str:
        if not value or value.startswith(".") or "/" in value or "\\" in value:
            raise ValueError("should be a name that a folder can have")
        return value

    def resolved(self) -> dict[str, Any]:
        """Every value after defaults and overrides, as JSON and TOML can hold it."""
        return self.model_dump(mode="json")

    def hash(self) -> str:
        """Sha256 over what determines the run's bits.

        Left out: the name, where the data lies (its content has a fingerprint of its own), and
        how often the run is logged, validated and saved.
        """
        decides = self.model_dump(
            mode="json",
            exclude={
                "name": True,
                "log_every": True,
                "checkpoint": True,
                "data": {"store"},
                "validation": {"every"},
            },
        )
        return hashlib.sha256(canonical_json(decides).encode()).hexdigest()

    @classmethod
    def from_mapping(
        cls, values: dict[str, Any], where: str, overrides: Sequence[str] = ()
    ) -> Self:
        """Apply `a.b=value` overrides in order to `values`, and check the result.

        Raises:
            ConfigError: a key is unknown (the nearest is named), missing, or of a wrong value.
        """
        values = copy.deepcopy(values)
        for override in overrides:
            _apply(values, override)
            where += f" with --set {override}"
        data = values.get("data")
        if isinstance(data, dict) and isinstance(store := data.get("store"), str):
            data["store"] = str(Path(store).absolute())  # the record must hold from anywhere
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _explain(error, cls, where) from None

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file, apply `a.b=value` overrides in order, and check the result.

        A relative `data.store` is taken from the file's folder, so a configuration can be used
        from anywhere; one that is overridden is taken from the working folder, like any path
        typed on a command line.

        Raises:
            ConfigError: the file is missing or not TOML, or a key or value is wrong.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "bytes that aren't UTF-8"
            raise ConfigError(
                path,
                expected="a readable TOML file",
                found=reason,
                fix="Give the path of a configuration; `examples/reference.toml` is one",
            ) from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                path, expected="TOML", found=f"{error}", fix="Correct the line it names"
            ) from None
        data = values.get("data")
        if isinstance(data, dict) and isinstance(store := data.get("store"), str):
            data["store"] = str((path.parent / store).resolve())
        return cls.from_mapping(values, str(path), overrides)


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one dotted key; the value is TOML where it parses as TOML, else a plain string."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"--set {override}",
            expected="key=value, such as training.steps=500",
            found="no key or no `=`",
            fix="Write the dotted key, `=` and the value without spaces between",
        )
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if len(parsed) == 1 else text  # a line break could start another key
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(
                f"--set {override}",
                expected="a section before each dot",
                found=f"`{part}` is a value",
                fix="Check the key against the configuration file",
            )
    values[parts[-1]] = value


def _section(model: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    for part in path:
        field = model.model_fields.get(str(part))
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not sections:
            return None
        model = sections[0]
    return model


def _explain(error: ValidationError, schema: type[BaseModel], where: str) -> ConfigError:
    """Pydantic's first complaint, in our shape."""
    first = error.errors(include_url=False)[0]
    path, kind = first["loc"], first["type"]
    key = ".".join(str(part) for part in path)
    if kind == "extra_forbidden":
        section = _section(schema, path[:-1])
        names = list(section.model_fields) if section else []
        nearest = difflib.get_close_matches(str(path[-1]), names, n=1, cutoff=0.4)
        fix = f"Write `{nearest[0]}`, the nearest" if nearest else f"Use one of {', '.join(names)}"
        return ConfigError(
            f"{where}, key `{key}`",
            expected=f"a key of {'.'.join(map(str, path[:-1])) or 'the configuration'}",
            found="one that doesn't exist",
            fix=fix,
        )
    if kind == "missing":
        return ConfigError(
            f"{where}, key `{key}`",
            expected="a value, since it has no default",
            found="none",
            fix=f"Add `{path[-1]}` to the file, or give `--set {key}=…`",
        )
    found = first.get("input")
    shown = "nan" if isinstance(found, float) and math.isnan(found) else repr(found)
    wanted = str(first["msg"]).removeprefix("Value error, ")
    wanted = wanted.removeprefix("Input should be ").removeprefix("should be ")
    if kind == "model_type":
        wanted = "a section"
    elif kind.startswith(("greater_than", "less_than")):
        wanted = f"a number {wanted}"
    return ConfigError(
        f"{where}, key `{key}`",
        expected=wanted,
        found=shown if len(shown) < 60 else f"{shown[:57]}…",
        fix="Put the value in quotes" if kind == "string_type" else "Correct the value",
    )
