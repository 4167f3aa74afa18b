"""Slots of a window, from operator shapes, else from the loss kernel's grid."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import msgspec
import numpy as np

from headway.diagnose.facts import NONE, DeviceFacts, HostKind, RankFacts

# PyTorch's softmax over a large last dimension starts one block a row: its grid is the number of slots.
_GRID = re.compile(rb'cunn_SoftMaxForward[^"]*"[^{}]*\{[^{}]*"grid":\s*\[(\d+),\s*1,\s*1\]')
_CHUNK, _EVENT = 1 << 24, 1 << 14  # bytes; no event is longer than the second


def slots_of_shapes(rank: RankFacts, device: DeviceFacts) -> int | None:
    """Indices that were looked up in the token embedding inside the window: the first embedding of each forward."""
    host, window = rank.host, device.window
    numbers = [i for i, name in enumerate(rank.names) if name == "aten::embedding"]
    rows = np.flatnonzero(np.isin(host.name, numbers) & (host.kind == HostKind.OP) & (host.shapes != NONE))
    rows = rows[(host.start[rows] >= window.start_ns) & (host.start[rows] < window.end_ns)]
    widest = 0
    sizes: dict[int, int] = {}
    for row in rows.tolist():
        try:
            table, indices = msgspec.json.decode(rank.shapes[host.shapes[row]])[:2]
        except (msgspec.DecodeError, ValueError, TypeError):
            continue
        if isinstance(table, list) and len(table) == 2 and isinstance(indices, list) and indices:
            # Positions and types are embedded too; the token table has most rows.
            widest = max(widest, int(table[0]))
            sizes[int(table[0])] = sizes.get(int(table[0]), 0) + int(np.prod(indices))
    return sizes.get(widest) or None


def slots_of_grids(path: Path) -> int | None:
    """Rows of all softmaxes over the vocabulary in a trace file."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    rows, carried = 0, b""
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                text = carried + chunk
                # What ends inside the carried part was counted with the chunk before.
                rows += sum(int(found[1]) for found in _GRID.finditer(text) if found.end() > len(carried))
                carried = text[-_EVENT:]
    except (OSError, EOFError):
        return rows or None
    return rows or None
