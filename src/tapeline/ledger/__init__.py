"""The ledger: where every second of every rank went, and the account that adds it up. No torch.

Writing, in anyone's loop (`Ledger` says how a checkpoint and an evaluation are named):

    with Ledger(folder, from_step=step_of_the_loaded_checkpoint) as ledger:
        for step, batch in enumerate(ledger.batches(loader), 1):
            train_step(batch)
            ledger.step_done(step)

Reading, of a live run or a dead one:

    account = account_of(run_folder, price_per_hour=2.50)
    account.goodput, account.ettr, account.cost(), account.as_dict()
    account.job.buckets_ns["starved"]            of all ranks together
    account.ranks[0].lives[1].times.buckets_ns   of one attempt of one rank

    ledgers = read_ledgers(run_folder)           one a rank
    timeline(ledgers[0], ledgers)                segments of each attempt, for a picture
    for second in ledgers[0].step_times():       distributions of the times of steps
        second.times.quantile_ns(0.99), second.own.quantile_ns(0.5)
    read_heartbeat(heartbeat_path(run_folder, 0))   attempt, step, phase, when
"""

from tapeline.ledger.account import (
    LOSSES,
    Account,
    LifeAccount,
    RankAccount,
    Times,
    account,
    account_of,
)
from tapeline.ledger.device import DeviceTimer, Overlap
from tapeline.ledger.heartbeat import Beat, Heartbeat, read_heartbeat
from tapeline.ledger.histogram import Histogram, bin_edges_ns, bin_of
from tapeline.ledger.phases import BUCKET_OF, BUCKETS, PHASES
from tapeline.ledger.reading import (
    Attempt,
    RankLedger,
    StepTimes,
    read_attempts,
    read_ledger,
    read_ledgers,
    step_times_after,
)
from tapeline.ledger.tail import process_began_ns
from tapeline.ledger.timeline import Segment, timeline
from tapeline.ledger.writer import Ledger, heartbeat_path, ledger_path

__all__ = [
    "BUCKETS",
    "BUCKET_OF",
    "LOSSES",
    "PHASES",
    "Account",
    "Attempt",
    "Beat",
    "DeviceTimer",
    "Heartbeat",
    "Histogram",
    "Ledger",
    "LifeAccount",
    "Overlap",
    "RankAccount",
    "RankLedger",
    "Segment",
    "StepTimes",
    "Times",
    "account",
    "account_of",
    "bin_edges_ns",
    "bin_of",
    "heartbeat_path",
    "ledger_path",
    "process_began_ns",
    "read_attempts",
    "read_heartbeat",
    "read_ledger",
    "read_ledgers",
    "step_times_after",
    "timeline",
]
