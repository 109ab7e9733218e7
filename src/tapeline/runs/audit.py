"""Can a run be repeated: every obstacle to an exact re-run, and the sentence that may be published.

An obstacle leaves a re-run bit-exact under a condition, equal in distribution only, or impossible.
What is judged is the record, and whether this machine and the data are still what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tapeline.errors import StoreError
from tapeline.runs.diff import RunFacts
from tapeline.runs.facts import CHANGES_BITS, lost_code, surrounding_changes
from tapeline.runs.folder import RunFolder
from tapeline.runs.record import surroundings
from tapeline.runs.secrecy import HIDDEN
from tapeline.runs.spread import Spread
from tapeline.runs.unkeyed import Draw, unkeyed_draws
from tapeline.store import Shards
from tapeline.words import percent

Leaves = Literal["bit-exact", "statistical", "nothing"]
_ORDER: tuple[Leaves, ...] = ("nothing", "statistical", "bit-exact")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something in the way of an exact re-run.

    Attributes:
        what: in a few words.
        leaves: what a re-run can still be.
        change: what to do about it.
    """

    what: str
    leaves: Leaves
    evidence: str
    change: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Whether a run can be repeated.

    Attributes:
        verdict: the least that any obstacle leaves.
        obstacles: the worst first.
        leave_alone: what the bits depend on.
        sentence: what may be published.
    """

    run: str
    verdict: Leaves
    obstacles: tuple[Obstacle, ...]
    leave_alone: tuple[str, ...]
    sentence: str


def audit_run(path: Path, *, spread: Spread | None = None, verify: bool = True) -> Audit:
    """Audit a run from its folder, on this machine.

    Args:
        spread: of the validation loss of replicates, if there are any.
        verify: compare the data's bytes with their hashes; else its fingerprint alone.

    Raises:
        RunError: the folder isn't that of a run, or its record is damaged.
    """
    run = RunFolder(path)
    facts = RunFacts.read(run)
    last = max((int(life.get("step", 0)) for life in facts.lives), default=0)
    sources = [s["file"] for s in facts.record.get("sources", {}).values() if s]
    return judge(
        str(path),
        facts,
        here=surroundings(),
        data=data_fault(facts.record, verify=verify),
        draws=[draw for file in sources for draw in unkeyed_draws(Path(file))],
        saved=run.origin(last),
        spread=spread,
    )


def judge(
    path: str,
    facts: RunFacts,
    *,
    here: Mapping[str, Any],
    data: Obstacle | None,
    draws: Sequence[Draw],
    saved: Mapping[str, Any],
    spread: Spread | None,
) -> Audit:
    """Judge what was read; pure.

    Args:
        here: what this process runs in, as `surroundings` has it.
        data: what is wrong with the data.
        draws: unkeyed ones in the sources.
        saved: what the last checkpoint says of itself, as `RunFolder.origin` has it.
    """
    obstacles = [
        *_code(facts.record),
        *([data] if data else []),
        *_draws(draws, num_lives=len(facts.lives)),
        *_packages(facts.record),
        *_contract(facts, saved),
        *_here(facts.record, here),
    ]
    obstacles.sort(key=lambda one: _ORDER.index(one.leaves))
    verdict = obstacles[0].leaves if obstacles else "bit-exact"
    alone = tuple(_leave_alone(facts.record))
    sentence = _sentence(facts.record, verdict, obstacles, spread)
    return Audit(path, verdict, tuple(obstacles), alone, sentence)


def data_fault(record: Mapping[str, Any], *, verify: bool) -> Obstacle | None:
    """What is wrong with the data of a run, if anything; sessions that came later are told."""
    store, data = record["config"]["data"]["store"], record["data"]
    keys = frozenset(data["session_names"])
    fix = "Restore the data with this fingerprint, and give its place if it was moved"
    try:
        shards = Shards(store)
        if (found := shards.index.fingerprint_of(keys)) != data["fingerprint"]:
            said = f"{store} has fingerprint {found} over the run's sessions"
            said += f", the run had {data['fingerprint']}"
            return Obstacle("other data", "nothing", said, fix)
        changed = shards.verify() if verify else []
    except StoreError as error:
        hidden = " (its credentials were not recorded)" if HIDDEN in store else ""
        return Obstacle("data out of reach", "nothing", f"{error}{hidden}", fix)
    if changed:
        return Obstacle("changed data", "nothing", str(changed[0]), fix)
    if later := len(shards) - len(keys):
        said = f"{store} holds the run's {len(keys)} sessions and {later} that came later"
        change = "Re-run on a store of the run's sessions alone"
        return Obstacle("later sessions", "bit-exact", said, change)
    return None


def _code(record: Mapping[str, Any]) -> list[Obstacle]:
    found = []
    checkouts = [record.get("code", {}), *record.get("other_code", ())]
    for code in checkouts:
        of = f"the checkout {code.get('folder') or 'of the working folder'}"
        if code.get("state") == "unknown":
            change = "Make git work where the run is started, and train again"
            found.append(Obstacle("code unknown", "nothing", f"{of}: {code['problem']}", change))
        elif code.get("state") == "dirty":
            found.append(_dirty(code, of))
        found += [
            Obstacle(
                "submodule",
                "nothing" if module["state"] != "another commit" else "bit-exact",
                f"{module['path']} in {of} is {module['state']}",
                "Commit the submodule, and its commit in the checkout around it",
            )
            for module in code.get("submodules", ())
            if module["state"] != "clean"
        ]
    folders = [f"{code['folder']}/" for code in checkouts if code.get("folder")]
    for name, source in record.get("sources", {}).items():
        if source is None:
            said = f"the source of {name} wasn't found"
        elif source["package"] or any(source["file"].startswith(one) for one in folders):
            continue
        else:
            said = f"{source['file']} is in no repository; only its hash is recorded"
        found.append(Obstacle("code not kept", "nothing", said, "Put the model under git"))
    return found


def _dirty(code: Mapping[str, Any], of: str) -> Obstacle:
    lost = [f"{path} ({why})" for path, why in lost_code(code).items()]
    number = code["changed"] + code["untracked"]
    plural = "files differ" if number > 1 else "file differs"
    said = f"{of}: {number} {plural} from {(code['commit'] or 'no commit')[:12]}"
    if lost or not code["commit"]:
        why = f"; not in the record: {', '.join(lost)}" if lost else "; there is no commit"
        return Obstacle("code not kept", "nothing", said + why, "Commit, and train again")
    return Obstacle(
        "dirty code", "bit-exact", f"{said}; the patch is in the record", "Commit before training"
    )


def _draws(draws: Sequence[Draw], *, num_lives: int) -> list[Obstacle]:
    found = []
    for draw in draws:
        said = f"{draw.where} calls {draw.call}"
        change = "Draw with torch, whose generators are keyed by the step"
        if not draw.seeded:
            found.append(Obstacle("unkeyed draw", "statistical", f"{said}, unseeded", change))
        elif num_lives > 1:
            said += f"; the run has {num_lives} lives, and each began that generator anew"
            found.append(Obstacle("unkeyed draw", "statistical", said, change))
        else:
            said += ", which is seeded at the start and isn't saved"
            found.append(Obstacle("unkeyed draw", "bit-exact", f"{said}: don't resume", change))
    return found


def _packages(record: Mapping[str, Any]) -> list[Obstacle]:
    environment = record.get("environment")
    if not environment or not environment.get("packages"):
        said, change = "the record names no packages", "Train again with this version of tapeline"
        return [Obstacle("packages unknown", "statistical", said, change)]
    return [
        Obstacle(
            "package not from an index",
            "statistical",
            f"{name} {environment['packages'].get(name, '')} came from {origin['url']}",
            "Install a released version, or a commit of its repository",
        )
        for name, origin in environment["origins"].items()
        if not origin["editable"] and not origin["commit"]
    ]


def _contract(facts: RunFacts, saved: Mapping[str, Any]) -> list[Obstacle]:
    record, found = facts.record, []
    determinism = record.get("determinism", {})
    change = "Start another run; this one's bits depend on what happened to it"
    if not determinism.get("deterministic_algorithms") or determinism.get("warn_only"):
        said = "torch was free to use operations that aren't repeatable"
        found.append(Obstacle("non-deterministic operations", "statistical", said, change))
    lives = [life.get("record") or {} for life in facts.lives]
    contracts = [record.get("contract"), *(one.get("contract") for one in lives)]
    given_up = [*contracts, saved.get("contract")]
    texts = {c["text"] for c in given_up if c and c.get("scope") == "statistical"}
    found += [Obstacle("contract given up", "statistical", text, change) for text in sorted(texts)]
    sizes = sorted({life["world_size"] for life in facts.lives if life.get("world_size")})
    scope = (record.get("contract") or {}).get("scope")
    if scope == "at this world size" and len(sizes) > 1 and not texts:
        said = f"its lives had {', '.join(map(str, sizes))} ranks, and the contract holds at one"
        change = "Train with lanes, or on one number of ranks"
        found.append(Obstacle("world size changed", "statistical", said, change))
    for life in facts.lives:
        origin = (life.get("record") or {}).get("origin") or {}
        if origin.get("run") not in (None, facts.identity):
            said = f"life {life['attempt']} began from a checkpoint of {origin['run']}"
            change = "Keep that checkpoint with the run, or train from the beginning"
            found.append(Obstacle("foreign checkpoint", "nothing", said, change))
    return found


def _here(record: Mapping[str, Any], here: Mapping[str, Any]) -> list[Obstacle]:
    """What of this machine would make other bits."""
    return [
        Obstacle(
            "this machine",
            "statistical",
            f"{one.what} is {one.after} here, was {one.before}",
            "Re-run where it is what it was",
        )
        for one in surrounding_changes({**record, "data": {}, "determinism": {}}, here)
        # What torch says of itself isn't known before it is imported.
        if one.weight >= CHANGES_BITS
        and not one.what.startswith("environment.torch.")
        and one.after != "unknown"
    ]


def _leave_alone(record: Mapping[str, Any]) -> list[str]:
    training, determinism = record["config"]["training"], record.get("determinism", {})
    found = [
        f"the seed, {record['config']['seed']}",
        f"training.threads = {training['threads']}: another number sums in another order",
        f"the data: fingerprint {record.get('data', {}).get('fingerprint')}",
        f"torch {determinism.get('torch')}",
        f"the processor: {_platform(record)}",
    ]
    if training["lanes"] > 1:
        found.append(f"training.lanes = {training['lanes']}; ranks may be 1 to that many")
    else:
        found.append(f"the number of ranks, {record.get('world_size', 1)}")
    return found


def _platform(record: Mapping[str, Any]) -> str:
    machine, determinism = record.get("machine", {}), record.get("determinism", {})
    device = machine.get("device", "cpu")
    name = machine.get("processor", "unknown") if device in ("cpu", "unknown") else device
    capability = determinism.get("cpu_capability")
    return f"{name} ({capability})" if capability else str(name)


def _sentence(
    record: Mapping[str, Any],
    verdict: Leaves,
    obstacles: Sequence[Obstacle],
    spread: Spread | None,
) -> str:
    worst = list(dict.fromkeys(one.evidence for one in obstacles if one.leaves == verdict))
    if verdict == "nothing":
        return f"This result can't be re-created: {'; '.join(worst)}."
    if verdict == "statistical":
        told = (
            _of_seeds(spread)
            if spread
            else "how far seeds spread it isn't known: train them with `tapeline replicate`"
        )
        return f"Not bit-exact, since {'; '.join(worst)}. Validation loss: {told}."
    determinism, scope = record.get("determinism", {}), (record.get("contract") or {}).get("scope")
    ranks = record.get("world_size", 1)
    lanes = record["config"]["training"]["lanes"]
    at = f"1 to {lanes} ranks" if scope == "across world sizes" else f"{ranks} rank"
    at += "s" if scope != "across world sizes" and ranks > 1 else ""
    checkouts = [record.get("code", {}), *record.get("other_code", ())]
    commits = dict.fromkeys(code["commit"][:12] for code in checkouts if code.get("commit"))
    patch = " with the recorded patch" if any(o.what == "dirty code" for o in obstacles) else ""
    code = f"code {' and '.join(commits)}{patch}, " if commits else ""
    sentence = (
        f"Bit-exact on {_platform(record)} with torch {determinism.get('torch')}, "
        f"threads = {record['config']['training']['threads']} and {at}: {code}"
        f"data {record.get('data', {}).get('fingerprint')}, seed {record['config']['seed']}."
    )
    return f"{sentence} Over seeds, validation loss: {_of_seeds(spread)}." if spread else sentence


def _of_seeds(spread: Spread) -> str:
    told = (
        f"{spread.mean:.6g} ± {spread.mean_half_width:.2g} ({percent(spread.confidence)} interval "
        f"for the mean) over k = {len(spread.values)} seeds, which covers initialisation and data "
        f"order; a next run falls within ± {spread.next_half_width:.2g}"
    )
    return f"{told}; {spread.num_diverged} more diverged" if spread.num_diverged else told
