"""The checkpoints of a run seen from outside: what is there, is it whole, take it elsewhere.

Covers: both tiers, of a run that may be training meanwhile; a durable tier that can't be reached
is told and left out. Does not cover printing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from tapeline.attempt.life import retention_of, taints_of
from tapeline.attempt.origin import durable_candidates, local_candidates, run_identity
from tapeline.checkpoint import Manifest, Shelf, State, load_state
from tapeline.checkpoint.durable import DurableTier
from tapeline.checkpoint.manifest import METRIC
from tapeline.checkpoint.resume import Candidate, Choice, choose
from tapeline.checkpoint.retain import Held, reasons_to_keep, to_delete
from tapeline.clock import SystemClock, utc
from tapeline.config import RunConfig
from tapeline.errors import CheckpointError
from tapeline.files import atomic_folder
from tapeline.runs import RunFolder

_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint in one tier.

    Attributes:
        step: steps done.
        tier: "local" or "durable".
        place: its folder or URL.
        verified: every byte was checked now; None where that was not asked for.
        tags: names it was given.
        attempt: the life of the run that saved it.
        note: "resume begins here", or why it can't; empty for older ones.
        num_bytes: size of its files; None where it can't be read.
        created: when it was saved, ISO 8601 UTC; only the local tier knows.
        metric: the validation loss, if the step was evaluated.
    """

    step: int
    tier: Literal["durable", "local"]
    place: str
    verified: bool | None
    tags: tuple[str, ...]
    attempt: int | None
    note: str
    num_bytes: int | None = None
    created: str | None = None
    metric: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return {**asdict(self), "tags": list(self.tags)}


