"""Readers: one file per format, each from a path to sessions and a report."""

from tapeline.tape.readers.orders import demo_tape, read_orders

__all__ = ["demo_tape", "read_orders"]
