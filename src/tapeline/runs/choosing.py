"""Choosing among runs: conditions, sorting, and the last good run that is like another one."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapeline.errors import ConfigError

Summary = dict[str, Any]

_CONDITION = re.compile(r"\s*([\w.\[\]-]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*")
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# What two runs must share for their metrics to be comparable.
_LIKE = (
    *("config.model.factory", "config.data.target", "config.windows"),
    *("config.training.objective", "config.training.dead_zone"),
)
GOOD = "validation.skill>0"
# What validated runs have; a folder may hold none of them yet.
_FIGURES = frozenset(
    f"validation.{one}"
    for one in (
        *("windows", "loss", "skill", "mse", "mse_zero", "cross_entropy"),
        *("cross_entropy_frequencies", "accuracy", "balanced_accuracy"),
    )
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on a run.

    Attributes:
        key: dotted, into the run's summary or its configuration.
        relation: one of = != < <= > >= and ~ for "contains".
        value: to compare with: a number, a truth value, or text.
    """

    key: str
    relation: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `key=value`, such as `training.batch>=256`.

        Raises:
            ConfigError: it isn't one.
        """
        match = _CONDITION.fullmatch(text)
        if not match:
            raise ConfigError(
                f"condition {text!r}",
                expected="key, relation and value, such as training.batch>=256",
                found="something else",
                fix="Use one of = != < <= > >= or ~ (contains)",
            )
        return cls(match[1], match[2].replace("==", "="), _value(match[3]))

    def holds(self, run: Summary) -> bool:
        """Whether it holds; of what isn't known, nothing does."""
        found = look_up(run, self.key)
        if found is None:
            return False
        if self.relation == "~":
            return str(self.value).lower() in str(found).lower()
        if self.relation in ("=", "!="):
            text = str(found).lower() == str(self.value).lower()  # a name may look like a number
            return (found == self.value or text) == (self.relation == "=")
        comparable = isinstance(found, str) == isinstance(self.value, str)
        return comparable and _ORDERS[self.relation](found, self.value)


def look_up(run: Summary, key: str) -> Any:
    """A value of a summary or, where it has none of that name, of the configuration in it."""
    for names in (key.split("."), ["config", *key.split(".")]):
        found: Any = run
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            return found
    return None


def check_keys(runs: Sequence[Summary], keys: Sequence[str]) -> None:
    """Refuse a key that nothing is known by.

    Raises:
        ConfigError: none of the runs has it.
    """
    whole = [run for run in runs if not run.get("problem")]
    for key in keys:
        if not whole or key in _FIGURES or any(key in _names(run) for run in whole):
            continue
        nearest = difflib.get_close_matches(key, _names(whole[0]), n=1)
        raise ConfigError(
            f"key `{key}`",
            expected="one that runs are known by",
            found="one that none of them has",
            fix=f"Write `{nearest[0]}`, the nearest" if nearest else "See `tapeline runs show RUN`",
        )


def _names(run: Summary, above: str = "") -> Iterator[str]:
    """Every key of a summary, and of the configuration in it as if it were the summary's."""
    for name, value in run.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from _names(value, f"{above}{name}.")
            if name == "config" and not above:
                yield from _names(value)


def chosen(
    runs: Sequence[Summary], where: Sequence[str] = (), sort: str = "-created"
) -> list[Summary]:
    """The runs that meet every condition, sorted.

    Args:
        where: conditions, see `Condition.parse`.
        sort: a key, from small to large; with `-` before it from large to small. Runs that lack it,
            or have no number there, come last.

    Raises:
        ConfigError: a condition is none, or no run has a key.
    """
    conditions = [Condition.parse(text) for text in where]
    descends, key = sort.startswith("-"), sort.removeprefix("-")
    check_keys(runs, [*(one.key for one in conditions), key])
    found = [run for run in runs if all(one.holds(run) for one in conditions)]
    known: list[tuple[Any, Summary]] = []
    unknown: list[Summary] = []
    for run in found:
        value = look_up(run, key)
        # A figure that is no number is neither small nor large.
        if isinstance(value, int | float | str) and value not in ("nan", "inf", "-inf"):
            known.append(((isinstance(value, str), value), run))
        else:
            unknown.append(run)
    known.sort(key=lambda one: one[0], reverse=descends)
    return [run for _, run in known] + unknown


def like_it(
    one: Summary, runs: Sequence[Summary], target: str | None = None, same: Sequence[str] = ()
) -> list[Summary]:
    """Other runs like one, the last first: of the same model factory, target column and windows.

    Args:
        one: what they are to be like.
        target: a condition; given, only finished runs that meet it count. `GOOD` is one.
        same: further keys that must have the same value.

    Raises:
        ConfigError: the target is no condition, or no run has a key.
    """
    met = Condition.parse(target) if target else None
    check_keys([one, *runs], [*same, *([met.key] if met else [])])
    keys = (*_LIKE, *same)
    found = [
        run
        for run in runs
        if run["path"] != one["path"]
        and not run["problem"]
        and (met is None or (run.get("how") == "finished" and met.holds(run)))
        and all(look_up(run, key) == look_up(one, key) for key in keys)
    ]
    return sorted(found, key=lambda run: str(run["created"]), reverse=True)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")
