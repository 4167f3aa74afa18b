"""How long this process was ready to compute and had no CPU: what tells a slow rank from a busy machine."""

from __future__ import annotations

import contextlib
import os

_FILE = "/proc/self/schedstat"


class CpuWait:
    """Counts for the main thread (Linux: the scheduler's run delay); always 0 where the system does not tell."""

    def __init__(self, path: str = _FILE) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._before = self._read()

    def since_last(self) -> int:
        """Nanoseconds since the last call."""
        before, self._before = self._before, self._read()
        return max(0, self._before - before)

    def _read(self) -> int:
        if self._file < 0:
            return 0
        try:
            return int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return 0
