"""What a search may try, and by which rules: the schema of its file.

Covers reading and checking it, each setting's range against the configuration that it is laid over,
and the points of a grid. Does not cover choosing among them (`suggest`).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tapeline.config import Positive, RunConfig
from tapeline.configfile import Config, Section
from tapeline.errors import ConfigError
from tapeline.plan.halving import num_rungs
from tapeline.search.schedule import Rules

Number = Annotated[float, Field(allow_inf_nan=False)]
Value = str | int | float | bool
Values = dict[str, Value]
_KINDS = ("choice", "integer", "log", "uniform")
# They decide how long a trial is, where it lies, what its figure is of, or are the search's own.
_KEPT = (
    *("name", "seed", "log_every", "data", "validation", "checkpoint", "stop", "supervision"),
    *("training.steps", "training.objective", "training.dead_zone", "windows.horizon"),
)


class Dimension(Section):
    """The values of one setting: one of four kinds."""

    choice: list[Value] | None = Field(None, description="these, in no order")
    integer: tuple[int, int] | None = Field(None, description="whole numbers, both ends included")
    log: tuple[Number, Number] | None = Field(None, description="numbers, uniform in logarithm")
    uniform: tuple[Number, Number] | None = Field(None, description="numbers")
    points: Annotated[int, Field(ge=2)] | None = Field(
        None, description="how many of them a grid takes, evenly; of a choice it takes all"
    )

    @model_validator(mode="before")
    @classmethod
    def _is_table(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("a table such as { log = [1e-4, 1e-1] }")
        return value

    @field_validator("integer", "log", "uniform", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # files know no tuples

    @model_validator(mode="after")
    def _is_one_range(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"one of {', '.join(_KINDS)}")
        ends = self.integer or self.log or self.uniform
        if ends and not ends[0] < ends[1]:
            raise ValueError("the lower end first, and two different ones")
        if self.log and self.log[0] <= 0:
            raise ValueError("a lower end above 0 for a logarithm")
        if self.choice is not None and not 2 <= len(self.choice) == len(set(self.choice)):
            raise ValueError("two choices or more, each once")
        return self

    def ends(self) -> list[Value]:
        """The outermost values, or all choices."""
        return list(self.choice or self.integer or self.log or self.uniform or ())

    def grid(self) -> list[Value]:
        """The values that a grid takes; `points` is given unless these are choices."""
        if self.choice:
            return list(self.choice)
        assert self.points, "checked with the whole space"
        shares = [number / (self.points - 1) for number in range(self.points)]
        if self.log:
            low, high = map(math.log, self.log)
            inner = [math.exp(low + share * (high - low)) for share in shares[1:-1]]
            return [self.log[0], *inner, self.log[1]]
        if self.integer:
            first, last = self.integer
            return list(dict.fromkeys(round(first + share * (last - first)) for share in shares))
        low, high = self.uniform or (0.0, 1.0)
        return [low + share * (high - low) for share in shares]


class RungsConfig(Section):
    """Successive halving; without this section every trial is a full run."""

    min_steps: Positive = Field(description="the first rung; rungs are eta apart, up to all steps")
    eta: Annotated[int, Field(ge=2, le=100)] = Field(3, description="one in so many goes on")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="steps that nobody is judged within; default: the longest warm-up"
    )
    min_peers: Positive | None = Field(
        None, description="results a rung needs before it cuts; default: eta"
    )


class FinalsConfig(Section):
    """The best trials, trained again with seeds that the search hasn't seen."""

    picks: Annotated[int, Field(ge=0)] = 1
    seeds: Annotated[int, Field(ge=2)] = 3


