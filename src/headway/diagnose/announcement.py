"""How one rank tells the others which trace comes next: a file in the run folder that all of them read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Announcement:
    """The step of the next trace, in `traces/next`. Ranks that do not see the first rank's folder record nothing."""

    def __init__(self, traces: Path) -> None:
        self._path = traces / "next"

    def decide(self, step: int, wanted: bool) -> None:
        """The first rank's word. A file that cannot be written costs the trace, never the run."""
        with contextlib.suppress(OSError):
            if not wanted:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside = self._path.with_name(f".next.{os.getpid()}.tmp")
            aside.write_text(f"{step}\n", encoding="utf-8")
            aside.replace(self._path)

    def is_for(self, step: int) -> bool:
        """Whether this step was announced, on whatever rank."""
        try:
            return int(self._path.read_text(encoding="utf-8")) == step
        except (OSError, ValueError):
            return False