class KeptCheckpoints:
    """The checkpoints of one run.

    Args:
        folder: of the run.
        overrides: settings given at a resume, such as `checkpoint.durable=…`.

    Raises:
        RunError: the folder isn't a run's.
        CheckpointError: the durable tier can't be reached.
    """

    def __init__(self, folder: Path, overrides: Sequence[str] = ()) -> None:
        self._run = RunFolder(folder, SystemClock())
        self._record = self._run.record()
        config = RunConfig.from_mapping(self._record["config"], str(folder / "run.json"), overrides)
        self._settings = config.checkpoint
        self._shelf = Shelf(self._run.checkpoints_path)
        self._tier = DurableTier(durable) if (durable := self._settings.durable) else None
        self.unreachable: str | None = None  # what came of the last look at the durable tier

    def rows(self, *, everything: bool = False) -> list[Row]:
        """Every checkpoint, highest step first, the local tier before the durable one.

        Args:
            everything: read the durable copies too; the local ones are always read.
        """
        candidates = self._candidates(everything=everything)
        choice = self._choice(candidates)
        notes = {one.identity: one.reason for one in choice.passed_over}
        if choice.identity:
            notes[choice.identity] = "resume begins here"
        rows = [self._row(one, notes, everything) for one in candidates]
        return sorted(rows, key=lambda row: (-row.step, row.tier == "durable"))

    def interval(self) -> dict[str, Any] | None:
        """The newest interval that `checkpoint.every = "auto"` chose, with what it was chosen from.

        None for a run without one. `checkpoint.interval.Decision` tells the fields.
        """
        decisions = self._run.intervals()
        return decisions[-1] if decisions else None

    def tag(self, step: int, tag: str) -> list[str]:
        """Name a checkpoint: it is never deleted by a retention rule from then on.

        One that lies in the local tier alone is copied to the durable one, if the run has one: a
        name is given to what must outlive the machine.

        Returns:
            The tiers that have it, and the tag now.

        Raises:
            CheckpointError: no tier has the step, the name is taken or no plain one, or it could
                not be copied; the local one then has its tag, and the same command goes on.
        """
        tiers = []
        if step in self._shelf.steps():
            self._shelf.tag(step, tag)
            tiers.append("local")
            if self._tier:
                self._tier.copy(self._shelf.path(step))
        if self._tier and step in self._tier.steps():
            self._tier.tag(step, tag)
            tiers.append("durable")
        if not tiers:
            raise self._no_such_step(step)
        return tiers

    def export(self, step: int, out: Path) -> Path:
        """Write a checkpoint as plain files for use elsewhere.

        `model.safetensors` holds parameters and buffers under their own names,
        `state.safetensors` all other tensors, `state.json` the rest and what it belongs to.

        Args:
            step: which.
            out: a new or empty folder.

        Raises:
            CheckpointError: no tier has the step, it is damaged, or `out` is occupied.
        """
        state = self._load(step)
        model = {n: t for n, t in state.tensors.items() if n.startswith(_MODEL)}
        rest = {n: t for n, t in state.tensors.items() if n not in model}
        told = {"run": run_identity(self._record), "config": self._record["config"]}
        told |= {"data_fingerprint": self._record["data"]["read_fingerprint"], **state.values}
        try:
            with atomic_folder(out) as fresh:
                # Copied one by one: the writer refuses tensors that lie in one piece of memory.
                named = {n.removeprefix(_MODEL): t.clone() for n, t in model.items()}
                save_file(named, fresh / "model.safetensors")
                save_file({n: t.clone() for n, t in rest.items()}, fresh / "state.safetensors")
                (fresh / "state.json").write_text(json.dumps(told, indent=2) + "\n")
        except FileExistsError:
            raise CheckpointError(
                out,
                expected="a new or empty folder",
                found="other files",
                fix="Choose another folder",
            ) from None
        return out

    def prune(self, *, dry_run: bool) -> dict[int, tuple[str, ...]]:
        """Delete what the retention rule of the run doesn't keep, from the local tier.

        Returns:
            Every local step: why it stays, or nothing for those that go.

        Raises:
            RunError: the run is being trained.
        """
        if dry_run:
            held = self._held()
            return self._plan(held)
        with self._run.locked():
            plan = self._plan(self._held())
            for folder in self._shelf.retire(retention_of(self._settings)) if plan else ():
                shutil.rmtree(folder, ignore_errors=True)
        return plan

    def _plan(self, held: list[Held]) -> dict[int, tuple[str, ...]]:
        rule = retention_of(self._settings)
        reasons, go = reasons_to_keep(held, rule), set(to_delete(held, rule))
        spared = ("damaged or given up, and not old",)
        return {
            one.step: () if one.step in go else reasons.get(one.step, spared)
            for one in sorted(held, key=lambda one: -one.step)
        }

    def _held(self) -> list[Held]:
        # What a resume would pass over must not push out what it would take.
        self._shelf.give_up_beyond(self._choice(self._candidates(everything=False)).step)
        return self._shelf.held()

    def _candidates(self, *, everything: bool) -> list[Candidate]:
        """Both tiers, with the faults found by reading them."""
        candidates = local_candidates(self._shelf)
        self.unreachable = None
        try:
            candidates += durable_candidates(self._tier) if self._tier else []
        except CheckpointError as error:
            self.unreachable = str(error)
        return [
            replace(one, fault=self._fault(one)) if one.tier == "local" or everything else one
            for one in candidates
        ]

    def _fault(self, candidate: Candidate) -> str | None:
        if candidate.fault:
            return candidate.fault
        try:
            self._tier_of(candidate).verify(candidate.step)
        except CheckpointError as error:
            return str(error)
        return None

    def _tier_of(self, candidate: Candidate) -> Shelf | DurableTier:
        tier = self._shelf if candidate.tier == "local" else self._tier
        assert tier, "there are no durable candidates without a tier"
        return tier

    def _choice(self, candidates: Sequence[Candidate]) -> Choice:
        return choose(
            [candidates],
            run=run_identity(self._record),
            starts={life["attempt"]: life["from_step"] for life in self._run.attempts()},
            tainted=taints_of(self._run).tainted(),
        )

    def _row(self, one: Candidate, notes: dict[str, str], everything: bool) -> Row:
        tier = self._tier_of(one)
        was_read = everything or one.tier == "local"
        row = Row(
            step=one.step,
            tier=one.tier,
            place=one.place,
            verified=False if one.fault else True if was_read else None,
            tags=tuple(tag for tag, step in tier.tags().items() if step == one.step),
            attempt=one.attempt or None,
            note=one.fault or notes.get(one.identity, ""),
        )
        try:
            said = tier.manifest(one.step) if isinstance(tier, Shelf) else tier.marker(one.step)
        except CheckpointError:
            return row
        return replace(
            row,
            num_bytes=said.total_bytes,
            created=utc(said.created_ns) if isinstance(said, Manifest) else None,
            metric=said.metadata.get(METRIC),
        )

    def _load(self, step: int) -> State:
        if step in self._shelf.steps():
            return self._shelf.load_step(step)
        if self._tier and step in self._tier.steps():
            with tempfile.TemporaryDirectory() as scratch:
                return load_state(self._tier.fetch(step, Path(scratch) / "copy"))
        raise self._no_such_step(step)

    def _no_such_step(self, step: int) -> CheckpointError:
        steps = self._shelf.steps() or (self._tier.steps() if self._tier else [])
        return CheckpointError(
            f"{self._run.path}, step {step}",
            expected="a step that was saved",
            found=", ".join(map(str, sorted(steps))) or "no checkpoint at all",
            fix="See `tapeline checkpoints` for the steps there are",
        )
