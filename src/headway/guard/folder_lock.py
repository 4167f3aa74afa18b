"""One training at a time in a run folder: two would write one metrics file and one set of checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from headway.account.errors import UserError

_POLL_S = 0.1


class FolderLock:
    """An advisory lock on a file in the folder. The system lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._fd = -1

    def acquire(self, wait_s: float = 0.0) -> None:
        """Raises UserError while another process holds it, after `wait_s` seconds."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                self.release()
                raise UserError(
                    f"{self._path.parent}: another training runs in this folder; wait for it, or set another name"
                ) from error

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
