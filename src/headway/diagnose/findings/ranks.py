"""Stragglers: one rank that is always last, or a different one each time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.findings.host_busy import STEPS_WORK
from headway.diagnose.view import ms

NOTABLE, CONSTANT = 0.03, 0.6
_LEAST = 3  # collectives, and steps
_MANY = 1000  # collectives: more than a step of a large sharded model has
_ALWAYS = 0.9
_CODE = "host code: "
# What every rank runs in a step; more of it on one rank is no code of its own.
_EVERYBODYS = re.compile(rf"{STEPS_WORK}|^headway\.(?:compute|comm)", re.IGNORECASE)
# How to see that what a rank does meanwhile is the cause: its own code, or a category of its account.
LEAVE_OUT = "leave `{code}` out on rank {rank} for a few steps: the others' wait goes with it"
COMPARE = "compare `{code}` of the ranks (ranks/*.jsonl): with rank {rank}'s like the others', their wait is gone"
# A rank is called the slow one only where equal ranks would hardly ever give such a count.
_CHANCE = 0.05


def find(case: Case) -> Iterator[Finding]:
    found = case.job.comparison
    if found is None or found.refused or len(found.matched) < _LEAST:
        return
    wall = case.view.wall_ns
    waits = sorted(found.wait_ns.values())
    waited = waits[len(waits) // 2] if waits else 0
    if waited < NOTABLE * wall:
        return
    doing = {rank: ", ".join(f"{what} {ms(ns)}" for what, ns in sorted(did.items(), key=lambda x: -x[1])[:3])
             for rank, did in found.doing.items()}  # fmt: skip
    own = {rank: code for rank, did in found.doing.items() if (code := _own_code(did))}
    steps = min(len(rank.device().steps.rows) for rank in case.job.ranks) or None
    yield straggler(found.last_arrivals, waited, found.caused_ns, wall, doing, "collective", own, steps)


def _own_code(did: Mapping[str, int]) -> str:
    """The host code that fills most of a late rank's time, where it fills half of it; "" where the device computes."""
    code = {what.removeprefix(_CODE): ns for what, ns in did.items() if what.startswith(_CODE)}
    code = {what: ns for what, ns in code.items() if not _EVERYBODYS.search(what)}
    whole = sum(ns for what, ns in did.items() if not what.startswith(_CODE)) or sum(did.values())
    if not code or 2 * did.get("compute", 0) >= whole:
        return ""
    name, ns = max(code.items(), key=lambda item: item[1])
    return name if 2 * ns >= whole else ""


def straggler(
    last: Mapping[int, int],
    waited: int,
    caused: Mapping[int, int],
    wall_ns: int,
    doing: Mapping[int, str],
    what: str,
    own_code: Mapping[int, str],
    steps: int | None,
    check: str = LEAVE_OUT,
) -> Finding:
    """A constant or a wandering straggler, from how often each rank came last and the others' wait that it caused (ns).

    `own_code` names what a rank's host does meanwhile, where that explains it, and `check` how to see that; `steps` is
    how many were seen (None where the trace names none): what is last in every collective of one step was late once.

    Upper bound: the typical rank's wait. Surely won: the slowest rank's part of it, were the next slowest last instead
    (constant); a wandering straggler's cause is on no rank, so that half is put back.
    """
    times = sum(last.values())
    slow, count = max(last.items(), key=lambda item: (item[1], -item[0]))
    others = sorted((ns for rank, ns in caused.items() if rank != slow), reverse=True)
    whole = max(1, sum(caused.values()))
    constant = count >= CONSTANT * times and _by_chance(count, times, max(2, len(caused))) < _CHANCE
    if constant:
        left = others[0] / whole if others else 0.0
        share = caused.get(slow, 0) / whole
        lower = int(waited * max(0.0, share - left))
    else:
        lower = waited // 2
    if constant:
        evidence = [
            f"rank {slow} is last in {count:,} of {times:,} {what}s",
            f"the other ranks wait {ms(waited)} ({waited / wall_ns:.1%}) for it",
        ]
    else:
        most = sorted(last.items(), key=lambda item: -item[1])[:6]
        evidence = [
            f"last by {what}: " + ", ".join(f"rank {rank} {number:,}×" for rank, number in most),
            f"a typical rank waits {ms(waited)} ({waited / wall_ns:.1%}) for others",
        ]
    if doing.get(slow):
        evidence.append(f"meanwhile rank {slow}: {doing[slow]}")
    few = steps < _LEAST if steps is not None else times < _MANY
    seen = f"{steps} step{'s' * (steps > 1)}" if steps is not None else f"{times:,} {what}s (the traces name no steps)"
    if few:
        evidence.append(f"seen in {seen}: record some more, to tell a habit from an accident")
    elif steps is None:
        evidence.append(f"judged by {seen}")
    always = constant and not few and count >= _ALWAYS * times
    # A host is not to be blamed for what its program does, nor for what happened once.
    by_code = bool(own_code.get(slow))
    return Finding(
        name="straggler-constant" if constant else "straggler-wandering",
        title=_title(slow, always, constant),
        claims={"straggler": waited},
        lower_ns=min(lower, waited),
        wall_ns=wall_ns,
        evidence=tuple(evidence),
        check=check.format(code=own_code[slow], rank=slow)
        if by_code
        else "swap the slow rank's host with another: the fault moves with the host or stays with the rank's data",
        remedy="balance-ranks" if not constant else "mend-rank" if by_code or few else "replace-rank",
        symptom="unstable step time" if not constant else "",
    )


def _title(slow: int, always: bool, constant: bool) -> str:
    if not constant:
        return "another rank is slow each time"
    return f"rank {slow} is always the slow one" if always else f"rank {slow} comes last most often"


def _by_chance(count: int, times: int, ranks: int) -> float:
    """Probability, at most, that one of `ranks` equal ranks comes last `count` times or more of `times`."""
    share = 1 / ranks
    tail = sum(math.comb(times, k) * share**k * (1 - share) ** (times - k) for k in range(count, min(times, 400) + 1))
    return min(1.0, ranks * tail) if times <= 400 else 0.0
