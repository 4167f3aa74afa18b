"""What a pause costs after it has ended: caches, translations and predictions that the loop's work finds cold.

Only for upper bounds, and only on a CPU, where what pauses and what computes share a core's caches.
"""

from __future__ import annotations

# Beside a compiler that runs in each step the same forward and backward took 25.5 ms where they take 22.7 (medians of
# four rounds of eight steps), an eighth: twice that at most, and at most a tenth of the work itself, since little work
# evicts little.
_OF_THE_REST, _OF_THE_WORK = 4, 10
# Of one switch to another process and back, the most that Li, Ding and Shen measured (Quantifying the cost of context
# switch, 2007).
_SWITCH_NS = 1_500_000


def after_work(work_ns: int, wall_ns: int) -> int:
    """ns that a step's own work takes longer, at most, because other work (a collection, a compilation) evicts it."""
    return max(0, min(work_ns // _OF_THE_WORK, (wall_ns - work_ns) // _OF_THE_REST))


def after_waits(waits: int, waited_ns: int, wall_ns: int) -> int:
    """ns that what follows so many waits takes longer, at most: whoever had the core meanwhile has evicted it."""
    return max(0, min(waits * _SWITCH_NS, waited_ns, (wall_ns - waited_ns) // _OF_THE_REST))
