"""Did the kernel kill for memory? SIGKILL alone does not say: operators and schedulers send it too."""

from __future__ import annotations

import re
from pathlib import Path

_V2, _V1 = "memory.events", "memory/memory.oom_control"


class OomCounter:
    """The OOM kills that this process's control group has counted since the object was made (cgroup v2 and v1)."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._files = [file for file in _candidates(root, membership) if file.is_file()]
        self._start = self._read()

    def new_kills(self) -> int:
        """0 also where the system does not count."""
        return max(0, self._read() - self._start)

    def _read(self) -> int:
        counts = [0]
        for file in self._files:
            try:
                match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            except OSError:
                continue
            counts.append(int(match[1]) if match else 0)
        return max(counts)


def _candidates(root: Path, membership: Path) -> list[Path]:
    """Of the process's own group and, in a container that sees its group as the root, of the root."""
    found = [root / _V2, root / _V1]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        path = line.rpartition(":")[2].lstrip("/")
        found += [root / path / _V2, root / "memory" / path / "memory.oom_control"]
    return found
