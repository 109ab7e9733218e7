"""A training without torch: its ranks beat, wait for each other, save and resume as real ones."""

import json
import sys
from pathlib import Path

from tapeline.clock import SystemClock
from tapeline.files import read_journal
from tapeline.supervise.alerts import Alerts
from tapeline.supervise.elastic import Ranks
from tapeline.supervise.job import Job, Rules
from tapeline.supervise.monitor import HangLimits
from tapeline.supervise.nodes import Node
from tapeline.supervise.policy import Policy
from tapeline.supervise.standby import Standby
from tapeline.supervise.supervisor import Supervisor

TRAINER = '''
"""trainer.py RUN STEPS: state k is the hash of state k − 1; every tenth is saved.

`faults.json` beside it holds [attempt, rank, step, what]: what happens before that step.
"""
import json, os, signal, sys, time
from hashlib import sha256
from pathlib import Path
from tapeline.clock import utc
from tapeline.files import Journal, read_journal
from tapeline.ledger import Ledger, heartbeat_path, read_heartbeat
from tapeline.world import World

run, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TAPELINE_ATTEMPT"])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
faults = run.parent / "faults.json"
faults = json.loads(faults.read_text()) if faults.exists() else []

def steps_saved():
    for path in sorted((run / "checkpoints").glob("step-*/manifest.json"), reverse=True):
        try:
            saved = json.loads(path.read_text())
            assert saved["state"] == sha256(saved["file"].encode()).hexdigest()
            yield saved["step"], saved["state"]
        except (ValueError, KeyError, AssertionError):
            print(f"passed over {path}", file=sys.stderr)

def save(step, state, before):
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / ".new"
    new.write_text(json.dumps({"step": step, "state": state, "file": before}))
    new.replace(folder / "manifest.json")

begin, state = next(steps_saved(), (0, "begin"))
before = ""
note = run / f".attempt-{attempt}"
if rank == 0:
    (run / "run.json").write_text("{}")
    with Journal(run / "attempts.jsonl") as journal:
        journal.append({"attempt": attempt, "started": utc(time.time_ns()), "from_step": begin})
    note.with_suffix(".new").write_text(json.dumps([begin, state]))
    note.with_suffix(".new").replace(note)
while not note.exists():
    time.sleep(0.001)
begin, state = json.loads(note.read_text())
ledger = Ledger(run, world=World(rank, size), attempt=attempt, from_step=begin)

def wait_for_all(step):
    for other in range(size):
        while True:
            beat = read_heartbeat(heartbeat_path(run, other))
            if beat and beat.attempt == attempt and beat.step >= step:
                break
            if told:
                return
            time.sleep(0.0005)

for step in range(begin, steps):
    ledger.switch("compute")
    for when, who, at, what in faults:
        if (when in (attempt, 0)) and who == rank and at in (step, "each"):
            if what == "raise":
                raise ValueError(f"the loss of step {step} is no number")
            if what == "leave":
                sys.exit(75)
            if what == "refuse":
                print("tapeline: no such thing", file=sys.stderr)
                sys.exit(2)
            if what == "lose slot":
                (run.parent / "lost").touch()
                what = "SIGKILL"
            if what == "mortal":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                continue
            if what == "slow":
                time.sleep(0.1)
                continue
            os.kill(os.getpid(), getattr(signal, what))
    time.sleep(0.002)
    ledger.switch("communication")
    wait_for_all(step)
    if told:
        if rank == 0:
            save(step, state, before)
        print("stopped", file=sys.stderr)
        sys.exit(75)
    before, state = state, sha256(state.encode()).hexdigest()
    ledger.step_done(step + 1)
    if rank == 0 and (step + 1) % 10 == 0:
        save(step + 1, state, before)
if rank == 0:
    with Journal(run / "attempts.jsonl") as journal:
        journal.append({"attempt": attempt, "ended": utc(time.time_ns()), "how": "finished"})
    print(json.dumps({"state": state, "ranks": size}))
    print("all steps done", file=sys.stderr)
'''


def state_after(steps):
    """What an undisturbed run ends with."""
    from hashlib import sha256

    state = "begin"
    for _ in range(steps):
        state = sha256(state.encode()).hexdigest()
    return state


def plan(folder, *faults):
    """Write the trainer and what is to happen to it: (attempt, rank, step, what).

    Attempt 0: in each of them; step "each": before each.
    """
    (folder / "trainer.py").write_text(TRAINER)
    (folder / "faults.json").write_text(json.dumps(faults))


def supervisor(
    folder, ranks, steps=60, *, engine=None, said=None, hang=None, node=None, alert=None, **rules
):
    """A supervisor of the trainer in a folder, its alerts in `said` and by a command."""
    run = folder / "run"
    command = (str(folder / "trainer.py"), str(run), str(steps))
    rules.setdefault("policy", Policy(base_s=0.01))
    said = said if said is not None else []
    return Supervisor(
        Job(run, command, command, Ranks.parse(ranks), node=node or Node()),
        Rules(
            hang=hang or HangLimits(floor_s=1.0, unlearned_s=20.0, slow_unlearned_s=20.0), **rules
        ),
        engine or Standby(run, ("tapeline.ledger",)),
        Alerts(said.append, SystemClock(), alert),
        SystemClock(),
    )


def ended(folder):
    """The supervisor's history."""
    return read_journal(folder / "run/supervise/history.jsonl")


def main(folder, ranks, steps, *node):
    """Supervise as a process of its own; on one machine of several, by its index and number."""
    node = Node(*map(int, node)) if node else None
    outcome = supervisor(Path(folder), ranks, int(steps), node=node).supervise()
    print(outcome.output, end="")
    print(*outcome.said, sep="\n", file=sys.stderr)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
