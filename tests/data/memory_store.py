"""A `DocumentStore` in memory, for the tests of what reads stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class MemoryStore:
    """Documents given as (tokens, mask) pairs, or as tokens alone (all trained). Counts how often tokens are read."""

    def __init__(
        self,
        documents: Sequence[tuple[Sequence[int], Sequence[int]] | Sequence[int]],
        *,
        vocab_size: int = 1000,
        name: str = "memory.jsonl",
        first_line: int = 1,
    ) -> None:
        pairs = [pair if isinstance(pair, tuple) else (pair, [1] * len(pair)) for pair in documents]
        self._tokens = [np.array(tokens, dtype=np.uint32) for tokens, _ in pairs]
        self._masks = [np.array(mask, dtype=np.uint8) for _, mask in pairs]
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        self.trained = np.array([int(mask[1:].sum()) for mask in self._masks], dtype=np.int64)
        self.vocab_size = vocab_size
        self.name = name
        self.first_line = first_line
        self.token_reads = 0
        self.mask_reads = 0

    @property
    def fingerprint(self) -> str:
        return f"{self.name}/{len(self.lengths)}/{int(self.lengths.sum())}"

    def tokens(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        self.token_reads += 1
        return self._slice(self._tokens, doc, start, stop)

    def mask(self, doc: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        self.mask_reads += 1
        return self._slice(self._masks, doc, start, stop)

    def _slice(self, arrays: list[np.ndarray], doc: int, start: int, stop: int | None) -> np.ndarray:
        """As `ShardFolder` reads: what lies beyond a document is refused."""
        length = int(self.lengths[doc])
        if not 0 <= start <= (length if stop is None else stop) <= length:
            raise IndexError(f"document {doc} has {length} tokens, asked for [{start}:{stop}]")
        return arrays[doc][start:stop]

    def source(self, doc: int) -> tuple[str, int]:
        return self.name, self.first_line + doc


def random_store(count: int, seed: int = 0, longest: int = 40, *, name: str = "random.jsonl") -> MemoryStore:
    """Documents of 2..longest random tokens; the last of each is trained, the others by chance."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(rng.integers(2, longest + 1))
        mask = rng.integers(0, 2, length)
        mask[-1] = 1
        documents.append((rng.integers(1, 1000, length).tolist(), mask.tolist()))
    return MemoryStore(documents, name=name)
