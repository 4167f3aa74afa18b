"""Padding: slots that are computed and hold no token."""

from __future__ import annotations

from collections.abc import Iterator

from headway.diagnose.case import Case
from headway.diagnose.finding import Finding

NOTABLE = 0.05
# Best-fit packing leaves some slots: what is put back into the lower bound.
_PACK_FILL = 0.98


def find(case: Case) -> Iterator[Finding]:
    """Packing makes fewer steps of the same tokens, so everything a step does shrinks by the padding's share; surely
    only what scales with slots does (compute without the optimizer)."""
    facts = case.view.device.efficiency
    if facts is None or facts.padding is None or facts.padding < NOTABLE:
        return
    view = case.view
    share = facts.padding
    claims = {path: int(share * ns) for path, ns in view.available().items() if ns}
    # Device time is summed over streams; claims must not exceed the window.
    total = sum(claims.values())
    scale = min(1.0, share * view.wall_ns / total) if total else 0.0
    claims = {path: int(ns * scale) for path, ns in claims.items()}
    compute = max(0, view.device.shares.compute_ns - view.device.by_kind.get("optimizer", 0))
    surely = max(0.0, share - (1 - _PACK_FILL)) * compute
    known = facts.tokens is not None and facts.slots is not None
    counts = f"{facts.tokens:,} tokens in {facts.slots:,} slots: " if known else ""
    hint = " (a hint: give --tokens to be sure)" if facts.padding_is_hint else ""
    yield Finding(
        name="padding",
        title="padding is computed",
        claims=claims,
        lower_ns=0 if facts.padding_is_hint else min(int(surely), sum(claims.values())),
        wall_ns=view.wall_ns,
        evidence=(f"{counts}{share:.1%} of what is computed is padding{hint}",),
        check="count the tokens of a batch that are not padding: (attention_mask == 1).sum() / numel()",
        remedy="pack",
        recorded_ns=0,  # a share of all work, recorded or not
    )
