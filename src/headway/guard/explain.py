"""From what the machine says of itself to a few words in the ledger, rank by rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from headway.guard.generation import Place
from headway.guard.vitals import (
    Card,
    card_complaints,
    disk_complaints,
    nic_complaints,
    nic_counters,
    read_vitals,
)

_EVERY_S = 1.0


class Explainer:
    """What is wrong with this machine's parts, in words. `said`: of other machines' ranks, as their agents told.

    folder: where `vitals_main` writes. disk: where the run's checkpoints go.
    """

    def __init__(self, folder: Path, disk: Path) -> None:
        self._folder, self._disk = folder, disk
        self._first: dict[int, Card] = {}
        self._nics = nic_counters()
        self._found: dict[int, str] = {}
        self._next = 0.0
        self.said: dict[int, str] = {}

    def of_ranks(self, place: Place, settings: Mapping[str, str]) -> dict[int, str]:
        """The ranks here of which there is something to tell; looked at once a second."""
        if time.monotonic() < self._next:
            return self._found
        self._next = time.monotonic() + _EVERY_S
        cards = {card.index: card for card in read_vitals(self._folder)}
        for index, known in cards.items():
            self._first.setdefault(index, known)
        common = nic_complaints(nic_counters(), self._nics) + disk_complaints(self._disk)
        found = {}
        for local in range(place.here):
            index = _card_of(local, settings)
            card = cards.get(index)
            own = card_complaints(card, self._first.get(index)) if card is not None else []
            parts = [f"card {index}: {', '.join(own)}", *common] if own else common
            if parts:
                found[place.first + local] = "; ".join(parts)
        self._found = found
        return found

    def add(self, rank: int | None, evidence: str) -> str:
        """Evidence with what is known of that rank's machine."""
        told = self.said.get(rank) if rank is not None else None
        return f"{evidence}; {told}" if told else evidence


def _card_of(local: int, settings: Mapping[str, str]) -> int:
    visible = [text.strip() for text in settings.get("CUDA_VISIBLE_DEVICES", "").split(",") if text.strip()]
    return int(visible[local]) if local < len(visible) and visible[local].isdigit() else local
