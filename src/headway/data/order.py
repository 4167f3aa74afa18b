"""Random orders that are a pure function of their seeds, on every machine and with every version of numpy.

numpy's generators may change their streams between releases; an epoch's order may not, because a resumed run would then
read other documents than the run it continues.
"""

from __future__ import annotations

import hashlib

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)


def hash_keys(count: int, *seeds: int | str) -> np.ndarray:
    """``count`` pseudo-random uint64 keys: SplitMix64 (Steele, Lea and Flood 2014) started from a hash of ``seeds``."""
    start = int.from_bytes(hashlib.sha256(repr(seeds).encode()).digest()[:8], "little")
    keys = np.arange(1, count + 1, dtype=np.uint64)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(start)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return keys


def permutation(count: int, *seeds: int | str) -> np.ndarray:
    """A random permutation of ``0..count-1`` (int64), a pure function of ``seeds``; ``count`` < 2**32."""
    keys = hash_keys(count, *seeds)
    # The index in the low half makes every key unique: the order cannot depend on how a machine sorts equal keys.
    keys &= ~_LOW
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & _LOW).astype(np.int64)


def stable_order(groups: np.ndarray) -> np.ndarray:
    """Indices (int64) that sort ``groups`` (integers in 0..2**32-1) ascending, equal ones in their present order.

    The same as ``np.argsort(groups, kind="stable")``, several times faster on a million entries.
    """
    keys = groups.astype(np.uint64) << np.uint64(32)
    keys |= np.arange(len(groups), dtype=np.uint64)
    keys.sort()
    return (keys & _LOW).astype(np.int64)
