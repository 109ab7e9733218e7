"""The error tree: one shape of message, and errors that survive a trip between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from tapeline import errors
from tapeline.errors import StoreError, TapelineError

KINDS = (
    errors.ConfigError,
    errors.TapeError,
    errors.StoreError,
    errors.WindowError,
    errors.CheckpointError,
    errors.TrainingError,
    errors.RunError,
    errors.LedgerError,
    errors.ExportError,
)
SAID = {"expected": "8 bytes", "found": "7", "fix": "Copy it again"}


def test_every_kind_is_known_here_and_drawn_at_the_top() -> None:
    assert set(TapelineError.__subclasses__()) == set(KINDS)
    for kind in KINDS:
        assert f"── {kind.__name__}" in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_says_where_expected_found_and_fix(kind: type[TapelineError]) -> None:
    with pytest.raises(ValueError) as caught:
        raise kind("a.f32", **SAID)
    assert str(caught.value) == "a.f32: expected 8 bytes, found 7. Copy it again."


def test_parts_that_are_sentences_themselves_end_with_one_full_stop() -> None:
    inner = StoreError("a.f32", **SAID)
    error = StoreError("b", expected="a store", found=f"none: {inner}", fix="Look at it.")
    assert str(error) == f"b: expected a store, found none: {inner} Look at it."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "carry", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_an_error_survives_copies_and_pickling(kind: type[TapelineError], carry) -> None:
    error = kind("a.f32", **SAID)
    carried = carry(error)
    assert type(carried) is kind
    assert str(carried) == str(error)
    assert {name: getattr(carried, name) for name in ("where", *SAID)} == {"where": "a.f32", **SAID}


def test_the_parts_are_keywords_so_that_they_cannot_be_swapped() -> None:
    with pytest.raises(TypeError):
        StoreError("a.f32", "8 bytes", "7", "Copy it again")  # type: ignore[misc]
