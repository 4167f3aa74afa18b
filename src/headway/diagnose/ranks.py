"""Ranks against each other: who came late to which collective, what that cost the others, and what it did meanwhile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from headway.account.account import Account
from headway.account.intervals import EMPTY, Intervals, clip, intersect, measure, union
from headway.account.tree import STEP, UNACCOUNTED
from headway.diagnose.facts import (
    NONE,
    Collective,
    DeviceFacts,
    HostKind,
    MatchedCollective,
    RankComparison,
    RankFacts,
)
from headway.diagnose.shares import covered, of_events
from headway.diagnose.steps import shares_of

# Every rank of these leaves when the slowest has given its part, so that their ends bring clocks together.
_SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_NEGATIVE_NS = -50_000
_SAME_CLOCK_NS = 20_000
_NEGATIVE_SHARE = 0.05
_FRAMES = ("ProfilerStep#", "gloo:", "nccl:")  # what frames everything, or is the waiting itself
_Key = tuple[str, str, int]


def compare(ranks: Sequence[RankFacts]) -> RankComparison:
    """Matches collectives by (group, collective, elements, order or `Seq`) over the ranks that were read."""
    devices = {rank.rank: rank.device() for rank in ranks}
    base = {rank.rank: rank.base_ns for rank in ranks}
    earliest = min(base.values())
    shift = {rank: value - earliest for rank, value in base.items()}
    groups, unmatched = _match(devices, shift)
    if not groups:
        return RankComparison(unmatched=unmatched, refused="no collective occurs in two of the traces")
    offset = _offsets(groups, shift, len(ranks))
    matched = [_matched(key, members, shift, offset) for key, members in groups]
    symmetric = [item for item in matched if _symmetric(item.name, len(item.ranks), len(ranks))]
    negative = sum(item.transfer_ns < _NEGATIVE_NS for item in symmetric)
    if negative > _NEGATIVE_SHARE * max(len(symmetric), 1):
        return RankComparison(
            unmatched=unmatched,
            offset_ns=offset,
            refused=(
                f"{negative} of {len(symmetric)} collectives would end before the last rank has come: these traces are "
                "not of the same steps, or their clocks drift; no waiting is attributed"
            ),
        )
    waits = _waits(matched, shift, offset, devices)
    return _summed(matched, unmatched, offset, waits, {rank.rank: rank for rank in ranks}, shift)


def _match(
    devices: Mapping[int, DeviceFacts], shift: Mapping[int, int]
) -> tuple[list[tuple[str, list[Collective]]], int]:
    """Collectives that two or more ranks saw, with how many were left alone."""
    by_key: dict[_Key, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, device in devices.items():
        for item in device.collectives:
            by_key[item.group, item.name, item.elements][rank].append(replace(item, rank=rank))
    groups: list[tuple[str, list[Collective]]] = []
    unmatched = 0
    for (group, name, elements), by_rank in by_key.items():
        text = f"{name} {elements if elements != NONE else '?'} {group}".strip()
        numbered = _numbered(by_rank, shift)
        for number, members in sorted(numbered.items()):
            if len(members) > 1:
                groups.append((f"{text} #{number}", members))
            else:
                unmatched += 1
    return groups, unmatched


def _numbered(by_rank: Mapping[int, list[Collective]], shift: Mapping[int, int]) -> dict[int, list[Collective]]:
    """The same number on every rank for the same operation: `Seq` where all have it, else the order, counted from
    whichever end of the traces makes the ends of the operations agree better (a trace may begin in mid-step)."""
    numbered: dict[int, list[Collective]] = defaultdict(list)
    everything = [item for items in by_rank.values() for item in items]
    if all(item.sequence != NONE for item in everything):
        unique = all(len({item.sequence for item in items}) == len(items) for items in by_rank.values())
        if unique:
            for item in everything:
                numbered[item.sequence].append(item)
            return numbered
    most = max(len(items) for items in by_rank.values())
    fewest = min(len(items) for items in by_rank.values())
    from_end = most > fewest and _disagreement(by_rank, shift, True) < _disagreement(by_rank, shift, False)
    for items in by_rank.values():
        ordered = sorted(items, key=lambda item: item.start_ns)
        first = most - len(ordered) if from_end else 0
        for number, item in enumerate(ordered, start=first):
            numbered[number].append(item)
    return numbered


def _disagreement(by_rank: Mapping[int, list[Collective]], shift: Mapping[int, int], from_end: bool) -> float:
    fewest = min(len(items) for items in by_rank.values())
    ends = []
    for rank, items in by_rank.items():
        ordered = sorted(item.end_ns + shift[rank] for item in items)
        ends.append(ordered[-fewest:] if from_end else ordered[:fewest])
    return float(np.median(np.ptp(np.array(ends, np.int64), axis=0)))


def _offsets(groups: Sequence[tuple[str, list[Collective]]], shift: Mapping[int, int], ranks: int) -> dict[int, int]:
    """How far each rank's clock runs ahead of the others', ns, where that is steady: collectives end together.

    A lag that differs from one operation to the next is scheduling, not a clock, and is left alone.
    """
    lags: dict[int, list[float]] = defaultdict(list)
    for _, members in groups:
        if not _symmetric(members[0].name, len(members), ranks):
            continue
        ends = np.array([item.end_ns + shift[item.rank] for item in members], np.int64)
        middle = float(np.median(ends - ends[0])) + int(ends[0])
        for item, end in zip(members, ends.tolist(), strict=True):
            lags[item.rank].append(end - middle)
    offset = dict.fromkeys(shift, 0)
    for rank, values in lags.items():
        middle = float(np.median(values))
        scatter = float(np.median(np.abs(np.array(values) - middle)))
        if len(values) >= 3 and abs(middle) > 4 * scatter + _SAME_CLOCK_NS:
            offset[rank] = round(middle)
    return offset


def _symmetric(name: str, members: int, ranks: int) -> bool:
    """An all-to-all may be written as sends and receives: then all ranks take part, unlike in a pipeline."""
    return name in _SYMMETRIC or (name == "send_recv" and members == ranks and ranks > 2)


def _matched(
    key: str, members: list[Collective], shift: Mapping[int, int], offset: Mapping[int, int]
) -> MatchedCollective:
    ordered = sorted(members, key=lambda item: item.rank)
    move = np.array([shift[item.rank] - offset[item.rank] for item in ordered], np.int64)
    arrival = np.array([item.start_ns for item in ordered], np.int64) + move
    end = np.array([item.end_ns for item in ordered], np.int64) + move
    return MatchedCollective(
        key=key,
        name=ordered[0].name,
        elements=ordered[0].elements,
        ranks=tuple(item.rank for item in ordered),
        arrival=arrival,
        end=end,
        last_rank=ordered[int(np.argmax(arrival))].rank,
    )


_Waits = dict[int, list[tuple[int, Intervals]]]  # rank → (rank it waited for, its exposed wait on its own clock)


def _waits(
    matched: Sequence[MatchedCollective],
    shift: Mapping[int, int],
    offset: Mapping[int, int],
    devices: Mapping[int, DeviceFacts],
) -> _Waits:
    """From a rank's own arrival to the last one's, as far as it is exposed communication inside the rank's window."""
    exposed = {
        rank: of_events(device.events, device.window.start_ns, device.window.end_ns).exposed_comm
        for rank, device in devices.items()
    }
    waits: _Waits = {rank: [] for rank in devices}
    for item in matched:
        last = int(item.arrival.max())
        for rank, arrival in zip(item.ranks, item.arrival.tolist(), strict=True):
            back = shift[rank] - offset[rank]
            span = np.array([[arrival - back, last - back]], np.int64)
            if rank != item.last_rank and last > arrival:
                waits[rank].append((item.last_rank, intersect(_near(exposed[rank], span), span)))
    return waits


