"""Packs: documents put together so that almost no slot is left empty.

Best-fit decreasing and first-fit decreasing (Johnson 1973), both exact, both computed, the one with fewer packs kept.
Neither walks over documents one by one. Documents of one length are interchangeable, and packs opened together for one
length start out alike, so whole *runs* of neighbouring packs with the same free space are filled at once: a run takes
``free // length`` documents per pack, and only its last pack may be cut short. The work left is proportional to the
number of different lengths, not to the number of documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from headway.account.errors import UserError
from headway.data.order import permutation, stable_order

MAX_CAPACITY = 2**31 - 1  # cu_seqlens are int32

# (first pack of the run, free slots of its packs) -> what to minimise when a document chooses among runs with room.
Preference = Callable[[int, int], int]
FITS: dict[str, Preference] = {
    "best-fit decreasing": lambda first, free: free,
    "first-fit decreasing": lambda first, free: first,
}


@dataclass(frozen=True)
class Packs:
    """Documents by pack: pack ``p`` holds documents ``order[offsets[p]:offsets[p + 1]]``.

    ``order`` int64 [N] is a permutation of the documents, ``offsets`` int64 [P + 1]; ``capacity`` in slots.
    """

    order: np.ndarray
    offsets: np.ndarray
    capacity: int
    tokens: int
    algorithm: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def fill(self) -> float:
        """Share of the slots of all packs that hold a real token (1.0 = no padding); 0.0 without packs."""
        return self.tokens / (len(self) * self.capacity) if len(self) else 0.0


def best_fit(lengths: np.ndarray, capacity: int, *, seed: int = 0, epoch: int = 0) -> Packs:
    """Pack documents of ``lengths`` (int [N], 1..capacity) into as few packs as both BFD and FFD need, or fewer.

    Deterministic in (seed, epoch): they decide which of several equally long documents goes where, the order of the
    packs and the order of the documents inside a pack. The number of packs depends on the lengths alone.

    Raises UserError for a capacity outside 1..2**31-1 and for a length outside 1..capacity.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    _check(lengths, capacity)
    shuffled = permutation(len(lengths), "equal lengths", seed, epoch)
    by_length = shuffled[stable_order(capacity - lengths[shuffled])]  # longest first, equal ones in random order
    algorithm, count, pack_of = _fewest(lengths[by_length], capacity)

    pack_of = permutation(count, "pack order", seed, epoch)[pack_of]
    within = permutation(len(lengths), "order inside packs", seed, epoch)
    order = by_length[within[stable_order(pack_of[within])]]
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=count), out=offsets[1:])
    return Packs(order, offsets, capacity, int(lengths.sum()), algorithm)


def _check(lengths: np.ndarray, capacity: int) -> None:
    if not 1 <= capacity <= MAX_CAPACITY:
        raise UserError(f"a pack of {capacity} slots cannot be built; give data.slots between 1 and {MAX_CAPACITY}")
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        wrong = int(np.flatnonzero((lengths < 1) | (lengths > capacity))[0])
        raise UserError(
            f"document {wrong} has {int(lengths[wrong])} tokens and a pack {capacity} slots; "
            "documents need 1 token or more and must fit: raise data.slots or lower data.seq_len"
        )


def _fewest(descending: np.ndarray, capacity: int) -> tuple[str, int, np.ndarray]:
    """The better algorithm's name, its number of packs, and the pack of each document (int64 [N])."""
    starts = np.flatnonzero(np.diff(descending, prepend=-1))
    sizes = descending[starts].tolist()
    counts = np.diff(starts, append=len(descending)).tolist()
    bound = -(-int(descending.sum()) // capacity)
    kept: tuple[str, _Packer] | None = None
    for name, preference in FITS.items():
        packer = _Packer(capacity, preference)
        for size, count in zip(sizes, counts, strict=True):
            packer.place(size, count)
        if kept is None or packer.opened < kept[1].opened:
            kept = name, packer
        if kept[1].opened == bound:
            break  # every slot is needed: no packing at all has fewer packs
    assert kept is not None
    return kept[0], kept[1].opened, kept[1].pack_of_each()


class _Packer:
    """Places documents, size by size in descending order, into runs of packs ``first .. first + packs - 1``."""

    def __init__(self, capacity: int, preference: Preference) -> None:
        self.capacity = capacity
        self.preference = preference
        self.opened = 0
        self.fitting: list[tuple[int, int, int, int]] = []  # heap of (preference, first, packs, free): room for `size`
        self.waiting: list[tuple[int, int, int]] = []  # heap of (-free, first, packs): room only for shorter documents
        self.placements: list[tuple[int, int, int]] = []  # (first, packs, documents taken by each of these packs)

    def place(self, size: int, count: int) -> None:
        """Place ``count`` documents of ``size`` tokens; ``size`` must be smaller than in the call before."""
        while self.waiting and -self.waiting[0][0] >= size:
            negative, first, packs = heappop(self.waiting)
            self._keep(first, packs, -negative, size)
        while count:
            first, packs, free = self._preferred_run(size, count)
            # The preferred pack is still the preferred one after a document went in, as long as there is room: with
            # best fit nothing that fits has less room, with first fit nothing that fits comes earlier.
            each = free // size
            filled = min(packs, count // each)
            if filled:
                self._put(first, filled, each, free, size)
            count -= filled * each
            if filled < packs:  # the documents ran out inside this run
                first, packs = first + filled, packs - filled
                if count:
                    self._put(first, 1, count, free, size)
                    first, packs, count = first + 1, packs - 1, 0
                if packs:
                    self._keep(first, packs, free, size)

    def _preferred_run(self, size: int, count: int) -> tuple[int, int, int]:
        if self.fitting:
            _, first, packs, free = heappop(self.fitting)
            return first, packs, free
        first, packs = self.opened, -(-count // (self.capacity // size))
        self.opened += packs
        return first, packs, self.capacity

    def _put(self, first: int, packs: int, each: int, free: int, size: int) -> None:
        self.placements.append((first, packs, each))
        self._keep(first, packs, free - each * size, size)

    def _keep(self, first: int, packs: int, free: int, size: int) -> None:
        if free >= size:
            heappush(self.fitting, (self.preference(first, free), first, packs, free))
        elif free:
            heappush(self.waiting, (-free, first, packs))

    def pack_of_each(self) -> np.ndarray:
        """The pack of every document placed (int64), in the order in which they were placed."""
        first, packs, each = np.array(self.placements, dtype=np.int64).reshape(-1, 3).T
        taken = packs * each
        rank = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        return np.repeat(first, taken) + rank // np.repeat(each, taken)
