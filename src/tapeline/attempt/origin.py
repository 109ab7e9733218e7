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
from tapeline.training.ranks import from_first
from tapeline.world import World


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

    @classmethod
    def shared(cls, run: RunFolder, world: World, find: Callable[[], Origin]) -> Origin:
        """What `find` chooses on rank 0, loaded on every rank; all must call it.

        Raises:
            CheckpointError: there are checkpoints, and none can be used; or this rank can't read
                the one that was chosen.
        """
        found: list[Origin] = []

        def chosen() -> Origin:
            found.append(find())
            return replace(found[0], state=None)

        origin = from_first(world, chosen)
        if found:
            return found[0]
        if origin.identity is None:
            return origin
        return replace(origin, state=Shelf(run.checkpoints_path).load_step(origin.step))


def run_identity(record: Mapping[str, Any]) -> str:
    """What the checkpoints of a run say they are of: equal in all its lives, in no other run."""
    return f"{record['config']['name']}, begun {record['created']}"


def local_candidates(shelf: Shelf) -> list[Candidate]:
    """The local tier; only the manifests have been read."""
    found = []
    for step in shelf.steps():
        path = shelf.path(step)
        try:
            manifest = shelf.manifest(step)
        except CheckpointError as error:
            found.append(Candidate(step, 0, str(path), "", "local", str(path), str(error)))
            continue
        identity = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        found.append(_candidate(step, identity, manifest.metadata, "local", str(path)))
    return found


def durable_candidates(tier: DurableTier) -> list[Candidate]:
    """The durable tier; only the markers have been read."""
    found = []
    for step in tier.steps():
        place = tier.place(step)
        try:
            marker = tier.marker(step)
        except CheckpointError as error:
            found.append(Candidate(step, 0, place, "", "durable", place, str(error)))
            continue
        identity = marker.files[MANIFEST].sha256
        found.append(_candidate(step, identity, marker.metadata, "durable", place))
    return found


def restore(
    run: RunFolder,
    tier: DurableTier | None,
    tainted: Mapping[str, str],
) -> Origin:
    """Load what the next life of a run begins with; a run that saved nothing begins at 0.

    Args:
        run: its folder.
        tier: its durable copies, if it has any.
        tainted: identities not to resume from, as long as there is another one.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    shelf = Shelf(run.checkpoints_path)
    candidates = [*local_candidates(shelf), *(durable_candidates(tier) if tier else [])]
    if not candidates:
        return Origin(0, None, None, {}, ())
    starts = {life["attempt"]: life["from_step"] for life in run.attempts()}
    identity = run_identity(run.record())
    while True:
        choice = choose([candidates], run=identity, starts=starts, tainted=tainted)
        skipped = _skipped(choice, candidates)
        suspects = [one for one in choice.passed_over if one.reason == tainted.get(one.identity)]
        if choice.identity is None and suspects:
            # If resuming fails from every one of them, it isn't for what they hold.
            warnings.warn(
                f"{run.path}: resumes from every usable checkpoint have failed twice; the newest "
                "is taken all the same.",
                RuntimeWarning,
                stacklevel=2,
            )
            tainted = {}
            continue
        if choice.identity is None:
            raise nothing_usable(shelf.folder, skipped)
        try:
            state = _load(choice, candidates, shelf, tier)
        except CheckpointError as error:
            at_fault = choice.places[0]
            candidates = [
                replace(one, fault=str(error)) if one.place == at_fault else one
                for one in candidates
            ]
            continue
        metadata = shelf.manifest(choice.step).metadata
        return Origin(choice.step, choice.identity, state, metadata, skipped)


def _load(
    choice: Choice, candidates: list[Candidate], shelf: Shelf, tier: DurableTier | None
) -> State:
    """The state that was chosen; a durable copy becomes a local checkpoint first."""
    (chosen,) = (one for one in candidates if one.place == choice.places[0])
    if chosen.tier == "durable":
        assert tier is not None, "there are no durable candidates without a tier"
        path = shelf.path(choice.step)
        fetched = tier.fetch(choice.step, aside(path))
        if path.exists():  # the damaged one that made us fetch it
            path.rename(aside(path))
        fetched.rename(path)
    return shelf.load_step(choice.step)


def _candidate(
    step: int,
    identity: str,
    metadata: Mapping[str, Any],
    tier: Literal["durable", "local"],
    place: str,
) -> Candidate:
    attempt, run = metadata.get("attempt", 0), metadata.get("run", "nobody")
    return Candidate(step, int(attempt), identity, str(run), tier, place)


def _skipped(choice: Choice, candidates: list[Candidate]) -> tuple[Skipped, ...]:
    places: dict[str, Path | str] = {}
    for one in reversed(candidates):  # the local one last: it is the one to tell of
        places[one.identity] = Path(one.place) if one.tier == "local" else one.place
    return tuple(Skipped(places[one.identity], one.reason) for one in choice.passed_over)
