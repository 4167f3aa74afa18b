"""How much memory one rank may use, as the machine says."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_capacity(device_type: str, ranks_here: int) -> float:
    """Bytes a rank can have in all, what it holds already included: of its GPU, or its share of the host's memory."""
    if device_type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return float(free + torch.cuda.memory_reserved())
    return free_on_host() / ranks_here + psutil.Process().memory_info().rss


def free_on_host() -> float:
    """Bytes that are free on this host, in this container: what files hold in the page cache can be had back."""
    free = float(psutil.virtual_memory().available)
    root = _CGROUP[0].parent
    try:
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text()) - int(stat["inactive_file"]) - int(stat["active_file"])
    except (OSError, ValueError, KeyError):  # how much of its limit is in use is not told here
        return min(free, _cgroup_limit())
    return min(free, max(0.0, _cgroup_limit() - used))


def _cgroup_limit() -> float:
    """A container's limit; infinite where there is none."""
    for path in _CGROUP:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return float(text)
    return float("inf")
