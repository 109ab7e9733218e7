"""What a run is configured by: the schema, its defaults, and the hash of what decides the bits.

Does not cover how a file is read (`configfile.py`), and builds nothing: `run.py` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tapeline.configfile import Config, Section
from tapeline.files import canonical_json

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False)]  # within float32


class AugmentConfig(Section):
    """One way to vary the training batches; validation sees the data as it is."""

    name: str = Field(description="noise, scaling, column_dropout or `package.module:function`")
    arguments: dict[str, Any] = Field(default_factory=dict)


class DataConfig(Section):
    """Where the rows come from, and what is predicted."""

    store: str = Field(description="folder of a store, relative to the file, or a URL")
    cache: str | None = Field(None, description="folder into which a remote store is decoded")
    cache_bytes: Positive | None = Field(None, description="the most that the cache may hold")
    verify: bool = Field(True, description="compare all bytes with their hashes before a resume")
    target: str = Field("mid", description="name of the column whose change is predicted")
    normalise: bool = Field(True, description="scale each column by its training rows")
    augment: list[AugmentConfig] = Field(default_factory=list)


class WindowsConfig(Section):
    """The shape of an example."""

    length: Positive = Field(20, description="rows in a window (T)")
    horizon: Positive = Field(10, description="rows from the last one to the target's")


class ModelConfig(Section):
    """What is trained: `factory(num_inputs, **arguments)` returns a torch module."""

    factory: str = "tapeline.training.models:perceptron"
    folder: str | None = Field(None, description="where its module lies; the file's folder")
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


class TrainingConfig(Section):
    """How it is trained. `batch` is global: accumulation and ranks divide it, never multiply."""

    steps: Positive = 300
    batch: Annotated[int, Field(gt=0, le=2**24)] = 256  # over all ranks and micro-batches
    accumulate: Positive = Field(1, description="micro-batches per step; divides `batch`")
    learning_rate: PositiveFloat = 1e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    clip_norm: PositiveFloat | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: Annotated[int, Field(gt=0, le=1024)] = 1  # of torch; other numbers, other bits
    device: str = "cpu"

    @model_validator(mode="after")
    def _accumulates_evenly(self) -> Self:
        if self.batch % self.accumulate:
            raise ValueError(
                f"accumulate to divide batch, not {self.accumulate} to divide {self.batch}"
            )
        return self


class ValidationConfig(Section):
    """What is held out: the last rows in time, with whole windows on one side of the cut."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = 0.2
    every: Positive = Field(100, description="steps between evaluations")


class CheckpointConfig(Section):
    """When state is saved, how much of it is kept and where; nothing here changes a bit of it."""

    every: Positive | Literal["auto"] = Field(
        100,
        description="steps between checkpoints, or auto: by measured costs; one more at the end",
    )
    mtbf_hours: PositiveFloat | None = Field(
        None, description="mean time between failures, for auto; default: from the run's own lives"
    )
    keep: Positive = Field(3, description="how many of the newest stay")
    keep_every: Positive | None = Field(None, description="the first of each so many steps stays")
    keep_best: Annotated[int, Field(ge=0)] = Field(
        0, description="so many with the least validation mse stay; each evaluation is then saved"
    )
    durable: str | None = Field(None, description="folder or URL for copies, of this run alone")
    durable_every: Positive = Field(1000, description="steps between copies; one more at the end")
    grace_s: PositiveFloat = Field(30.0, description="from a notice to stop to the kill")
    notice_file: str | None = Field(None, description="the run stops once this file exists")


class RunConfig(Config):
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
                "data": {"store", "cache", "cache_bytes", "verify"},
                "model": {"folder"},
                "validation": {"every"},
            },
        )
        return hashlib.sha256(canonical_json(decides).encode()).hexdigest()

    @classmethod
    def anchor(cls, values: dict[str, Any], folder: Path) -> None:
        """Take relative paths from `folder`: the record must hold from anywhere.

        In a file that is the file's folder; in an override the working folder, like any path
        typed on a command line.
        """
        data = values.get("data")
        for key in ("store", "cache"):
            if isinstance(data, dict) and isinstance(path := data.get(key), str):
                data[key] = path if "://" in path else str((folder / path).absolute())
        saving = values.get("checkpoint")
        for key in ("durable", "notice_file"):
            if isinstance(saving, dict) and isinstance(path := saving.get(key), str):
                saving[key] = path if "://" in path else str((folder / path).absolute())
        model = values.setdefault("model", {})
        if isinstance(model, dict) and isinstance(model.setdefault("folder", "."), str):
            model["folder"] = str((folder / model["folder"]).absolute())
