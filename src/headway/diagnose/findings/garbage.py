"""Python's garbage collector stops the loop."""

from __future__ import annotations

from collections.abc import Iterator

from headway.account.intervals import measure
from headway.diagnose import cold
from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.view import ms

NOTABLE = 0.01
# `<built-in method collect of module …>` in older traces, `<built-in function collect>` in those of today's Python.
GC = (
    r"built-in method collect(?:>| of module|$)|built-in function collect(?:>|$)|\bgc\.collect\b|\bgc_collect\b|"
    r"host\.gc$|^gc$|python gc"
)


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the collector's own time, on a CPU also what it leaves cold. Put back: a collection of the young
    generation now and then, a tenth."""
    view = case.view
    rows = view.host_rows(GC, (HostKind.PYTHON, HostKind.ANNOTATION, HostKind.OP))
    if not len(rows):
        return
    spent = measure(view.host_intervals(rows))
    cost = view.overlap_with_idle(rows) if view.on_gpu else spent
    if cost < NOTABLE * view.wall_ns:
        return
    names = sorted({view.rank.names[i] for i in view.rank.host.name[rows]})
    seen = f"{len(rows):,} collections ({', '.join(names[:2])}), {ms(spent)} on the host"
    yield gc_finding(cost, view.wall_ns, seen, view.on_gpu)


def gc_finding(cost: int, wall_ns: int, seen: str, on_gpu: bool) -> Finding:
    return Finding(
        name="garbage-collection",
        title="Python's garbage collector stops the loop",
        claims={"host.gc": cost} | ({} if on_gpu else {"caches": cold.after_work(cost, wall_ns)}),
        lower_ns=int(cost * 0.9),
        wall_ns=wall_ns,
        evidence=(seen,),
        check="gc.disable() for a hundred steps: the outliers of the step time go away",
        remedy="collect-at-fixed-steps",
        symptom="unstable step time",
    )
