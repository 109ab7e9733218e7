"""The ledger: where a rank's time goes, told by the loop itself.

Covers cutting the time of one attempt into phases, adding it up in integers, and lines that hold
after kill -9. Does not cover what the time was worth: whether a step was done for nothing is only
known in a later attempt, so that is the account's.

A step writes nothing. Time is added up in memory and goes to the file at most once a second, and
whenever a checkpoint is done, so that what a rollback gives up is always whole lines. One line is
one stretch of time; it begins where the line before ended:

    {"begin":2,"run":"r","rank":0,"world_size":1,"from_step":50,"wall_ns":…,"monotonic_ns":…,"boot":…}
    {"attempt":2,"step":57,"end":1002003004,"data":2003004,"compute":1000000000}
    {"steps":2,"step":57,"end":1002003004,"times":[187,6,188,1],"own":[],"longest":[53,160321]}
    {"close":2,"step":57,"end":…,"wall_ns":…,"how":"ended","failed_writes":0}

`end` counts nanoseconds since the attempt began; the phases of a line add up to what passed since
the end before; a phase that isn't there took none. Also there where not zero: `overlap` (of the
waits for data, known since the line before, the part in which the device worked), `device` (it
worked), `writing` (a checkpoint was being written in the background), `partial` (it was spent on
the step after), `inferred` (from the heartbeat of a process that was killed).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tapeline.clock import Clock, SystemClock
from tapeline.errors import LedgerError
from tapeline.files import Journal
from tapeline.ledger.device import DeviceTimer, Overlap
from tapeline.ledger.heartbeat import Heartbeat, read_heartbeat
from tapeline.ledger.histogram import StepTally
from tapeline.ledger.phases import INDEX, NS_PER_S, PHASES
from tapeline.ledger.tail import boot_id, inferred_line, last_written
from tapeline.world import World

Batch = TypeVar("Batch")

_STARTUP, _RESTORE, _DATA, _TRANSFER, _COMPUTE, _COMMUNICATION = range(6)
_CHECKPOINT, _EVALUATION, _OTHER = range(6, len(PHASES))
_IN_STEPS = (_DATA, _TRANSFER, _COMPUTE, _COMMUNICATION)
_OF_DEVICE = ("overlap", "device")
_WHOLE = (_CHECKPOINT, _EVALUATION)  # end a line
_FLUSH_NS = NS_PER_S


def ledger_path(folder: Path, rank: int) -> Path:
    """The ledger of one rank in a run's folder."""
    return folder / "ledger" / f"rank-{rank}.jsonl"


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The heartbeat of one rank in a run's folder."""
    return folder / "heartbeat" / f"rank-{rank}"


