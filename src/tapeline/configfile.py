"""How a configuration is read: TOML and `--set key=value`, checked strictly, every error told.

Covers the machinery; what may be configured stands in `config.py` and beside what it configures.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tapeline.errors import ConfigError


class Section(BaseModel):
    """A part of a configuration: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Config(Section):
    """A whole configuration."""

    @classmethod
    def anchor(cls, values: dict[str, Any], folder: Path) -> None:
        """Make relative paths among `values` relative to `folder`; here there are none."""

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
        cls.anchor(values, Path.cwd())
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _explain(error, cls, where) from None

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file, apply `a.b=value` overrides in order, and check the result.

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
        cls.anchor(values, path.parent)
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
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(str(part))
        if field is not None and get_origin(field.annotation) in (dict, list):
            next(parts, None)  # a key of the user's own, or a place in a list
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        sections = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not sections:
            return None
        model = sections[0]
    return model


def _named(section: type[BaseModel], wanted: str, given: dict[str, Any]) -> str:
    """The values of the keys that a complaint about several names; of all that are given, else."""
    defaults = {name: field.get_default() for name, field in section.model_fields.items()}
    names = [name for name in dict.fromkeys(re.findall(r"[\w-]+", wanted)) if name in defaults]
    values = {name: given.get(name, defaults[name]) for name in names} or given
    told = [f"{name} = {value!r}" for name, value in values.items() if value is not None]
    return ", ".join(told) or "none"


def _wanted(error: ErrorDetails) -> str:
    """What pydantic says should be there."""
    wanted = error["msg"].removeprefix("Value error, ")
    wanted = wanted.removeprefix("Input should be ").removeprefix("should be ")
    if error["type"] == "model_type":
        return "a section"
    if error["type"] == "too_short":
        return f"{error['ctx']['min_length']} or more"
    if error["type"] == "too_long":
        return f"{error['ctx']['max_length']} at most"
    return f"a number {wanted}" if error["type"].startswith(("greater_", "less_")) else wanted


def _explain(error: ValidationError, schema: type[BaseModel], where: str) -> ConfigError:
    """Pydantic's first complaint, in our shape."""
    errors = error.errors(include_url=False)
    first = errors[0]
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
    wanted = _wanted(first)
    if path and isinstance(path[-1], str) and _section(schema, path[:-1]) is None:
        path = path[:-1]  # what follows is no key, but the kind of value that was tried
        key = ".".join(map(str, path))
        wanted = " or ".join(_wanted(one) for one in errors if one["loc"][:-1] == path)
    found = first.get("input")
    shown = "nan" if isinstance(found, float) and math.isnan(found) else repr(found)
    fix = "Put the value in quotes" if kind == "string_type" else "Correct the value"
    together = _section(schema, path) if kind == "value_error" and isinstance(found, dict) else None
    if together:
        shown, fix = _named(together, wanted, found), "Correct the section"
    return ConfigError(
        f"{where}, key `{key}`" if key else where,
        expected=wanted,
        found=shown if len(shown) < 60 else f"{shown[:57]}…",
        fix=fix,
    )
