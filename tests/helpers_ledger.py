"""Runs on a fake clock, and their folders."""

from __future__ import annotations

import json

from tapeline.clock import FakeClock
from tapeline.ledger import Ledger, ledger_path
from tapeline.world import World

S = 1_000_000_000


def begin(folder, clock, *, rank=0, size=1, **options):
    """A ledger on a fake clock."""
    return Ledger(folder, world=World(rank, size, rank), clock=clock, **options)


def steps(ledger, clock, first, last, *, step_ns=10 * S, data_ns=0, save_after=()):
    """Do steps from after `first` up to `last`; a save takes no time."""
    for step in range(first + 1, last + 1):
        if data_ns:
            ledger.switch("data")
            clock.advance(data_ns)
        ledger.switch("compute")
        clock.advance(step_ns - data_ns)
        ledger.step_done(step)
        if step in save_after:
            with ledger.span("checkpoint"):
                pass


def kill(ledger):
    """Leave a ledger as kill -9 does: what the file holds stays, nothing is added."""
    ledger._journal._stream.close()  # each record was flushed when it was written
    ledger._heartbeat.close()


def records(folder, rank=0):
    return [json.loads(line) for line in ledger_path(folder, rank).read_text().splitlines()]


def new_clock(wall_s=1_700_000_000):
    return FakeClock(wall_ns=wall_s * S)
