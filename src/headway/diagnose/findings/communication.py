"""Communication that compute does not hide: gradients, many small messages, a plan that talks too much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from headway.account.intervals import Intervals, intersect, measure, subtract, union
from headway.diagnose.case import Case
from headway.diagnose.facts import NONE, Collective
from headway.diagnose.finding import Finding
from headway.diagnose.view import View, ms

NOTABLE_EXPOSED, LOW_OVERLAP = 0.05, 0.5
NOTABLE_SMALL, SMALL_BYTES, SMALL_A_STEP = 0.02, 1 << 20, 8
TOO_MUCH = 0.30
GRADIENTS = ("all_reduce", "reduce_scatter", "all_gather")
_BYTES = {
    "Float": 4,
    "float32": 4,
    "Half": 2,
    "BFloat16": 2,
    "bfloat16": 2,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
}


def find(case: Case) -> Iterator[Finding]:
    view = case.view
    exposed = view.device.shares.exposed_comm_ns
    if not exposed or (not view.collectives and exposed < NOTABLE_EXPOSED * view.wall_ns):
        return
    yield from _gradients(view, exposed)
    yield from _small(view)
    yield from _plan(view, exposed, _why_unsure(case))


def _exposed(view: View, items: list[Collective]) -> int:
    """ns of these collectives that nothing else covers."""
    rows: Intervals = np.array([(one.start_ns, one.end_ns) for one in items], np.int64).reshape(-1, 2)
    window = np.array([[view.device.window.start_ns, view.device.window.end_ns]], np.int64)
    return measure(subtract(intersect(union(rows), window), view.union(view.computing)))


def _gradients(view: View, exposed: int) -> Iterator[Finding]:
    """Upper bound: the exposed part. Surely won: what backward's compute has room to hide, less the last bucket."""
    items = [one for one in view.collectives if one.name in GRADIENTS]
    bare = _exposed(view, items) if items else 0
    overlap = view.device.shares.overlap or 0.0
    if bare < NOTABLE_EXPOSED * view.wall_ns or overlap >= LOW_OVERLAP:
        return
    # Backward is about two thirds of compute, and only it can hide gradients.
    room = int(view.device.shares.compute_ns * 2 / 3) - view.device.shares.overlap_ns
    last = view.steps * int(np.median([one.duration_ns for one in items]))
    sizes = sorted({_mib(one) for one in items if one.elements != NONE})
    evidence = [f"{ms(bare)} of {len(items):,} collectives lie bare; overlap is {overlap:.0%}"]
    if sizes:
        least, most = f"{sizes[0]:.3g}", f"{sizes[-1]:.3g}"
        evidence.append(f"messages of {least if least == most else f'{least} to {most}'} MiB")
    yield Finding(
        name="gradient-sync-exposed",
        title="gradient communication is not hidden under backward",
        claims={"comm": min(bare, exposed)},
        lower_ns=max(0, min(bare, exposed, room) - last) if room > 0 else 0,
        wall_ns=view.wall_ns,
        evidence=tuple(evidence),
        check="the first all-reduce (reduce-scatter) should start while backward still runs, not after it",
        remedy="overlap-gradients",
        symptom="communication share too high",
    )


def _small(view: View) -> Iterator[Finding]:
    """Upper bound: the exposed time of the small messages. Put back: one message a step of the same bytes at the best
    bandwidth that was seen, and never less than the shortest message took."""
    groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for one in view.collectives:
        if one.elements != NONE and one.name not in ("send", "recv", "send_recv") and size_of(one) <= SMALL_BYTES:
            groups[one.name, one.group].append(one)
    for (name, group), items in groups.items():
        a_step = len(items) / view.steps
        bare = _exposed(view, items)
        if a_step < SMALL_A_STEP or bare < NOTABLE_SMALL * view.wall_ns:
            continue
        fastest = max(size_of(one) / max(1, one.duration_ns) for one in view.collectives if one.elements != NONE)
        together = sum(size_of(one) for one in items) / fastest if fastest else 0.0
        floor = max(int(together), view.steps * min(one.duration_ns for one in items))
        yield Finding(
            name="small-collectives",
            title=f"many small {name} that could be one",
            claims={"comm": bare},
            lower_ns=max(0, bare - floor),
            wall_ns=view.wall_ns,
            evidence=(
                f"{a_step:,.0f} {name} a step{' in group ' + group if group else ''}, median "
                f"{np.median([size_of(one) for one in items]) / 1024:,.1f} KiB and "
                f"{ms(float(np.median([one.duration_ns for one in items])))} each; {ms(bare)} of them bare",
            ),
            check="message size against time: below about 1 MiB a collective costs latency, not bytes",
            remedy="coalesce-collectives",
            symptom="communication share too high",
        )


def _why_unsure(case: Case) -> str:
    """Why waiting for a late rank cannot be told from transfer; "" where the ranks were compared."""
    found = case.job.comparison
    if len(case.job.ranks) == 1 or found is None:
        return "one rank's trace: waiting for a late rank looks the same; give the traces of all ranks"
    return "the ranks could not be compared: waiting for a late rank looks the same" if found.refused else ""


def _plan(view: View, exposed: int, unsure: str) -> Iterator[Finding]:
    """More communication than compute could ever hide. Surely won: half of what exceeds compute (twice the work
    between two exchanges); nothing where waiting for others may be part of it."""
    shares = view.device.shares
    if exposed < TOO_MUCH * view.wall_ns or shares.comm_ns < 0.8 * shares.compute_ns:
        return
    kinds: dict[str, int] = defaultdict(int)
    for one in view.collectives:
        kinds[one.name] += one.duration_ns
    most = ", ".join(f"{name} {ms(ns)}" for name, ns in sorted(kinds.items(), key=lambda item: -item[1])[:3])
    yield Finding(
        name="communication-heavy-plan",
        title="the parallel plan communicates more than it computes",
        claims={"comm": exposed},
        lower_ns=0 if unsure else min(exposed, max(0, shares.comm_ns - shares.compute_ns) // 2),
        wall_ns=view.wall_ns,
        evidence=(
            f"communication {ms(shares.comm_ns)} against compute {ms(shares.compute_ns)}: overlap cannot hide it",
            *([most] if most else []),
            *([unsure] if unsure else []),
        ),
        check="bytes a step over the link's bandwidth, against FLOPs a step over the peak: `headway plan`",
        remedy="change-plan",
        symptom="communication share too high",
    )


def size_of(one: Collective) -> int:
    """Bytes of a message; four an element where the type is not known."""
    return one.elements * _BYTES.get(one.dtype, 4)


def _mib(one: Collective) -> float:
    return size_of(one) / (1 << 20)
