"""Search: configurations tried as runs, on rungs, by workers that share one journal.

Covers what may be tried (`space`), who runs what next (`schedule`: pure), which configuration comes
next (`suggest`: Optuna's samplers), the journal that all of it follows from (`journal`, `replay`),
workers and the runs that they start, and what it all came to. Does not cover training, which is
`tapeline train` and `resume` in processes of their own, nor what a search may be expected to find
(`plan.search`).
"""

from importlib.util import find_spec

from tapeline.errors import RunError

if find_spec("optuna") is None:
    raise RunError(
        "tapeline search",
        expected="the packages of the extra `search`",
        found="no optuna",
        fix='Install them with `pip install "tapeline[search]"`',
    )
