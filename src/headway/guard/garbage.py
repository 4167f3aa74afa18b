"""The pen of Python's collector (`gc.freeze`). A process has one only: what was put there for good must stay there."""

from __future__ import annotations

import gc

_kept = False


def keep() -> None:
    """What is there now stays for good: no collection looks through it again, none writes to (and so copies) a page
    that a forked process shares with its parent."""
    global _kept
    gc.freeze()
    _kept = True


def is_kept() -> bool:
    """Whether somebody keeps objects in the pen. Where nobody said so they are counted, which looks at every one."""
    return _kept or gc.get_freeze_count() > 0