class Ledger:
    """Accounts for the time of one rank in one attempt, from its making to `close`.

        with Ledger(folder) as ledger:
            for step, batch in enumerate(ledger.batches(loader), 1):
                train_step(batch)
                ledger.step_done(step)
                if step % 1000 == 0:
                    with ledger.span("checkpoint"):
                        save(step)

    A checkpoint's state is that after the last step done; time up to its end counts as spent on
    the steps up to that one. There is one phase at a time, "startup" first: entering a phase
    leaves the one before, and a span gives back the phase around it when it ends. Belongs to the
    thread that trains; only `background_write` may be set from another.

    A line that can't be written is told once, as a `RuntimeWarning`, and never stops the training;
    its time is in the next line that can.

    Args:
        folder: the run's; the ledger and the heartbeat are in `ledger/` and `heartbeat/` there.
        world: rank and world size.
        attempt: which life of the run, above all before; by default one more than the last.
        from_step: steps that were done when it began: 0, or those of the loaded checkpoint.
        clock: monotonic inside the attempt, wall time for relating attempts.
        device: when the device worked, if it works beside the host.
        began_ns: monotonic time at which the process began, for what was spent before this.

    Attributes:
        step: steps done.
        background_write: set it while a checkpoint is being written beside the training: steps
            done meanwhile stand in lines of their own, and their slowdown can be told.
        failed_writes: lines that could not be written so far.

    Raises:
        LedgerError: the files can't be opened, or the attempt isn't above the last.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        world: World | None = None,
        attempt: int | None = None,
        from_step: int = 0,
        clock: Clock | None = None,
        device: DeviceTimer | None = None,
        began_ns: int | None = None,
    ) -> None:
        world, self._clock = world or World(), clock or SystemClock()
        self._now = self._clock.monotonic_ns
        now = self._now()
        began = now if began_ns is None else min(began_ns, now)
        folder = Path(folder)
        path = ledger_path(folder, world.rank)
        self.step = from_step
        self.background_write = False
        self.failed_writes = 0
        try:
            last = last_written(path)
            self._attempt = _numbered(path, attempt, last.attempt)
            beats = heartbeat_path(folder, world.rank)
            inferred = inferred_line(last, read_heartbeat(beats))
            self._journal = Journal(path)
            self._journal.append(*inferred, self._begin(folder, world, began))
            self._journal.flush()
            self._heartbeat = Heartbeat(beats, self._attempt, began)
        except OSError as error:
            raise LedgerError(
                path,
                expected="a ledger that can be written",
                found=error.strerror or str(error),
                fix="Make room, or give a folder that can be written to",
            ) from None
        self._began = self._line_end = self._since = began
        self._phase = _STARTUP
        # Since the attempt began: the time of each phase, and how much of it is in the file.
        self._totals, self._written = [0] * len(PHASES), [0] * len(PHASES)
        self._written_device = (0, 0)
        # When a step was last done, a checkpoint or an evaluation over, and the time up to then.
        self._settled_at, self._settled = began, [0] * len(PHASES)
        self._writing = self._closed = False
        self._due = now + _FLUSH_NS
        self._steps = StepTally()
        self._device, self._overlap, self._device_works = device, Overlap(), False
        self._heartbeat.beat(from_step, _STARTUP, now)

    def _begin(self, folder: Path, world: World, began: int) -> dict[str, Any]:
        return {
            "begin": self._attempt,
            "run": folder.resolve().name,
            "rank": world.rank,
            "world_size": world.size,
            "from_step": self.step,
            "wall_ns": self._clock.wall_ns() - (self._now() - began),
            "monotonic_ns": began,
            "boot": boot_id() if isinstance(self._clock, SystemClock) else None,
        }

    def switch(self, phase: str) -> None:
        """Leave the current phase and enter another: one reading of the clock.

        Entering the current phase again says that it makes progress.

        Raises:
            LedgerError: there is no such phase.
        """
        try:
            entered = INDEX[phase]
        except KeyError:
            raise LedgerError(
                "phase",
                expected="one of " + ", ".join(PHASES),
                found=repr(phase),
                fix='Name one of these; "other" is what has no name',
            ) from None
        self._enter(entered)

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Spend the block in a phase, and go on with the one around it.

        Raises:
            LedgerError: there is no such phase.
        """
        around = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self._enter(around)

    def spent(self, phase: str, nanoseconds: int) -> None:
        """Say that so much of the time in the current phase was spent in another one.

        For what was done before the ledger could be opened: reading the checkpoint that says
        which step it begins from.
        """
        self._pass_to(self._phase)
        self._totals[self._phase] -= nanoseconds
        self._totals[INDEX[phase]] += nanoseconds

    def in_steps_ns(self) -> tuple[int, int, int]:
        """The time spent in steps so far; of it, that of computing and that in collectives."""
        totals = self._totals
        computed, waited = totals[_COMPUTE], totals[_COMMUNICATION]
        return totals[_DATA] + totals[_TRANSFER] + computed + waited, computed, waited

    def batches(self, source: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The batches of a source: asking for one is "data", the body of the loop "compute"."""
        iterator = iter(source)
        while True:
            self._enter(_DATA)
            try:
                batch = next(iterator)
            except StopIteration:
                self._enter(_OTHER)
                return
            self._enter(_COMPUTE)
            yield batch

    def step_done(self, step: int) -> None:
        """Say that a step is done; what follows is "other" until a phase is entered.

        Args:
            step: number of steps done in the run, so it grows.

        Raises:
            LedgerError: it doesn't grow, or the ledger is closed.
        """
        if self._closed:
            raise LedgerError(
                f"step {step}",
                expected="an open ledger",
                found="one that is closed",
                fix="Keep the loop inside its `with` block",
            )
        if step <= self.step:
            raise LedgerError(
                f"step {step}",
                expected=f"a step after {self.step}",
                found="one that is done",
                fix="Count steps over the whole run, and give `from_step` when resuming",
            )
        self.step = step
        now = self._pass_to(_OTHER)
        totals = self._totals
        self._settled_at, self._settled = now, totals.copy()
        own = totals[_DATA] + totals[_TRANSFER] + totals[_COMPUTE]
        aside = totals[_STARTUP] + totals[_RESTORE] + totals[_CHECKPOINT] + totals[_EVALUATION]
        self._steps.add(step, now - self._began - aside, own)
        if self._device is not None:
            self._device_step_ends(self._device)
        if now >= self._due or self._writing is not self.background_write:
            self._write(now)
            self._writing = self.background_write

    def flush(self) -> None:
        """End the current line here. A checkpoint does so by itself."""
        self._write(self._pass_to(self._phase))

    def close(self, how: str = "ended") -> None:
        """Write what is left and say that the attempt ended, and how; once, if called again."""
        if self._closed:
            return
        self._closed = True
        self._due = 0
        self.flush()
        self._append(
            {
                "close": self._attempt,
                "step": self.step,
                "end": self._line_end - self._began,
                "wall_ns": self._clock.wall_ns(),
                "how": how,
                "failed_writes": self.failed_writes,
            }
        )
        self._heartbeat.close()
        try:
            self._journal.close()
        except OSError as error:
            self._failed(error)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("ended" if kind is None else kind.__name__)

    def _enter(self, phase: int) -> None:
        left, now = self._phase, self._pass_to(phase)
        left_whole = phase != left and left in _WHOLE
        if left_whole:
            # What was done ahead of the next step belongs to this one: a rollback keeps it.
            self._settled_at, self._settled = now, self._totals.copy()
        if left_whole or now >= self._due:
            self._write(now)

    def _pass_to(self, phase: int) -> int:
        """Give the time since the last call to the phase that is left; returns the time now."""
        now, left = self._now(), self._phase
        self._totals[left] += now - self._since
        if self._device is not None:
            self._device_follows(self._device, left, phase, now)
        self._since = now
        self._phase = phase
        self._heartbeat.beat(self.step, phase, now)
        return now

    def _device_follows(self, device: DeviceTimer, left: int, phase: int, now: int) -> None:
        if left == _DATA:
            self._overlap.waited(self._since, now)
        if phase == _COMPUTE and not self._device_works:
            self._device_works = True
            device.step_begins()

    def _device_step_ends(self, device: DeviceTimer) -> None:
        if self._device_works:
            self._device_works = False
            device.step_ends()
        for begin_ns, end_ns in device.finished():
            self._overlap.worked(begin_ns, end_ns)

    def _write(self, now: int) -> None:
        if now >= self._due:
            self._due = now + _FLUSH_NS
            self._append(*self._steps.taken(self._attempt, self.step, now - self._began))
        partial = any(self._totals[i] > self._settled[i] for i in _IN_STEPS)
        if partial and not self._end_line(self._settled_at, self._settled):
            return
        self._end_line(now, self._totals, partial=partial)

    def _end_line(self, end: int, totals: list[int], *, partial: bool = False) -> bool:
        """Whether the time up to `end`, `totals` since the begin, is in the journal."""
        if end <= self._line_end:
            return True
        line: dict[str, Any] = {"attempt": self._attempt, "step": self.step}
        line["end"] = end - self._began
        for phase, after, before in zip(PHASES, totals, self._written, strict=True):
            if after > before:
                line[phase] = after - before
        device = (self._overlap.overlap_ns, self._overlap.busy_ns)
        for name, after, before in zip(_OF_DEVICE, device, self._written_device, strict=True):
            if after > before:
                line[name] = after - before
        if self._writing:
            line["writing"] = 1
        if partial:
            line["partial"] = 1
        if not self._append(line):
            return False
        self._line_end, self._written_device = end, device
        self._written[:] = totals
        return True

    def _append(self, *records: dict[str, Any]) -> bool:
        """Whether the records are in the journal or its buffer; one that isn't may come again."""
        taken = False
        try:
            self._journal.append(*records)
            taken = True
            self._journal.flush()
        except OSError as error:  # what was taken stays in the buffer for the next flush
            self._failed(error)
        return taken

    def _failed(self, error: OSError) -> None:
        self.failed_writes += 1
        if self.failed_writes == 1:
            warnings.warn(
                f"The ledger can't be written ({error.strerror or error}); the training goes on, "
                "and what is missing is in the next line that can be written.",
                RuntimeWarning,
                stacklevel=2,
            )


def _numbered(path: Path, attempt: int | None, last: int) -> int:
    if attempt is None:
        return last + 1
    if attempt <= last:
        raise LedgerError(
            f"{path}, attempt {attempt}",
            expected=f"an attempt after {last}",
            found="one that is in the ledger",
            fix="Give each life of the run a number of its own, or leave the number out",
        )
    return attempt
