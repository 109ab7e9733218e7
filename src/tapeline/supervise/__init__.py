"""Supervision: start a run, see how it ends or hangs, and start it again. No torch."""
