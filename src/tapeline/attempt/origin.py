"""Where a life of a run begins: the checkpoint it resumes from, out of both tiers.

Covers: listing them as candidates, and loading the one that `choose` takes. Each is read once:
one that turns out to be damaged on loading is passed over and the choice is made again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tapeline.checkpoint import Shelf, Skipped, State
from tapeline.checkpoint.commit import MANIFEST
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.resume import Candidate, Choice, choose
from tapeline.checkpoint.shelf import nothing_usable
from tapeline.errors import CheckpointError
from tapeline.files import aside
from tapeline.runs import RunFolder
from tapeline.training.ranks import from_all, from_first
from tapeline.world import World

_ALONE = World()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a life begins.

    Attributes:
        step: steps done before.
        identity: of the checkpoint; None for a run's beginning.
        state: what it holds.
        metadata: what it says of itself.
        skipped: better ones that were passed over, and why.
    """

    step: int
    identity: str | None
    state: State | None
    metadata: Mapping[str, Any]
    skipped: tuple[Skipped, ...]


def run_identity(record: Mapping[str, Any]) -> str:
    """What the checkpoints of a run say they are of: equal in all its lives, in no other run."""
    return f"{record['config']['name']}, begun {record['created']}"


def local_candidates(shelf: Shelf) -> list[Candidate]:
    """The local tier; only the manifests have been read."""

    def read(step: int) -> tuple[str, Mapping[str, Any]]:
        manifest = shelf.manifest(step)
        raw = (shelf.path(step) / MANIFEST).read_bytes()
        return hashlib.sha256(raw).hexdigest(), manifest.metadata

    return _candidates("local", {step: str(shelf.path(step)) for step in shelf.steps()}, read)


def durable_candidates(tier: DurableTier) -> list[Candidate]:
    """The durable tier; only the markers have been read."""

    def read(step: int) -> tuple[str, Mapping[str, Any]]:
        marker = tier.marker(step)
        return marker.files[MANIFEST].sha256, marker.metadata

    return _candidates("durable", {step: tier.place(step) for step in tier.steps()}, read)


def _candidates(
    tier: Literal["durable", "local"],
    places: Mapping[int, str],
    read: Callable[[int], tuple[str, Mapping[str, Any]]],
) -> list[Candidate]:
    """Those of these steps; `read` gives identity and metadata of one."""
    found = []
    for step, place in places.items():
        try:
            identity, metadata = read(step)
        except CheckpointError as error:
            found.append(Candidate(step, 0, place, "", tier, place, str(error)))
            continue
        attempt, run = metadata.get("attempt", 0), metadata.get("run", "nobody")
        found.append(Candidate(step, int(attempt), identity, str(run), tier, place))
    return found


def restore(
    run: RunFolder,
    tier: DurableTier | None,
    tainted: Mapping[str, str],
    *,
    world: World = _ALONE,
    read: Callable[[int], State] | None = None,
    before: int | None = None,
) -> Origin:
    """Load what the next life of a run begins with; a run that saved nothing begins at 0.

    Rank 0 chooses. One that can't be read on some rank is passed over by all.

    Args:
        run: its folder, which all ranks share.
        tier: its durable copies, if it has any; rank 0's counts.
        tainted: identities not to resume from, as long as there is another one; rank 0's counts.
        world: the ranks that call this together.
        read: loads what this rank needs of a local checkpoint; by default all of it.
        before: a step; only checkpoints of earlier ones count. Rank 0's counts.

    Raises:
        CheckpointError: there are checkpoints, and none can be used; on every rank.
    """
    search = _Search(run, tier, dict(tainted), before)
    load = read or search.shelf.load_step
    while True:
        found = from_first(world, search.next)
        if found.identity is None:
            return found
        state, fault = None, None
        try:
            state = load(found.step)
        except CheckpointError as error:
            fault = f"rank {world.rank}: {error}" if world.size > 1 else str(error)
        faults = [one for one in from_all(world, fault) if one is not None]
        if not faults:
            return replace(found, state=state)
        search.pass_over(faults[0])


class _Search:
    """The candidates of a run on rank 0, as far as they haven't turned out to be damaged."""

    def __init__(
        self,
        run: RunFolder,
        tier: DurableTier | None,
        tainted: Mapping[str, str],
        before: int | None,
    ) -> None:
        self.shelf = Shelf(run.checkpoints_path)
        self._run = run
        self._tier = tier
        self._tainted = tainted
        self._before = before
        self._candidates: list[Candidate] | None = None
        self._place = ""

    def next(self) -> Origin:
        """The best one that is left, its files in the local tier; its state is not loaded.

        Raises:
            CheckpointError: none is left.
        """
        if self._candidates is None:
            self._candidates = local_candidates(self.shelf)
            self._candidates += self._durable(there=bool(self._candidates))
            if self._before is not None:
                self._candidates = [one for one in self._candidates if one.step < self._before]
        if not self._candidates:
            return Origin(0, None, None, {}, ())
        while True:
            choice = self._choice(self._candidates)
            self._place = choice.places[0]
            try:
                self._bring(choice)
                metadata = self.shelf.manifest(choice.step).metadata
            except CheckpointError as error:
                self.pass_over(str(error))
                continue
            skipped = _skipped(choice, self._candidates)
            return Origin(choice.step, choice.identity, None, metadata, skipped)

    def _durable(self, *, there: bool) -> list[Candidate]:
        """The durable tier, if there is one; out of reach it is left out where others are there."""
        try:
            return durable_candidates(self._tier) if self._tier else []
        except CheckpointError as error:
            if not there:
                raise
            warnings.warn(
                f"Durable copies are left out of this resume: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return []

    def pass_over(self, fault: str) -> None:
        """Give up the one that `next` returned."""
        self._candidates = [
            replace(one, fault=fault) if one.place == self._place else one
            for one in self._candidates or []
        ]

    def _choice(self, candidates: list[Candidate]) -> Choice:
        starts = {life["attempt"]: life["from_step"] for life in self._run.attempts()}
        identity = run_identity(self._run.record())
        while True:
            choice = choose([candidates], run=identity, starts=starts, tainted=self._tainted)
            if choice.identity is not None:
                return choice
            if not any(one.reason == self._tainted.get(one.identity) for one in choice.passed_over):
                raise nothing_usable(self.shelf.folder, _skipped(choice, candidates))
            # If resuming fails from every one of them, it isn't for what they hold.
            warnings.warn(
                f"{self._run.path}: resumes from every usable checkpoint have failed twice; the "
                "newest is taken all the same.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._tainted = {}

    def _bring(self, choice: Choice) -> None:
        """Make a durable copy a local checkpoint."""
        (chosen,) = (c for c in self._candidates or [] if c.place == choice.places[0])
        if chosen.tier == "local":
            return
        assert self._tier is not None, "there are no durable candidates without a tier"
        path = self.shelf.path(choice.step)
        fetched = self._tier.fetch(choice.step, aside(path))
        if path.exists():  # the damaged one that made us fetch it
            path.rename(aside(path))
        fetched.rename(path)


def _skipped(choice: Choice, candidates: list[Candidate]) -> tuple[Skipped, ...]:
    places: dict[str, Path | str] = {}
    for one in reversed(candidates):  # the local one last: it is the one to tell of
        places[one.identity] = Path(one.place) if one.tier == "local" else one.place
    # `choose` names the rank that listed it, always rank 0 here, which found the others' faults.
    return tuple(
        Skipped(places[one.identity], one.reason.removeprefix("rank 0: "))
        for one in choice.passed_over
    )
