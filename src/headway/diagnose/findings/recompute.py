"""Activations computed a second time although memory would hold them."""

from __future__ import annotations

from collections.abc import Iterator

from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.view import ms

NOTABLE, FREE = 0.03, 0.25


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: the forward work inside backward. Surely won: the share of layers whose activations the free memory
    holds (half of it, to leave room)."""
    if case.memory_free is None or case.memory_free < FREE:
        return
    view = case.view
    spent = view.device.account.total("compute.recompute")
    if spent < NOTABLE * view.wall_ns:
        return
    yield recompute_finding(spent, view.wall_ns, case.memory_free, case.memory_text, "device.matmul")


def recompute_finding(spent: int, wall_ns: int, free: float, memory: str, claim: str) -> Finding:
    return Finding(
        name="recompute-with-free-memory",
        title="activations are recomputed although memory is free",
        claims={claim: spent},
        lower_ns=int(spent * min(1.0, free / 2)),
        wall_ns=wall_ns,
        evidence=(f"recompute takes {ms(spent)} ({spent / wall_ns:.1%})", memory or f"{free:.0%} of memory is free"),
        check="peak memory after a few steps (torch.cuda.max_memory_allocated) against the device's",
        remedy="less-recompute",
    )
