"""The page of a ledger without a run: where the time of a loop of one's own went.

Covers what a ledger alone can tell. Without a run there are no losses, no record and no verdict.
"""

from __future__ import annotations

from pathlib import Path

from tapeline.ledger import Account, RankLedger
from tapeline.report.page import Page, Section
from tapeline.report.run_times import step_parts, step_times, timeline_row, where_the_time_went
from tapeline.report.time_figures import timeline_figure


def ledger_page(folder: Path, ledgers: list[RankLedger], account: Account) -> Page:
    """The page of the ledgers in `folder`, and of the account of them."""
    rows = [timeline_row(account, ledgers, rank) for rank in account.ranks]
    lives = max(len(rank.lives) for rank in account.ranks)
    over_time = Section(
        "Attempts",
        "What each rank did, when. Steps that were done again, and starts after a failure, count "
        "as lost; time in which the loop was over is left out.",
        figure=timeline_figure(rows, [], []),
        alt=f"{lives} attempts of {len(rows)} ranks over time.",
    )
    return Page(
        title=f"ledger {folder.resolve().name}",
        summary=f"In `{folder}`, {account.in_words()}",
        sections=[
            where_the_time_went(account),
            over_time,
            *step_parts(account),
            *step_times(ledgers),
        ],
    )
