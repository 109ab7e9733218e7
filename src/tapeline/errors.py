"""Every error a user can cause, and the one shape of its message.

    TapelineError                the root; also a ValueError, so a plain `except ValueError` works
    ├── ConfigError              a configuration file, or a `--set`
    ├── TapeError                a market data file that can't be read as what it claims to be
    ├── StoreError               shards on disk: missing, truncated, changed, of another layout
    ├── WindowError              window lengths, batches, splits, sampler states
    ├── CheckpointError          a checkpoint that is damaged, or of another model, data set or run
    ├── TrainingError            a model, an optimiser or a step that can't go on
    ├── RunError                 a run folder, or the place a run should go to
    ├── LedgerError              a ledger that doesn't add up, or is used out of order
    └── ExportError              a tracker that isn't installed, can't be reached or says no

A message says where, what was expected, what was found and what to do. Faults of our own are
`assert`s, not these.
"""

from __future__ import annotations


class TapelineError(ValueError):
    """A user's mistake, told in one or two sentences.

    Args:
        where: the file, key or argument at fault.
        expected: what would have been right.
        found: what was there instead.
        fix: what to do, as an imperative.
    """

    def __init__(self, where: object, *, expected: str, found: str, fix: str) -> None:
        self.where = str(where)
        self.expected = expected
        self.found = found.rstrip(".")  # it may be another error's sentence
        self.fix = fix.rstrip(".")
        super().__init__(f"{self.where}: expected {expected}, found {self.found}. {self.fix}.")

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments don't survive the default, which matters when a worker raises.
        return _rebuild, (type(self), self.where, self.expected, self.found, self.fix)


def _rebuild(
    kind: type[TapelineError], where: str, expected: str, found: str, fix: str
) -> TapelineError:
    return kind(where, expected=expected, found=found, fix=fix)


class ConfigError(TapelineError):
    """A configuration file or an override is wrong."""


class TapeError(TapelineError):
    """A market data file can't be read as what it claims to be."""


class StoreError(TapelineError):
    """A store of shards is missing, truncated, changed, or of another layout."""


class WindowError(TapelineError):
    """A window, a batch, a split or a sampler state is impossible for this data."""


class CheckpointError(TapelineError):
    """A checkpoint is damaged, or belongs to another model, data set or run."""


class TrainingError(TapelineError):
    """A model, an optimiser or a step can't go on."""


class RunError(TapelineError):
    """A run folder is missing, occupied, or not one."""


class LedgerError(TapelineError):
    """A ledger's spans don't add up, or it is used out of order."""


class ExportError(TapelineError):
    """A tracker isn't installed, can't be reached, or refuses what it is given."""
