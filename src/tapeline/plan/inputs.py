"""What a plan is derived from: numbers, each with its unit, its range and where it is from.

Covers: declaring a number once, taking it from what was given, what was measured on a run, or a
stated default, and refusing what is out of range in the name under which it was asked for. Does
not cover measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tapeline.errors import TapelineError

# Wide enough for seconds, bytes and prices alike, and narrow enough that no product of a few of
# them leaves the range of a float.
LEAST, MOST = 1e-12, 1e18


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that a plan asks for.

    Attributes:
        name: the field's name with its unit, such as `mtbf_hours`; the option is `--mtbf-hours`.
        help: what it is, one clause.
        default: taken where it is neither given nor measured; None if it must be one of the two.
        positive: whether 0 is refused.
        whole: whether it counts something.
        least, most: the ends of its range, where it has other ones; 1 is the most of a share.
    """

    name: str
    help: str
    default: float | None = None
    positive: bool = True
    whole: bool = False
    least: float = LEAST
    most: float = MOST

    @property
    def option(self) -> str:
        """The name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def checked(self, number: float, where: str) -> float:
        """The number, if it is in range.

        Raises:
            TapelineError: it is not; told in the user's words.
        """
        zero = number == 0 and not self.positive
        in_range = zero or self.least <= number <= self.most
        if math.isfinite(number) and in_range and not (self.whole and number % 1):
            return number
        kind = "a whole number" if self.whole else "a number"
        low = "above 0" if self.positive else "0 or more"
        if self.least != LEAST:
            low = f"{self.least:g} or more"
        elif 0 < number < LEAST and not self.whole:
            low = f"{LEAST:g} or more" if self.positive else f"0, or {LEAST:g} or more"
        finite = self.most == MOST and not MOST < number < math.inf
        raise TapelineError(
            where,
            expected=f"{kind} {low}" + (" and finite" if finite else f", {self.most:g} at most"),
            found=f"{number:.9g}",
            fix=f"Correct it: {self.help[0].lower()}{self.help[1:]}",
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run recorded, or a document prints, by the names of the quantities.

    Attributes:
        run: the run's folder, as it was given, or what the document is about.
        numbers: each with how it was measured, such as "median of the last saves".
        missing: why a number that a run can have is not there, such as "no save was timed".
        source: "measured", or "printed" by a data sheet.
        stated: names of the numbers that somebody told the run; their source is "stated".
    """

    run: str
    numbers: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    source: str = "measured"
    stated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Value:
    """A number that a plan was derived from, with where it is from."""

    name: str
    number: float
    source: str
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"value": self.number, "source": self.source, "detail": self.detail}


class Inputs:
    """The numbers of one plan. What was taken stays, in order, to be shown beside the result.

    Args:
        sources: a run or a document, each if one was named, the first before the others. What is
            given goes before all.
    """

    def __init__(self, *sources: Measured | None) -> None:
        self._sources = [source for source in sources if source]
        self.values: dict[str, Value] = {}

    def knows(self, quantity: Quantity) -> bool:
        """Whether a source has the number."""
        return any(quantity.name in source.numbers for source in self._sources)

    def take(self, quantity: Quantity, given: float | None = None) -> float:
        """The number: as given, else as measured, else the default.

        Raises:
            TapelineError: it is out of range, or there is none of the three.
        """
        number, source, detail = self._found(quantity, given)
        where = quantity.option if source in ("given", "default") else f"{detail}: {quantity.name}"
        number = float(quantity.checked(number, where))
        self.values[quantity.name] = Value(quantity.name, number, source, detail)
        return number

    def count(self, quantity: Quantity, given: int | None = None) -> int:
        """As `take`, of a whole number."""
        assert quantity.whole, "a count is declared as one"
        return int(self.take(quantity, given))

    def _found(self, quantity: Quantity, given: float | None) -> tuple[float, str, str]:
        if given is not None:
            return given, "given", ""
        detail = ""
        for known in self._sources:
            if quantity.name in known.numbers:
                number, how = known.numbers[quantity.name]
                source = "stated" if quantity.name in known.stated else known.source
                return number, source, f"{known.run}, {how}"
            if quantity.name in known.missing:
                detail = f"{known.run}: {known.missing[quantity.name]}"
        if quantity.default is None:
            raise TapelineError(
                quantity.option,
                expected="a number",
                found=f"none ({detail})" if detail else "none",
                fix=f"Give it: {quantity.help[0].lower()}{quantity.help[1:]}",
            )
        return quantity.default, "default", detail
