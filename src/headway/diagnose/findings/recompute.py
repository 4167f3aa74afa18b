"""Activations computed a second time although memory would hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.phases import PHASES
from headway.diagnose.view import View, ms

NOTABLE, FREE = 0.03, 0.25


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the forward work inside backward; on a CPU as much Python again in forward, and again in backward,
    as it has between its operators: every saved tensor passes a hook when forward packs it and when backward unpacks
    it too. Surely won: the share of layers whose activations the free memory holds (half of it, to leave room)."""
    if case.memory_free is None or case.memory_free < FREE:
        return
    view = case.view
    spent = view.device.account.total("compute.recompute")
    if spent < NOTABLE * view.wall_ns:
        return
    claims = {"recompute": spent}
    if not view.on_gpu:
        hooks = _between_operators(view)
        claims |= {"idle.host": min(view.gap_time(view.gaps("host")), hooks), "unpacking": hooks}
    yield recompute_finding(spent, view.wall_ns, case.memory_free, case.memory_text, claims)


def _between_operators(view: View) -> int:
    """ns of recompute in which only the backward node is open, and no operator under it."""
    again = view.device.phase == PHASES.index("recompute")
    return view.time(again & view.named(r"Backward\d*$") & view.inside)


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
