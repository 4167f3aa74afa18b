"""torch.compile compiles again while training: shapes, scalars or identities that a guard sees change."""

from __future__ import annotations

from collections.abc import Iterator

from headway.account.intervals import measure
from headway.diagnose import cold, recording
from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.view import ms

NOTABLE = 0.02
COMPILE = (
    r"\(dynamo_timed\)|^dynamo$|^compile_fx|_compile\.compile_inner|entire_frame_compile|backend_compile|CompilingPyCodegen|"
    r"convert_frame\.py.*(compile|transform)|PyCodeCache|async_compile"
)
# One compilation is written under both names; annotations about it (`…_data: fn_name=_compile.compile_inner`) are none.
_EACH = (r"^_compile\.compile_inner", r"^entire_frame_compile(?: \(dynamo_timed\))?$")


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the host's time in the compiler inside the window; on a CPU also what cold
    caches cost after it. Put back: one compile, since a dynamic one replaces all others."""
    view = case.view
    rows = view.host_rows(COMPILE, (HostKind.ANNOTATION, HostKind.OP, HostKind.PYTHON))
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
    left_cold, recorded = 0, None
    if not view.on_gpu:
        left_cold = cold.after_work(spent, view.wall_ns)
        recorded = recording.outside(view, view.host_intervals(rows))
    where = f"{hit} of {len(steps)} steps" if steps else ""
    yield recompile_finding(spent, number, view.wall_ns, where, left_cold, recorded)


def recompile_finding(
    spent: int, number: int, wall_ns: int, where: str, left_cold: int = 0, recorded: int | None = None
) -> Finding:
    """`spent` ns in the compiler; `left_cold`: what else ending it may win; `recorded`: what recording took of the
    rest."""
    return Finding(
        name="recompilation-storm",
        title="torch.compile compiles again and again",
        claims={"compile": spent} | ({"caches": left_cold} if left_cold else {}),
        lower_ns=spent - spent // number,
        wall_ns=wall_ns,
        evidence=(f"{number:,} compilations, {ms(spent)}" + (f", in {where}" if where else ""),),
        check="TORCH_LOGS=recompiles prints each guard that failed",
        remedy="stop-recompiling",
        symptom="unstable step time",
        recorded_ns=recorded,
    )
