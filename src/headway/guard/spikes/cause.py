"""Whose fault a spike was: the batch is looked at again, without some of its documents, until the guilty are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headway.guard.spikes.figures import Figures

Kind = Literal["transient", "documents", "everything"]
"""transient: the same batch is clean when it is looked at again. documents: a few explain it. everything: none do."""


@dataclass(frozen=True)
class Look:
    """One look at a batch: its figures, and every document's (raw id) mean loss and trained tokens."""

    figures: Figures
    documents: dict[int, tuple[float, int]]


Replay = Callable[[frozenset[int]], Look | None]
"""Looks at the batch at the state that training is in, with these raw documents masked; None where nothing trained is
left. Every rank calls it alike, and it updates nothing."""


@dataclass(frozen=True)
class Cause:
    kind: Kind
    documents: tuple[int, ...] = ()
    look: Look | None = None
    looks: int = 0
    """How often the batch was looked at."""


@dataclass
class _Search:
    replay: Replay
    clean: Callable[[Figures], bool]
    looks: int = 0
    known: dict[frozenset[int], bool] = field(default_factory=dict)

    def is_clean(self, masked: Sequence[int]) -> bool:
        key = frozenset(masked)
        if key not in self.known:
            look = self.replay(key)
            self.looks += 1
            self.known[key] = look is None or self.clean(look.figures)
        return self.known[key]


def find_cause(replay: Replay, clean: Callable[[Figures], bool], usual: float, most_share: float) -> Cause:
    """Looks at the batch again and again.

    Args:
        clean: whether figures lie inside the limits that the step had.
        usual: the loss lately; documents are suspected in the order of their distance from it.
        most_share: share of the batch's documents that may be guilty; more are a shift of the data, or no data at all.
    """
    search = _Search(replay, clean)
    whole = replay(frozenset())
    search.looks += 1
    if whole is None or clean(whole.figures):
        return Cause("transient", look=whole, looks=search.looks)
    suspects = by_suspicion(whole, usual)
    guilty = _first_that_explain(search, suspects, most_share) or _by_halves(search, suspects)
    if guilty is None:
        return Cause("everything", look=whole, looks=search.looks)
    return Cause("documents", tuple(_without_the_innocent(search, guilty)), whole, search.looks)


def by_suspicion(look: Look, usual: float) -> list[int]:
    """Documents, strangest loss first, on either side; those that are not finite before all others."""

    def strange(raw: int) -> float:
        nll, _ = look.documents[raw]
        return math.inf if not math.isfinite(nll) else abs(nll - usual)

    return sorted(look.documents, key=lambda raw: (-strange(raw), raw))


def _first_that_explain(search: _Search, suspects: list[int], most_share: float) -> list[int] | None:
    """The shortest run of suspects, strangest first, without which the batch is clean."""
    most = max(1, int(most_share * len(suspects)))
    too_few, count = 0, 1
    while not search.is_clean(suspects[:count]):
        if count == most:
            return None
        too_few, count = count, min(most, 2 * count)
    while count - too_few > 1:
        middle = (count + too_few) // 2
        if search.is_clean(suspects[:middle]):
            count = middle
        else:
            too_few = middle
    return suspects[:count]


def _by_halves(search: _Search, suspects: list[int]) -> list[int] | None:
    """One guilty document whose loss is ordinary, only its gradient is not: the half without which all is clean."""
    left = suspects
    while len(left) > 1:
        # Every second one: suspicion must not decide which half the large documents are in.
        for half in (left[::2], left[1::2]):
            if search.is_clean(half):
                left = half
                break
        else:
            return None
    return left if search.is_clean(left) else None


def _without_the_innocent(search: _Search, guilty: list[int]) -> list[int]:
    """Takes back every document that the others explain the spike without: many at once where many are innocent."""
    kept = list(guilty)

    def take_back(some: list[int]) -> None:
        nonlocal kept
        rest = [raw for raw in kept if raw not in some]
        if rest and search.is_clean(rest):
            kept = rest
        elif len(some) > 1:
            half = len(some) // 2
            take_back(some[half:])  # the least strange first
            take_back(some[:half])

    take_back(guilty[-1:])  # known already, where `guilty` is the shortest run that explains it
    take_back([raw for raw in kept if raw != guilty[-1]])
    return kept
