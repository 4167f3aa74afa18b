"""A finding: one cause of lost time, how much of it, how sure, and the remedy. Ranked so that nothing counts twice."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.account.remedy import Remedy
from headway.diagnose.remedies import predict

SURE = 0.0005  # share of the time below which nothing is surely won: it is printed as 0.0 %
# The same seconds measured in two ways (a wait, and the host code that it is for) differ by this at most.
_SAME = 1.25


@dataclass(frozen=True)
class Finding:
    """One cause of lost time in a window of `wall_ns` nanoseconds.

    Attributes:
        name: stable identifier, e.g. ``host-sync``.
        title: what is wrong, in a few words.
        claims: class of time → ns that the cause may hold of it. Their sum is the upper bound of the gain.
        lower_ns: what is surely won: the upper bound with the next bottleneck put back in.
        wall_ns: the window that the times are of.
        evidence: event names, counts, ranks, steps: what was seen, one fact a line.
        check: a quick way to see for oneself that this is the cause.
        remedy: name of a registered remedy (`headway.diagnose.remedies`).
        within: name of the finding that holds this one's time already; it is then shown below it, not ranked. What is
            longer than that finding is ranked by itself, with what exceeds it (`rank`).
        symptom: what its user notices first, where it is one of SYMPTOMS.
        gain_known: False for a cause whose price cannot be told from what was read.
        change: run-file keys and exact values, where what was read says more than the registered remedy.
        recorded_ns: what recording a trace took of the window beside the claims, at most: an ordinary step has none of
            it, so the upper bound is a share of what is left. None where nobody has asked yet (`diagnose.recording`).
    """

    name: str
    title: str
    claims: Mapping[str, int]
    lower_ns: int
    wall_ns: int
    evidence: tuple[str, ...]
    check: str
    remedy: str
    within: str = ""
    symptom: str = ""
    gain_known: bool = True
    change: Mapping[str, Any] = field(default_factory=dict)
    recorded_ns: int | None = None

    def __post_init__(self) -> None:
        if min(self.claims.values(), default=0) < 0 or self.lower_ns < 0:
            raise ValueError(f"finding {self.name}: a gain is never negative")
        if self.lower_ns > self.upper_ns:
            raise ValueError(f"finding {self.name}: the lower bound {self.lower_ns} exceeds {self.upper_ns} ns")
        if self.symptom and self.symptom not in SYMPTOMS:
            raise ValueError(f"finding {self.name}: {self.symptom!r} is no known symptom")

    @property
    def upper_ns(self) -> int:
        return sum(self.claims.values())

    @property
    def of_trace(self) -> bool:
        """Whether a run's periodic trace shows it, scaled to all of the run's steps (`diagnosis.scaled_to`)."""
        return any(path.startswith(OF_TRACE) for path in self.claims)

    @property
    def gain(self) -> tuple[float, float]:
        """Share of the window won back, (low, high), 0 to 1."""
        if not self.wall_ns:
            return 0.0, 0.0
        ordinary = max(1, self.wall_ns - (self.recorded_ns or 0))
        return min(1.0, self.lower_ns / self.wall_ns), min(1.0, self.upper_ns / ordinary)

    def proposal(self) -> Remedy:
        """The registered remedy with this finding's gain and evidence."""
        return predict(self.remedy, self.gain, self.evidence, self.change)

    def to_dict(self) -> dict[str, Any]:
        remedy = self.proposal()
        low, high = self.gain
        return {
            "name": self.name,
            "title": self.title,
            "gain": {"low": low, "high": high, "known": self.gain_known},
            "low_ns": self.lower_ns,
            "high_ns": self.upper_ns,
            "claims": dict(self.claims),
            "recorded_ns": self.recorded_ns or 0,
            "evidence": list(self.evidence),
            "check": self.check,
            "symptom": self.symptom,
            "within": self.within,
            "remedy": {
                "name": remedy.name,
                "change": dict(remedy.change),
                "setting": remedy.setting,
                "shrinks": list(remedy.shrinks),
                "check": remedy.check,
            },
        }


OF_TRACE = "trace."
"""Before each class of time that a run's finding has from the run's newest trace."""

