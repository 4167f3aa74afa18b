"""Checks of a claimed speed-up whose number of cards is not stated: what would make both ends possible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from headway.plan.claim import Claim, Finding, rate_of
from headway.plan.cluster import Device, find_device

# The best model FLOPs utilisation of published bf16 training rows: GPT-3 175B of MegaScale, arXiv 2402.15627, table 2.
BEST_TRAINING = 0.655
CARDS = (1, 2, 4, 8, 16, 32, 64, 128)
_STATE = 16  # bytes per parameter of full training: bf16 weights and gradients, fp32 master and two moments


@dataclass(frozen=True, slots=True)
class Ends:
    """One number of cards: utilisation before (every computed token) and after, and the padding that must have been.

    least_padding: smallest share of the first run's tokens that was padding; most: largest, where the kernels would
    have gained nothing. Both 0 to 1; possible when least ≤ most and the first run is within the best training.
    """

    device: str
    cards: int
    before: float
    after_if_all_real: float
    least_padding: float
    most_padding: float
    fits_memory: bool

    @property
    def possible(self) -> bool:
        return self.before <= BEST_TRAINING and self.least_padding <= self.most_padding

    def split(self, padding: float) -> tuple[float, float]:
        """(gain from packing, gain from kernels) at this share of padding; their product is the whole gain."""
        packing = 1 / (1 - padding) if padding < 1 else math.inf
        return packing, self.after_if_all_real / self.before / packing


def check_speedup(claim: Claim) -> Iterator[Finding]:
    """The arithmetic of the two ends, then one line for each number of cards."""
    if not {"seconds", "tokens_per_s"} <= set(claim.before) or "seconds" not in claim.after:
        return
    tokens = claim.before["seconds"] * claim.before["tokens_per_s"]
    gain = claim.before["seconds"] / claim.after["seconds"]
    samples = claim.numbers.get("samples")
    each = f", {tokens / samples:,.0f} a sample" if samples else ""
    yield Finding(
        "tokens",
        "follows",
        f"{claim.before['seconds']:,.0f} s x {claim.before['tokens_per_s']:,.0f} tokens/s = "
        f"{tokens / 1e6:.1f} M{each}; {gain:.2f} times as fast is "
        f"{tokens / claim.after['seconds']:,.0f} of the same tokens/s",
    )
    if "tokens_per_s" in claim.after:
        real = claim.after["tokens_per_s"] * claim.after["seconds"]
        kept = real / tokens
        yield Finding(
            "tokens after",
            "fits" if kept <= 1.02 else "does not fit",
            f"{real / 1e6:.1f} M, {kept:.0%} of those before: the rest was padding",
        )
    rows = ends(claim)
    for row in rows:
        yield _row(row, gain)
    good = [row for row in rows if row.possible]
    if rows:
        says = "; ".join(
            f"{name}: {', '.join(str(row.cards) for row in good if row.device == name) or 'none'} cards"
            for name in dict.fromkeys(row.device for row in rows)
        )
        yield Finding("both ends", "fits" if good else "does not fit", f"possible with {says}")


def ends(claim: Claim) -> list[Ends]:
    """Each device and number of cards that the claim leaves open."""
    parameters = claim.numbers.get("active_parameters", claim.numbers.get("parameters"))
    names = claim.devices or ((claim.device,) if claim.device else ())
    if parameters is None or not names:
        return []
    counts = (int(claim.numbers["gpus"]),) if "gpus" in claim.numbers else CARDS
    gain = claim.before["seconds"] / claim.after["seconds"]
    rows = []
    for device in map(find_device, names):
        for cards in counts:
            before = 6 * parameters * claim.before["tokens_per_s"] / (cards * rate_of(device, claim.precision))
            rows.append(_ends(device, cards, before, gain, claim.numbers.get("parameters", parameters)))
    return rows


def _ends(device: Device, cards: int, before: float, gain: float, parameters: float) -> Ends:
    after = before * gain
    return Ends(
        device=device.name,
        cards=cards,
        before=before,
        after_if_all_real=after,
        least_padding=max(0.0, 1 - BEST_TRAINING / after),
        most_padding=1 - 1 / gain,
        fits_memory=cards * device.memory > _STATE * parameters,
    )


def _row(row: Ends, gain: float) -> Finding:
    memory = "" if row.fits_memory else "; full training does not fit its memory (LoRA would)"
    head = f"{row.cards} x {row.device}"
    says = f"MFU {row.before:.1%} before"
    if row.before > 1:
        return Finding(head, "impossible", f"{says}: over the peak already{memory}")
    if row.before > BEST_TRAINING:
        return Finding(head, "impossible", f"{says}: over the best published training ({BEST_TRAINING:.0%}){memory}")
    if row.least_padding == 0:
        says += f", {row.after_if_all_real:.1%} after even if no token was padding"
    else:
        packing, kernels = row.split(row.least_padding)
        says += (
            f"; after would be {row.after_if_all_real:.0%} of the peak, so at least {row.least_padding:.0%} of the "
            f"first run's tokens were padding: packing at least {packing:.1f} of the {gain:.1f} times, "
            f"kernels at most {kernels:.1f}"
        )
    for padding in (0.5, 0.75):
        if row.least_padding <= padding <= row.most_padding:
            packing, kernels = row.split(padding)
            says += f"; at {padding:.0%} padding: packing {packing:.1f} x kernels {kernels:.2f}"
            says += f", MFU after {kernels * row.before:.1%}"
    return Finding(head, "possible" if row.possible else "impossible", says + memory)
