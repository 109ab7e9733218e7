"""What every reader must do, run by each reader's own tests.

A test module makes a small tape of its format, and inherits:

    class TestLobster(TapeConformance):
        reader = "lobster"

        def write(self, folder): ...            # the file, or the files that continue each other

The tape must span at least two instants of the grid, hold at least eight rows' worth of updates,
and be of one session.
"""

from __future__ import annotations

import gzip
import importlib
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tapeline.errors import TapeError
from tapeline.session import Session
from tapeline.store import Shards, write_shards
from tapeline.tape import GridOptions, TapeReport, detect, read, read_tape
from tapeline.windows import WindowIndex, WindowSampler

TRAINING = "tapeline"  # where `train` is found
STEP_NS = 500_000_000


class TapeConformance:
    """Set `reader`, and `options`, `grid` or `sessions` if the format needs them."""

    reader: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    grid: ClassVar[GridOptions] = GridOptions(STEP_NS, depth=2)
    sessions: ClassVar[Any] = None
    is_text = True  # whether the first file is text that gzip may pack

    def write(self, folder: Path) -> list[Path]:
        """A small tape of the format, written into `folder`."""
        raise NotImplementedError

    def read(self, paths: list[Path], **given: Any) -> tuple[list[Session], TapeReport]:
        arguments = {
            "options": self.options,
            "grid": self.grid,
            "sessions": self.sessions,
            **given,
        }
        tape = read_tape(paths, **arguments)
        return list(tape), tape.report

    def test_the_format_is_recognised_by_its_content(self, tmp_path):
        for path in self.write(tmp_path):
            assert detect(path).name == self.reader

    def test_rows_are_in_order_and_finite_where_valid(self, tmp_path):
        sessions, report = self.read(self.write(tmp_path))
        assert report.format == self.reader
        assert report.num_sessions == len(sessions) > 0
        assert report.counts.rows == sum(len(session) for session in sessions) >= 2
        for session in sessions:
            assert session.times is not None
            assert session.valid is not None
            assert session.age_ns is not None
            assert session.valid.any()
            assert (np.diff(session.times) > 0).all()
            assert (session.times % STEP_NS == 0).all()
            assert np.isfinite(session.values[session.valid]).all()
            assert (session.age_ns[session.valid] >= 0).all()
            assert np.abs(session.values[session.valid]).max() < 1e7, "a sentinel"

    def test_blocks_of_any_size_give_the_same_rows(self, tmp_path, monkeypatch):
        paths = self.write(tmp_path)
        expected, whole = self.read(paths)
        for size in (1, 2, 3, 7):
            with monkeypatch.context() as patch:
                split_blocks(patch, size)
                sessions, report = self.read(paths)
            assert_same(sessions, expected)
            assert report == whole

    def test_nothing_later_changes_a_row(self, tmp_path, monkeypatch):
        paths = self.write(tmp_path)
        expected, whole = self.read(paths)
        for share in (0.3, 0.5, 0.8):
            last_ns = whole.first_ns + round((whole.last_ns - whole.first_ns) * share)
            with monkeypatch.context() as patch:
                end_blocks(patch, last_ns)
                tape = read_tape(
                    paths, options=self.options, grid=self.grid, sessions=self.sessions
                )
                earlier = until(list(valid_or_not(tape)), last_ns - STEP_NS)
            whole_rows = until(expected, last_ns - STEP_NS)
            for key, rows in earlier.items():
                # After its last event a shorter tape says nothing, and has fewer rows or none.
                known = {time: row for time, row in rows.items() if row[1]}
                assert known.items() <= whole_rows[key].items()

    def test_a_missing_and_an_empty_file_are_refused(self, tmp_path):
        path = self.write(tmp_path)[0]
        missing = path.with_name(f"missing-{path.name}")
        with pytest.raises(TapeError, match="found nothing there"):
            read_tape(missing, options=self.options)
        path.write_bytes(b"")
        with pytest.raises(TapeError, match="found an empty file"):
            read_tape(path, options=self.options)

    def test_another_format_is_refused(self, tmp_path):
        self.write(tmp_path)
        path = tmp_path / "other.txt"
        path.write_text("nothing that any reader knows\n")
        with pytest.raises(TapeError, match=f"expected .*{self.reader} .*found none of them"):
            read_tape(path)
        with pytest.raises(TapeError):
            list(read_tape(path, format=self.reader, options=self.options))

    def test_a_file_cut_short_is_refused_or_read_up_to_there(self, tmp_path):
        paths = self.write(tmp_path)
        expected, _ = self.read(paths)
        content = paths[-1].read_bytes()
        if self.is_text:
            content = gzip.compress(content)
            paths[-1].write_bytes(content)
            assert_same(self.read(paths)[0], expected)
        paths[-1].write_bytes(content[: len(content) * 2 // 3])
        with pytest.raises(TapeError) as error:
            self.read(paths)
        assert error.value.fix

    def test_an_unknown_option_is_refused(self, tmp_path):
        with pytest.raises(TapeError, match=f"options of {self.reader}: expected .*found nonsense"):
            read_tape(self.write(tmp_path), options={"nonsense": 1})

    def test_from_the_file_to_a_trained_model(self, tmp_path):
        sessions, _ = self.read(self.write(tmp_path))
        assert all(math.isfinite(loss) for loss in train_on(sessions, tmp_path / "store"))


def train_on(sessions: list[Session], root: Path, *, steps: int = 20) -> list[float]:
    """The losses of a few training steps on a store of these sessions."""
    torch = importlib.import_module("torch")
    train = importlib.import_module(TRAINING).train
    write_shards(sessions, root, "mmap", nan="mark")
    shards = Shards(root)
    T, columns = 2, len(sessions[0].columns)
    sampler = WindowSampler(WindowIndex(shards, T, 1), batch=4, seed=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(T * columns, 1)
    losses: list[float] = train(model, shards, sampler, steps, lr=1e-6, T=T, horizon=1)
    assert len(losses) == steps
    return losses


def split_blocks(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let every reader yield blocks of at most `size` entries."""
    wrap_blocks(
        patch,
        lambda block: (
            block.take(slice(start, start + size)) for start in range(0, len(block.times_ns), size)
        ),
    )


def end_blocks(patch: pytest.MonkeyPatch, last_ns: int) -> None:
    """Let every reader leave out what is later than `last_ns`."""

    def known(block):
        count = int(np.searchsorted(block.times_ns, last_ns, side="right"))
        yield block.take(slice(0, count))

    wrap_blocks(patch, known)


def wrap_blocks(patch: pytest.MonkeyPatch, change: Any) -> None:
    for reader in read.READERS.values():
        original = reader.blocks

        def blocks(self, original=original):
            for block in original(self):
                yield from change(block)

        patch.setattr(reader, "blocks", blocks)


def valid_or_not(tape: Any) -> Any:
    """The tape's sessions, also if none of their rows is valid."""
    try:
        yield from tape
    except TapeError as error:
        assert "none of them valid" in str(error)


def until(sessions: list[Session], last_ns: int) -> dict[Any, dict[int, tuple[Any, ...]]]:
    """For each session the rows up to a time: values with their origin, validity and age."""
    found: dict[Any, dict[int, tuple[Any, ...]]] = {}
    for session in sessions:
        assert session.times is not None
        assert session.valid is not None
        assert session.age_ns is not None
        rows = found.setdefault(session.key, {})
        for number in range(int(np.searchsorted(session.times, last_ns, side="right"))):
            valid = bool(session.valid[number])
            rows[int(session.times[number])] = (
                session.values[number].tobytes() if valid else b"",
                valid,
                int(session.age_ns[number]),
                session.origin if valid else 0.0,
            )
    return found


def assert_same(sessions: list[Session], expected: list[Session]) -> None:
    """The same sessions, bit for bit."""
    assert [session.key for session in sessions] == [session.key for session in expected]
    for one, other in zip(sessions, expected, strict=True):
        assert one.columns == other.columns
        assert one.origin == other.origin
        for name in ("times", "values", "age_ns", "valid"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert mine.tobytes() == theirs.tobytes(), name
