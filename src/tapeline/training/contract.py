"""What a run promises about its bits, as a pure function of how it is set up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Scope = Literal["across world sizes", "at this world size", "statistical"]


@dataclass(frozen=True, slots=True)
class Contract:
    """What holds of a run that is stopped, resumed, or moved to other ranks.

    Attributes:
        scope: how far its bits are fixed.
        text: the same in words, for records and reports.
        condition: what the contract rests on; "" where nothing.
    """

    scope: Scope
    text: str
    condition: str

    @classmethod
    def given_up(cls, step: int, why: str) -> Contract:
        """What is left of any contract once other bits than promised were computed."""
        return cls("statistical", f"statistical from step {step:,} on: {why}", "")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)


def contract_of(
    strategy: Literal["lanes", "ddp", "fsdp2"],
    *,
    num_lanes: int,
    world_size: int,
    threads: int,
    deterministic: bool = True,
) -> Contract:
    """The contract of a configuration.

    Args:
        strategy: how ranks share the work.
        num_lanes: of the run; 1 means the batch is one piece.
        world_size: the ranks of this attempt.
        threads: of torch on each rank.
        deterministic: whether `make_deterministic` was called.
    """
    if not deterministic:
        return Contract("statistical", "statistical: the same distribution, not the same bits", "")
    held = f"this platform and version, with threads = {threads}"
    if strategy == "lanes" and num_lanes > 1:
        return Contract(
            "across world sizes",
            f"bit-exact across world sizes 1–{num_lanes} on this platform and version",
            held,
        )
    ranks = f"{world_size} rank" + ("s" if world_size > 1 else "")
    return Contract(
        "at this world size",
        f"bit-exact at this world size, {ranks}, on this platform and version",
        held,
    )
