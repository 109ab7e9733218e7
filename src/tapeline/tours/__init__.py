"""Guided walks through the whole house: `tapeline tutorial` and `tapeline demo`.

They compose what the rooms below offer and add nothing to it.
"""

from tapeline.tours.demo import Demo, run_demo
from tapeline.tours.tutorial import Tutorial, run_tutorial

__all__ = ["Demo", "Tutorial", "run_demo", "run_tutorial"]
