"""torch.compile compiles again while training: shapes, scalars or identities that a guard sees change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headway.account.intervals import measure
from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.view import View, ms

NOTABLE = 0.02
_COMPILE = (
    r"\(dynamo_timed\)|^dynamo$|^compile_fx|_compile\.compile_inner|entire_frame_compile|backend_compile|CompilingPyCodegen|"
    r"convert_frame\.py.*(compile|transform)|PyCodeCache|async_compile"
)
# One compilation is written under both names; annotations about it (`…_data: fn_name=_compile.compile_inner`) are none.
_EACH = (r"^_compile\.compile_inner", r"^entire_frame_compile(?: \(dynamo_timed\))?$")
# What recording an operator costs the loop (2.7 µs measured, 1,100 operators a step, shapes recorded). It lengthens
# what is not compiling, so that the compiler's share is higher in truth than in the trace. Upper bound only.
_RECORDED_NS = 2_700
# The compiler leaves caches cold: beside it the same forward and backward took 25.5 ms where they take 22.7 (medians of
# four rounds of eight steps): an eighth of what is not compiling, at most a tenth of what is. Upper bound only.
_COLD = 8


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the host's time in the compiler inside the window; on a CPU also what recording costs the rest and
    what cold caches cost after it. Put back: one compile, since a dynamic one replaces all others."""
    view = case.view
    rows = view.host_rows(_COMPILE, (HostKind.ANNOTATION, HostKind.OP, HostKind.PYTHON))
    if not len(rows):
        return
    spent = measure(view.host_intervals(rows))
    kinds = (HostKind.ANNOTATION, HostKind.OP, HostKind.PYTHON)
    number = max(1, *(len(view.host_rows(name, kinds)) for name in _EACH))
    if spent < NOTABLE * view.wall_ns or number < 2:
        return
    steps = view.device.steps.rows
    hit = sum(bool(((view.rank.host.start[rows] >= row.start_ns) & (view.rank.host.start[rows] < row.end_ns)).any())
              for row in steps)  # fmt: skip
    at_most = spent
    if not view.on_gpu:
        at_most = int(spent * view.wall_ns / max(1, view.wall_ns - _recording(view, rows)))
        at_most += min(spent // 10, (view.wall_ns - spent) // _COLD)
    where = f"{hit} of {len(steps)} steps" if steps else ""
    yield recompile_finding(spent, number, view.wall_ns, where, at_most)


def _recording(view: View, compiling: NDArray[np.intp]) -> int:
    """ns that recording the operators outside the compiler took, at most half of the time outside."""
    host, spans = view.rank.host, view.host_intervals(compiling)
    rows = view.host_rows("", (HostKind.OP,))
    place = np.searchsorted(spans[:, 0], host.start[rows], "right") - 1
    inside = (place >= 0) & (host.start[rows] < spans[np.maximum(place, 0), 1])
    return min(_RECORDED_NS * int((~inside).sum()), (view.wall_ns - measure(spans)) // 2)


def recompile_finding(spent: int, number: int, wall_ns: int, where: str, at_most: int | None = None) -> Finding:
    """`spent` ns in the compiler; `at_most`: the upper bound of what ending it wins, where that is more."""
    return Finding(
        name="recompilation-storm",
        title="torch.compile compiles again and again",
        claims={"compile": max(spent, at_most or 0)},
        lower_ns=spent - spent // number,
        wall_ns=wall_ns,
        evidence=(f"{number:,} compilations, {ms(spent)}" + (f", in {where}" if where else ""),),
        check="TORCH_LOGS=recompiles prints each guard that failed",
        remedy="stop-recompiling",
        symptom="unstable step time",
    )
