"""Serving: the first token waits for prefill, its own and that of others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headway.account.intervals import intersect, measure
from headway.diagnose.case import Case
from headway.diagnose.facts import HostKind
from headway.diagnose.finding import Finding
from headway.diagnose.passes import passes_of
from headway.diagnose.view import View, ms

NOTABLE = 0.5
# vLLM names its steps execute_context_1(512)_generation_3(3); others say prefill, extend and decode.
_VLLM = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
_PREFILL = r"\b[Pp]refill|\bextend\b|EXTEND|execute_context_[1-9]"
_DECODE = r"\b[Dd]ecode|DECODE|execute_context_0\("


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: device time of prefill that decoding waits behind. Surely won: what exceeds an even share (chunks as
    long as a decode step)."""
    view = case.view
    found = _annotated(view) or _by_shapes(view)
    if found is None or not found.prefill or found.prefill < NOTABLE * (found.prefill + found.decode):
        return
    prefill, decode, evidence = found.prefill, found.decode, found.evidence
    upper = min(prefill, view.wall_ns)
    yield Finding(
        name="prefill-dominates",
        title="the first token waits for prefill",
        claims={"prefill": upper},
        lower_ns=max(0, min(upper, prefill - decode) // 2),
        wall_ns=view.wall_ns,
        evidence=evidence,
        check="time to first token against prompt length: a straight line through the origin is prefill",
        remedy="split-prefill",
        symptom="high first-token latency",
    )


@dataclass(frozen=True)
class _Times:
    """Device time of both kinds of work, ns."""

    prefill: int
    decode: int
    evidence: tuple[str, ...]


def _annotated(view: View) -> _Times | None:
    """As the server calls its steps; None where it calls none so."""
    prefill, decode = _device_time(view, _PREFILL), _device_time(view, _DECODE)
    rows = view.host_rows(_PREFILL, (HostKind.ANNOTATION, HostKind.OP))
    steps = view.host_rows(_DECODE, (HostKind.ANNOTATION, HostKind.OP))
    if not len(rows) and not len(steps):
        return None
    tokens = [int(found[2]) for row in rows if (found := _VLLM.search(view.rank.names[view.rank.host.name[row]]))]
    evidence = [f"prefill takes {ms(prefill)} in {len(rows):,} steps, decoding {ms(decode)} in {len(steps):,}"]
    if tokens:
        evidence.append(f"prompts of {min(tokens):,} to {max(tokens):,} tokens a step")
    return _Times(prefill, decode, tuple(evidence))


def _by_shapes(view: View) -> _Times | None:
    found = passes_of(view)
    if found is None:
        return None
    lengths = f"{min(found.positions):,} to {max(found.positions):,}" if found.positions else "unknown"
    return _Times(
        found.prefill_ns,
        found.decode_ns,
        (
            f"prefill takes {ms(found.prefill_ns)} in {found.prefills:,} stretches, decoding {ms(found.decode_ns)} in "
            f"{found.decodes:,} passes (by the queries of attention: no step is annotated)",
            f"prompts of {lengths} positions",
        ),
    )


def _device_time(view: View, pattern: str) -> int:
    """Busy device time of what was launched under such annotations; under their spans where nothing is linked."""
    mask = view.under(pattern)
    if mask.any():
        return measure(view.union(mask))
    rows = view.host_rows(pattern, (HostKind.ANNOTATION, HostKind.OP))
    return measure(intersect(view.union(view.inside), view.host_intervals(rows))) if len(rows) else 0
