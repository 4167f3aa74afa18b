"""What a pause costs after it has ended: caches, translations and predictions that the loop's work finds cold."""

from __future__ import annotations

# Beside a compiler that runs in each step the same forward and backward took 25.5 ms where they take 22.7 (medians of
# four rounds of eight steps), an eighth: twice that at most, and at most a tenth of the pause itself, since a short one
# evicts little.
_OF_THE_REST, _OF_THE_PAUSE = 4, 10


def after(pause_ns: int, wall_ns: int) -> int:
    """ns that what follows the pauses takes longer for them, at most. For upper bounds on a CPU, where what pauses and
    what computes share a core's caches."""
    return max(0, min(pause_ns // _OF_THE_PAUSE, (wall_ns - pause_ns) // _OF_THE_REST))