class SearchConfig(Config):
    """Everything a search is made from."""

    base: str = Field(description="the configuration that trials are laid over, from this file")
    name: str = "search"
    metric: Literal["loss", "validation.loss", "validation.mse", "validation.skill"] = (
        "validation.loss"
    )
    sampler: Literal["grid", "random", "tpe", "gp"] = "random"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    budget_steps: Positive
    workers: Positive = 1
    lease_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = Field(
        60.0, description="a worker that shows no sign of life for so long is dead"
    )
    space: dict[str, Dimension] = Field(min_length=1)
    rungs: RungsConfig | None = None
    finals: FinalsConfig = FinalsConfig()

    @field_validator("space", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        """`training.batch = {…}` is a table in a table in TOML, and one key here."""
        return dict(_flat(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_points(self) -> Self:
        for key, one in self.space.items():
            if self.sampler == "grid" and not (one.choice or one.points):
                raise ValueError(f"`points` for `{key}`, with sampler grid")
        return self

    @classmethod
    def anchor(cls, values: dict[str, Any], folder: Path) -> None:
        """The base's path is from the file's folder."""
        if isinstance(base := values.get("base"), str):
            values["base"] = str((folder / base).absolute())

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """In which the metric is better."""
        return "maximize" if self.metric == "validation.skill" else "minimize"

    def base_config(self) -> RunConfig:
        """The configuration that trials are laid over, checked with the ends of every range.

        Raises:
            ConfigError: it is wrong, a setting can't be searched or doesn't exist, an end of a
                range is no value of it, or there is nothing to judge by.
        """
        base = RunConfig.load(Path(self.base))
        for key, one in self.space.items():
            if any(key == kept or key.startswith(f"{kept}.") for kept in _KEPT):
                raise ConfigError(
                    f"space, key `{key}`",
                    expected="a setting of the model, the windows or the training",
                    found="one that has to be the same in all trials",
                    fix="Leave it out, and set it in the base",
                )
            for value in one.ends():
                RunConfig.load(Path(self.base), [f"{key}={json.dumps(value)}"])
        if self.metric != "loss" and not base.validation.fraction:
            raise ConfigError(
                f"{self.base}, key `validation.fraction`",
                expected=f"a share held out, to judge trials by {self.metric}",
                found="0",
                fix='Set validation.fraction in the base, or metric = "loss"',
            )
        return base

    def rules(self, base: RunConfig) -> Rules:
        """What the schedule goes by.

        Raises:
            ConfigError: the budget holds no full run, or no rung is left between the warm-up and
                a full run.
        """
        full = base.training.steps
        if self.budget_steps < full:
            raise ConfigError(
                "budget_steps",
                expected=f"a full run's {full:,} steps or more",
                found=f"{self.budget_steps:,}",
                fix="Raise the budget, or lower training.steps of the base",
            )
        is_grid = self.sampler == "grid"
        eta = self.rungs.eta if self.rungs else 2
        return Rules(
            self._rungs(base, self.rungs) if self.rungs else (full,),
            eta,
            max(eta, (self.rungs and self.rungs.min_peers) or eta),
            self.budget_steps,
            math.prod(len(one.grid()) for one in self.space.values()) if is_grid else None,
            self.finals.picks,
            self.finals.seeds,
        )

    def _rungs(self, base: RunConfig, halving: RungsConfig) -> tuple[int, ...]:
        full, eta = base.training.steps, halving.eta
        drawn = self.space.get("training.warmup_steps")
        longest = max(int(value) for value in drawn.ends()) if drawn else base.training.warmup_steps
        warmup = longest if halving.warmup_steps is None else halving.warmup_steps
        number = num_rungs(halving.min_steps, full, eta) if halving.min_steps <= full else 0
        below = [halving.min_steps * eta**rung for rung in range(number - 1)]
        kept = [step for step in below if step >= warmup]
        if not kept:
            raise ConfigError(
                "rungs.min_steps",
                expected=f"a rung after the warm-up's {warmup:,} steps and an eta-th of {full:,}",
                found=f"{halving.min_steps:,} with eta {eta}",
                fix="Lower min_steps or eta, train longer, or leave [rungs] out",
            )
        return (*kept, full)


def _flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and not _looks_like_a_range(value):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _looks_like_a_range(table: dict[str, Any]) -> bool:
    """Whether a table is meant as a range, maybe with a typing error, and not as a section."""
    if any(isinstance(one, dict) for one in table.values()):
        return False
    return any(difflib.get_close_matches(key, Dimension.model_fields) for key in table)
