"""Numbers as sentences say them: in one spelling everywhere. Tables are `report`'s."""

from __future__ import annotations


def percent(share: float, form: str = ".0f") -> str:
    """A share of one in percent: 0.27 is 27 %.

    Args:
        share: of one.
        form: of the number, as `format` takes it.
    """
    return f"{100 * share:{form}} %"
