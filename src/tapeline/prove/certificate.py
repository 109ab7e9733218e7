"""The certificate of `tapeline prove`: whether bits outlast kills, and on what that rests."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tapeline.prove.cause import Cause
from tapeline.prove.parting import Parting

NAMES = {"model": "parameters", "optimizer": "optimiser", "sampler": "loader"}
PAIR = ("uninterrupted", "killed")


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the run that was killed.

    Attributes:
        threads: in the environment, for libraries other than torch.
        from_step: where it began; None if it didn't get so far.
        how: "killed", "finished" or "failed".
        after_step: the last step journalled when the signal was sent, or its last.
    """

    ranks: int
    threads: int
    from_step: int | None
    how: str
    after_step: int
    victims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """What `prove` found.

    Attributes:
        subject: what was proved: name, steps, hash of the configuration, fingerprint of the data,
            and the ranks and threads of the uninterrupted run.
        contract: what the run promises, in its own words.
        platform: settings, versions and machine that it holds on.
        lives: of the run that was killed.
        hashes: for each part of the state after the last step, and the traces of losses and
            validations: both runs'. None where a run didn't get so far.
        parting: where they part; None if they don't.
        failure: what a life ended with that should have gone on.
        causes: for parting, the likeliest first.
        determinism_cost: what torch's determinism switch costs a step on one rank, where the bits
            hold, see `training.determinism`.
    """

    subject: dict[str, Any]
    contract: str
    platform: dict[str, Any]
    lives: tuple[Life, ...]
    hashes: dict[str, tuple[str, str | None]]
    parting: Parting | None = None
    failure: str | None = None
    causes: tuple[Cause, ...] = ()
    determinism_cost: dict[str, float] | None = None

    @property
    def holds(self) -> bool:
        """Whether everything compared is the same bits."""
        return (
            self.parting is None
            and self.failure is None
            and all(one == other for one, other in self.hashes.values())
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON can hold it."""
        return {
            "holds": self.holds,
            "subject": self.subject,
            "contract": self.contract,
            "platform": self.platform,
            "lives": [asdict(life) for life in self.lives],
            "hashes": {n: dict(zip(PAIR, both, strict=True)) for n, both in self.hashes.items()},
            "parting": self.parting and asdict(self.parting),
            "failure": self.failure,
            "causes": [asdict(cause) for cause in self.causes],
            "determinism_cost": self.determinism_cost,
        }

    def sentence(self) -> str:
        """The finding in words."""
        kills = sum(life.how == "killed" for life in self.lives)
        ranks = " → ".join(str(life.ranks) for life in self.lives)
        told = f"{kills} SIGKILL{'s' if kills != 1 else ''}, ranks {ranks}"
        if self.holds:
            return f"The same bits through {told}: {self.contract}."
        if self.failure:
            return f"Not the same run through {told}: a life ended with: {self.failure}"
        if self.parting is None:
            return f"Other bits after {told}, and no step was found at which they part."
        return f"Other bits after {told}: {_where(self.parting)}."


def _where(parting: Parting) -> str:
    text = f"the runs part at step {parting.step:,}"
    if parting.losses:
        text += " (loss {!r} instead of {!r})".format(*reversed(parting.losses))
    if parting.equal_up_to:
        text += f", equal up to the checkpoint of step {parting.equal_up_to:,}"
    if parting.checkpoint is not None:
        text += f"; in that of step {parting.checkpoint:,} the first to differ is "
        text += parting.tensor or f"the part {parting.part}"
        if parting.distance is not None:
            text += f", by {parting.distance:.3g} at most"
        if parting.num_differing > 1:
            text += f", of {parting.num_differing} tensors"
    return text
