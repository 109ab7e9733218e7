"""What the server that ranks are forked from has done beforehand: all imports, a kernel loaded.

Imported by that server alone.
"""

import gc
import importlib

from tapeline.readiness import ready

for name in (
    "pytest",
    "tapeline.cli",
    "tapeline.testing",
    "alembic.command",
    "optuna",
    "psycopg",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.orm",
):
    importlib.import_module(name)
ready()
gc.freeze()  # a collection in a fork would copy the pages of all that was imported
