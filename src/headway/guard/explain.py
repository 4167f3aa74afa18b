"""From what the machine says of itself to a few words in the ledger, rank by rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from headway.guard.cards import card_of
from headway.guard.generation import Place
from headway.guard.vitals import RECENT_S, Card, card_complaints, nic_complaints, read_vitals

Reading = TypeVar("Reading")


class Explainer:
    """What is wrong with this machine's parts, in words. `said`: of the ranks here and, where this machine leads, of
    all others too, as their agents told.

    folder: where `vitals_main` writes. environ: what the ranks are started from.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = folder, environ
        self._cards: defaultdict[int, _Before[Card]] = defaultdict(_Before)
        self._nics: _Before[Mapping[str, int]] = _Before()
        self.said: dict[int, str] = {}

    def of_ranks(self, place: Place, settings: Mapping[str, str]) -> dict[int, str]:
        """The ranks here of which there is something to tell. Reads one small file of this machine."""
        vitals = read_vitals(self._folder)
        if vitals is None:
            return {}
        now, environ = time.monotonic(), {**self._environ, **settings}
        common = nic_complaints(vitals.nics, self._nics.of(vitals.nics, now)) + vitals.disk
        cards = {card.index: card_complaints(card, self._cards[card.index].of(card, now)) for card in vitals.cards}
        found = {}
        for local in range(place.here):
            index = card_of(local, environ)
            own = cards.get(index, []) if index is not None else []
            parts = [f"card {index}: {', '.join(own)}", *common] if own else common
            if parts:
                found[place.first + local] = "; ".join(parts)
        return found

    def look(self, place: Place, settings: Mapping[str, str]) -> None:
        """Brings `said` up to date for the ranks here."""
        here = range(place.first, place.first + place.here)
        self.said = {rank: text for rank, text in self.said.items() if rank not in here}
        self.said |= self.of_ranks(place, settings)

    def add(self, rank: int | None, evidence: str) -> str:
        """Evidence with what is known of that rank's machine."""
        told = self.said.get(rank) if rank is not None else None
        return f"{evidence}; {told}" if told else evidence


class _Before(Generic[Reading]):
    """The reading of five to ten minutes ago, or the first one."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Reading]] = []

    def of(self, reading: Reading, now: float) -> Reading:
        if not self._kept or now - self._kept[-1][0] >= RECENT_S:
            self._kept = [*self._kept[-1:], (now, reading)]
        return self._kept[0][1]