SYMPTOMS = (
    "low utilisation with full memory",
    "communication share too high",
    "unstable step time",
    "slower convergence after gradient compression",
    "multi-node collapse",
    "high first-token latency",
)
"""What people notice first. Each is reachable from real inputs and leads to causes (docs/diagnose.md)."""


def rank(findings: Iterable[Finding], available: Mapping[str, int]) -> list[Finding]:
    """Findings by what is surely won, most first; each followed by those that lie within it.

    Where findings claim more of a class than there is (`available`, ns), all claims on it shrink in proportion:
    overlapping causes are rescaled, never added. A class that `available` does not name holds whatever is claimed.
    """
    top = _placed(list(findings))
    claimed: Counter[str] = Counter()
    for item in top:
        if not item.within:
            claimed.update(item.claims)
    scale = {
        path: min(1.0, available[path] / total) if total else 1.0
        for path, total in claimed.items()
        if path in available
    }
    scaled = [_scaled(item, scale) for item in top]
    ordered = sorted((item for item in scaled if not item.within), key=_order)
    result: list[Finding] = []
    for item in ordered:
        result.append(item)
        result += sorted((below for below in scaled if below.within == item.name), key=_order)
    return result


def _placed(items: list[Finding]) -> list[Finding]:
    """Each within the outermost finding that holds it. What is longer than that one is no part of it: it stands alone,
    with what exceeds it, so that no second counts twice."""
    by_name = {item.name: item for item in reversed(items)}
    placed = []
    for item in items:
        chain = [item]
        while (outer := by_name.get(chain[-1].within)) is not None and outer not in chain:
            chain.append(outer)
        top: Finding = chain.pop()
        longer_than: Finding | None = None
        for part in reversed(chain):
            if part.upper_ns > _SAME * top.upper_ns:
                top, longer_than = part, top
        if top is not item:
            placed.append(dataclasses.replace(item, within=top.name))
        else:
            placed.append(_beyond(item, longer_than) if longer_than else dataclasses.replace(item, within=""))
    return placed


def _beyond(item: Finding, other: Finding) -> Finding:
    """By itself, with what it claims beyond `other`: of the same classes first, whose claims would shrink else."""
    claims = {path: ns - min(ns, other.claims.get(path, 0)) for path, ns in item.claims.items()}
    left = item.upper_ns - other.upper_ns
    scale = left / max(1, sum(claims.values()))
    claims = {path: int(ns * scale) for path, ns in claims.items() if ns}
    lower = min(int(item.lower_ns * left / item.upper_ns), sum(claims.values()))
    return dataclasses.replace(item, within="", claims=claims, lower_ns=lower)


def _order(item: Finding) -> tuple[bool, int, int, str]:
    return (not item.gain_known, -item.lower_ns, -item.upper_ns, item.name)


def _scaled(item: Finding, scale: Mapping[str, float]) -> Finding:
    claims = {path: int(ns * scale.get(path, 1.0)) for path, ns in item.claims.items()}
    upper = sum(claims.values())
    lower = int(item.lower_ns * upper / item.upper_ns) if item.upper_ns else 0
    return dataclasses.replace(item, claims=claims, lower_ns=min(lower, upper))


def top_remedies(findings: Iterable[Finding], count: int = 3) -> list[tuple[Remedy, list[Finding]]]:
    """The remedies of the first findings, each once with the gains of all findings that it answers added up.

    Where one of them wins something for sure, those that only may are left out: the findings name them.
    Added gains are of different time already (see `rank`), so they may be added.
    """
    groups: dict[str, list[Finding]] = {}
    for item in findings:
        if not item.within:
            groups.setdefault(item.remedy, []).append(item)
    result = []
    for name, items in groups.items():
        low = min(1.0, sum(item.gain[0] for item in items))
        high = min(1.0, sum(item.gain[1] for item in items))
        evidence = tuple(line for item in items for line in item.evidence)
        change = next((item.change for item in items if item.change), {})
        result.append((predict(name, (low, high), evidence, change), items))
    result.sort(key=lambda pair: (-pair[0].gain[0], -pair[0].gain[1]))
    sure = [pair for pair in result if pair[0].gain[0] >= SURE or not all(one.gain_known for one in pair[1])]
    return (sure if result and result[0][0].gain[0] >= SURE else result)[:count]
