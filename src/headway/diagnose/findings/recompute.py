"""Activations computed a second time although memory would hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.account.intervals import clip, intersect, measure
from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.phases import recompute_spans
from headway.diagnose.view import ms

NOTABLE, FREE = 0.03, 0.25


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the forward work inside backward; on a CPU with the Python between its operators. Surely won: the
    share of layers whose activations the free memory holds (half of it, to leave room)."""
    if case.memory_free is None or case.memory_free < FREE:
        return
    view = case.view
    spent = view.device.account.total("compute.recompute")
    if spent < NOTABLE * view.wall_ns:
        return
    claims = {"recompute": spent}
    if not view.on_gpu:
        window = view.device.window
        again = clip(recompute_spans(view.rank.host, view.rank.names), window.start_ns, window.end_ns)
        claims["idle.host"] = measure(intersect(view.gap_intervals(view.gaps("host")), again))
    yield recompute_finding(spent, view.wall_ns, case.memory_free, case.memory_text, claims)


def recompute_finding(spent: int, wall_ns: int, free: float, memory: str, claims: Mapping[str, int]) -> Finding:
    return Finding(
        name="recompute-with-free-memory",
        title="activations are recomputed although memory is free",
        claims=claims,
        lower_ns=int(spent * min(1.0, free / 2)),
        wall_ns=wall_ns,
        evidence=(f"recompute takes {ms(spent)} ({spent / wall_ns:.1%})", memory or f"{free:.0%} of memory is free"),
        check="peak memory after a few steps (torch.cuda.max_memory_allocated) against the device's",
        remedy="less-recompute",
    )