def _near(intervals: Intervals, span: Intervals) -> Intervals:
    """Only the intervals that can meet the span: there may be thousands, and thousands of spans."""
    first = int(np.searchsorted(intervals[:, 1], span[0, 0], "right"))
    last = int(np.searchsorted(intervals[:, 0], span[0, 1], "left"))
    return intervals[first:last]


def _summed(
    matched: Sequence[MatchedCollective],
    unmatched: int,
    offset: Mapping[int, int],
    waits: _Waits,
    facts: Mapping[int, RankFacts],
    shift: Mapping[int, int],
) -> RankComparison:
    others = max(len(facts) - 1, 1)
    caused: Counter[int] = Counter()
    for items in waits.values():
        for culprit, intervals in items:
            caused[culprit] += measure(intervals)
    late: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in matched:
        back = shift[item.last_rank] - offset[item.last_rank]
        arrival = sorted(item.arrival.tolist())
        late[item.last_rank].append((arrival[len(arrival) // 2 - 1] - back, arrival[-1] - back))
    return RankComparison(
        matched=tuple(matched),
        unmatched=unmatched,
        last_arrivals=dict(Counter(item.last_rank for item in matched)),
        wait_ns={rank: measure(_joined(items)) for rank, items in waits.items()},
        caused_ns={rank: caused[rank] // others for rank in facts},
        offset_ns=dict(offset),
        transfer_ns=sum(max(item.transfer_ns, 0) for item in matched),
        doing={rank: _doing(facts[rank], union(np.array(spans, np.int64))) for rank, spans in late.items()},
    )


def _joined(items: Sequence[tuple[int, Intervals]]) -> Intervals:
    return union(np.concatenate([intervals for _, intervals in items])) if items else EMPTY


def _doing(facts: RankFacts, spans: Intervals) -> dict[str, int]:
    """What a late rank did between the middle arrival and its own, ns: device shares, and host code by name."""
    device = facts.device()
    spans = clip(spans, device.window.start_ns, device.window.end_ns)
    totals: Counter[str] = Counter()
    for start, end in spans.tolist():
        parts = shares_of(device.events, device.gaps, start, end) if device.kind == "gpu" else None
        if parts is not None:
            totals.update(
                {"compute": parts.compute_ns, "communication": parts.exposed_comm_ns, "copy": parts.exposed_mem_ns}
            )
            totals.update({f"idle: {name}": ns for name, ns in parts.idle.items()})
    host = facts.host
    named = host.kind == HostKind.ANNOTATION
    if not named.any():
        named = host.kind == HostKind.OP
    rows = np.flatnonzero(named)
    overlap = covered(spans, host.start[rows], host.end[rows])
    by_name: Counter[str] = Counter()
    for row, ns in zip(rows[overlap > 0].tolist(), overlap[overlap > 0].tolist(), strict=True):
        name = facts.names[host.name[row]]
        if not name.startswith(_FRAMES):
            by_name[f"host code: {name}"] += ns
    totals.update(dict(by_name.most_common(5)))
    return {name: ns for name, ns in totals.most_common() if ns}


def with_stragglers(ranks: Sequence[RankFacts], comparison: RankComparison) -> tuple[RankFacts, ...]:
    """Moves the exposed wait for late ranks from `comm` to `straggler` in the account of each rank's device."""
    changed = []
    for rank in ranks:
        waited = comparison.wait_ns.get(rank.rank, 0)
        device = rank.device()
        parts = {path: ns for path, ns in device.account.parts.items() if path != UNACCOUNTED}
        parts["straggler"] = min(waited, parts.get("comm", 0))
        parts["comm"] = parts.get("comm", 0) - parts["straggler"]
        account = Account.close(STEP, device.account.wall_ns, parts)
        devices = tuple(replace(item, account=account) if item is device else item for item in rank.devices)
        changed.append(replace(rank, devices=devices))
    return tuple(changed)
