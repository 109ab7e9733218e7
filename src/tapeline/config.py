"""What a run is configured by: the schema, its defaults, and the hash of what decides the bits.

Does not cover how a file is read (`configfile.py`), and builds nothing: `run.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tapeline.configfile import Config, Section
from tapeline.files import canonical_json, sha256_json

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
    horizon: int | list[int] = Field(
        10, description="rows from the last one to the target's; several give several targets"
    )

    @field_validator("horizon", mode="before")
    @classmethod
    def _rises(cls, value: Any) -> Any:
        several = value if isinstance(value, list) else [value]
        is_whole = all(type(one) is int and one > 0 for one in several)
        if not several or not is_whole or sorted(set(several)) != several:
            raise ValueError("should be a whole number above 0, or a list of them that rises")
        return value

    @property
    def horizons(self) -> int | tuple[int, ...]:
        """One number, or several: a list of one is that one."""
        several = self.horizon
        if isinstance(several, int):
            return several
        return several[0] if len(several) == 1 else tuple(several)


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

    objective: Literal["change", "direction"] = Field(
        "change", description="the target itself, or one of three classes: down, flat, up"
    )
    dead_zone: Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)] = Field(
        0.0, description="for direction: what is still flat, either way, in the target's units"
    )
    steps: Positive = 300
    batch: Annotated[int, Field(gt=0, le=2**24)] = 256  # over all ranks, lanes and micro-batches
    accumulate: Positive = Field(1, description="micro-batches per step; divides `batch`")
    strategy: Literal["lanes", "ddp", "fsdp2"] = Field(
        "lanes", description="how ranks share the work; lanes are exact at any number of ranks"
    )
    lanes: Positive = Field(
        1,
        description="shares of the batch, a power of two: the most ranks; other lanes, other bits",
    )
    tensor_parallel: Positive = Field(1, description="ranks that fsdp2 cuts each layer over")
    learning_rate: PositiveFloat = 1e-3
    lr_rescale: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how learning_rate, chosen for base_batch, grows with `batch`"
    )
    base_batch: Positive | None = None
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    fused: bool = Field(False, description="torch's fused optimizer: faster, and other bits")
    weight_decay: Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    clip_norm: PositiveFloat | None = None
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the forward pass; weights, gradients and loss stay float32"
    )
    threads: Annotated[int, Field(gt=0, le=1024)] = 1  # of torch; other numbers, other bits
    device: str = Field("cpu", description="as torch names it; on several ranks without a number")

    @property
    def scaled_learning_rate(self) -> float:
        """The learning rate for this batch.

        Linear after Goyal et al. 2017 (for SGD), square root after Krizhevsky 2014 and Malladi
        et al. 2022 (for Adam): the variance of the update then stays what it was.
        """
        factor = self.batch / (self.base_batch or self.batch)
        powers = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
        return float(self.learning_rate * factor ** powers[self.lr_rescale])

    @model_validator(mode="after")
    def _divides_evenly(self) -> Self:
        for name, parts in (("accumulate", self.accumulate), ("lanes", self.lanes)):
            if self.batch % parts:
                raise ValueError(f"{name} to divide batch")
        if self.lanes & (self.lanes - 1):
            raise ValueError("lanes to be a power of two")
        if self.lanes > 1 and self.accumulate > 1:
            raise ValueError("accumulate 1 with lanes, each of which is a micro-batch already")
        return self

    @model_validator(mode="after")
    def _has_a_dead_zone_between_classes(self) -> Self:
        if self.dead_zone and self.objective != "direction":
            raise ValueError("objective direction with dead_zone")
        return self

    @model_validator(mode="after")
    def _shares_the_work_in_one_way(self) -> Self:
        if self.lanes > 1 and self.strategy != "lanes":
            raise ValueError(f"lanes 1 with strategy {self.strategy}, which knows none")
        if self.tensor_parallel > 1 and self.strategy != "fsdp2":
            raise ValueError("strategy fsdp2 with tensor_parallel")
        if self.tensor_parallel > 1 and self.precision == "float16":
            raise ValueError("precision bfloat16 or float32 with tensor_parallel")
        return self

    @model_validator(mode="after")
    def _rescales_from_a_base(self) -> Self:
        if (self.lr_rescale == "none") != (self.base_batch is None):
            raise ValueError("lr_rescale and base_batch to be given together")
        if self.base_batch and self.batch > self.base_batch and not self.warmup_steps:
            raise ValueError("warmup_steps with a rescaled learning rate: it diverges early else")
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
        0, description="so many with the least validation loss stay; each evaluation is then saved"
    )
    durable: str | None = Field(None, description="folder or URL for copies, of this run alone")
    durable_every: Positive = Field(1000, description="steps between copies; one more at the end")
    durable_keep: Positive | None = Field(
        None, description="how many of the newest copies stay, beside the best; default: all"
    )
    on_failure: Literal["stop", "go_on"] = Field(
        "stop", description="after a save that failed; the last of a life always has to succeed"
    )
    grace_s: PositiveFloat = Field(30.0, description="from a notice to stop to the kill")
    notice_file: str | None = Field(None, description="the run stops once this file exists")


Tell = Literal["log", "halt"]
TellOrMend = Literal["log", "halt", "rollback"]


class WatchConfig(Section):
    """What becomes of a watcher's finding: it is logged, halts the run, or is rolled back.

    A rollback goes to the last checkpoint before what was seen, and passes over the batches that
    showed it. A loss that isn't finite ends the run, unless it is rolled back.
    """

    non_finite: TellOrMend = "log"
    loss_spike: TellOrMend = "log"
    gradient_spike: TellOrMend = "log"
    gradient_collapse: TellOrMend = "log"
    flat: Tell = "log"
    resume_spike: Tell = "log"
    off_schedule: Tell = "log"
    throughput: Tell = "log"
    memory_growth: Tell = "log"
    utilisation_sawtooth: Tell = "log"
    rollbacks: Positive = Field(3, description="the most in a run; the next finding halts it")

    def actions(self) -> dict[str, str]:
        """By watcher."""
        return self.model_dump(exclude={"rollbacks"})


FiniteLook = tuple[Positive, Annotated[float, Field(allow_inf_nan=False)]]


class StopConfig(Section):
    """What ends a run early, as `tapeline plan stop` prints it; pairs are a step and a loss."""

    window: Positive = Field(50, description="steps whose losses are averaged for a look")
    patience: Positive = Field(2, description="looks in a row above the band that stop the run")
    looks: list[FiniteLook] = Field(default_factory=list, description="the band, by step")
    target: FiniteLook | None = Field(None, description="a loss to reach by a step, or stop")
    after: Annotated[int, Field(ge=0)] = Field(
        0, description="the step that this life ends after, saved, to go on later; 0: the last one"
    )

    @field_validator("looks", "target", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        # Files hold lists, which a strict schema doesn't take for tuples.
        if not isinstance(value, list):
            return value
        if value and not isinstance(value[0], list):
            return tuple(value)
        return [tuple(pair) if isinstance(pair, list) else pair for pair in value]


class SupervisionConfig(Section):
    """What a supervisor goes by until it has learned from the run itself."""

    first_steps_s: PositiveFloat = Field(
        300.0, description="seconds without progress in one of the first steps that are a hang"
    )


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
    watch: WatchConfig = WatchConfig()
    stop: StopConfig = StopConfig()
    supervision: SupervisionConfig = SupervisionConfig()

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

        Left out: the name, where the data lies (its content has a fingerprint of its own), how
        often the run is logged, validated and saved, when it is stopped early or taken for hung,
        and what watchers do: which batches were passed over is a journal of its own, and the
        position is in every checkpoint.
        """
        # Left out where they are the default: those hashes are older than the choice.
        unchosen = set() if self.training.fused else {"fused"}
        if self.training.objective != "direction":
            unchosen |= {"objective", "dead_zone"}
        decides = self.model_dump(
            mode="json",
            exclude={
                "name": True,
                "log_every": True,
                "checkpoint": True,
                "watch": True,
                "stop": True,
                "supervision": True,
                "data": {"store", "cache", "cache_bytes", "verify"},
                "model": {"folder"},
                "training": unchosen,
                "validation": {"every"},
            },
        )
        return sha256_json(decides)

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
