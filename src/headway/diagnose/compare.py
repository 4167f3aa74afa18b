"""Two runs, or two traces, side by side: what became slower, and whether convergence did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.account.account import difference
from headway.diagnose.diagnosis import Diagnosis
from headway.diagnose.facts import KernelRow
from headway.diagnose.finding import Finding
from headway.diagnose.findings.convergence import changed_settings, slower_convergence

SLOWER = 0.03
_COLLAPSE = 0.20


@dataclass(frozen=True)
class Change:
    """One row: ns a step (of the window, where there are no steps) in this one and in the other."""

    label: str
    ns: float
    against_ns: float

    @property
    def delta_ns(self) -> float:
        return self.ns - self.against_ns


@dataclass(frozen=True)
class Comparison:
    """This against the other. `rate` is tokens a second (this, other) where both are known."""

    source: str
    against: str
    per: str
    wall: Change
    account: tuple[Change, ...]
    kernels: tuple[Change, ...] = ()
    rate: tuple[float, float] | None = None
    settings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def slower(self) -> bool | None:
        """Whether it is worse: time a token where both are known, time a step otherwise; or convergence. None where one
        of them has no time to compare (a run without a finished step)."""
        if self.findings:
            return True
        if not self.wall.ns or not self.wall.against_ns:
            return None
        if self.rate is not None:
            return self.rate[0] < (1 - SLOWER) * self.rate[1]
        return self.wall.ns > (1 + SLOWER) * self.wall.against_ns

    def to_dict(self) -> dict[str, Any]:
        def rows(items: tuple[Change, ...]) -> list[dict[str, Any]]:
            return [{**asdict(one), "delta_ns": one.delta_ns} for one in items]

        return {
            "source": self.source,
            "against": self.against,
            "per": self.per,
            "slower": self.slower,
            "wall": rows((self.wall,))[0],
            "account": rows(self.account),
            "kernels": rows(self.kernels),
            "tokens_per_second": list(self.rate) if self.rate else None,
            "settings": list(self.settings),
            "findings": [item.to_dict() for item in self.findings],
            "notes": list(self.notes),
        }


def compare(mine: Diagnosis, other: Diagnosis) -> Comparison:
    """Subtracts two diagnoses, category by category, per step, largest loss first."""
    steps, other_steps = _steps(mine), _steps(other)
    per = "step"
    if not steps or not other_steps:
        steps = other_steps = 1
        per = "window"
    rows = []
    if mine.account is not None and other.account is not None:
        rows = [
            Change(row.path, row.left_ns / steps, row.right_ns / other_steps)
            for row in difference(mine.account, other.account)
        ]
        rows.sort(key=lambda row: -row.delta_ns)
    run, against = mine.run, other.run
    findings: list[Finding] = []
    rate: tuple[float, float] | None = None
    settings: tuple[str, ...] = ()
    if run is not None and against is not None:
        a, b = run.tokens_per_second(), against.tokens_per_second()
        rate = (a, b) if a and b else None
        settings = tuple(changed_settings(run.config, against.config))
        findings += slower_convergence(run, against)
        findings += _collapse(mine, other)
    return Comparison(
        source=mine.source,
        against=other.source,
        per=per,
        wall=Change("wall clock", mine.wall_ns / steps, other.wall_ns / other_steps),
        account=tuple(rows),
        kernels=tuple(_kernels(mine, other, steps, other_steps)),
        rate=rate,
        settings=settings,
        findings=tuple(findings),
        notes=tuple(_unlike(mine, other)),
    )


def _unlike(mine: Diagnosis, other: Diagnosis) -> Iterator[str]:
    """Why the difference may say little."""
    for item in (mine, other):
        if not item.wall_ns:
            yield f"{item.source}: {item.verdict}; neither of the two can be called slower"
    if mine.kind != other.kind:
        yield f"a {mine.kind} is compared with a {other.kind}: their windows are not the same steps"
    if mine.device != other.device:
        yield f"this ran on {mine.device}, the other on {other.device}"


def _steps(item: Diagnosis) -> int:
    if item.run is not None:
        return len(item.run.steps)
    return len(item.job.ranks[0].device().steps.rows) if item.job else 0


def _kernels(mine: Diagnosis, other: Diagnosis, steps: int, other_steps: int) -> list[Change]:
    """The kernels that grew or shrank most."""
    if mine.run is not None or mine.job is None or other.job is None:
        return []
    left, right = _table(mine), _table(other)
    rows = [
        Change(name, left[name].total_ns / steps if name in left else 0.0,
               right[name].total_ns / other_steps if name in right else 0.0)
        for name in {*left, *right}
    ]  # fmt: skip
    rows.sort(key=lambda row: -abs(row.delta_ns))
    return rows[:10]


def _table(item: Diagnosis) -> dict[str, KernelRow]:
    assert item.job is not None
    return {row.name: row for row in item.job.ranks[0].device().table}


def _collapse(mine: Diagnosis, other: Diagnosis) -> list[Finding]:
    """More ranks, and each does much less: the multi-node collapse, with what grew as its cause."""
    run, against = mine.run, other.run
    assert run is not None and against is not None
    a, b = run.tokens_per_second(), against.tokens_per_second()
    if not a or not b or run.world_size <= against.world_size:
        return []
    each, before = a / run.world_size, b / against.world_size
    if each >= (1 - _COLLAPSE) * before or run.account is None or against.account is None:
        return []
    grown = []
    for row in difference(run.account, against.account):
        share = row.left_ns / run.wall_ns - row.right_ns / against.wall_ns
        if share > 0.02:
            grown.append((share, row.path))
    grown.sort(reverse=True)
    causes = ", ".join(f"{path} by {share:.1%} of the step" for share, path in grown[:3])
    lost = int((1 - each / before) * run.wall_ns)
    return [
        Finding(
            name="multi-node-collapse",
            title=f"{run.world_size} ranks do the work of {a / before:.1f}",
            claims={"comm": lost},
            lower_ns=lost // 2,
            wall_ns=run.wall_ns,
            evidence=(
                f"{each:,.0f} tokens/s a rank on {run.world_size} ranks, {before:,.0f} on {against.world_size}",
                f"what grew: {causes or 'nothing that rank 0 sees (look at a periodic trace)'}",
            ),
            check="NCCL_DEBUG=INFO for the transport, nccl-tests between two nodes, then the straggler table",
            remedy="mend-link",
            symptom="multi-node collapse",
        )
    ]  # fmt: skip
