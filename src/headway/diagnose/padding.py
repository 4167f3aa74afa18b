"""Slots of a window, and the share that no token filled: from operator shapes, else from the loss kernel's grid."""

from __future__ import annotations

import dataclasses
import gzip
import re
from pathlib import Path

import msgspec
import numpy as np

from headway.diagnose.facts import NONE, DeviceFacts, Efficiency, HostKind, JobFacts, RankFacts

# PyTorch's softmax over a large last dimension starts one block a row: its grid is the number of slots.
_GRID = re.compile(rb'cunn_SoftMaxForward[^"]*"[^{}]*\{[^{}]*"grid":\s*\[(\d+),\s*1,\s*1\]')
_CHUNK, _EVENT = 1 << 24, 1 << 14  # bytes; no event is longer than the second


def with_padding(job: JobFacts, tokens: int, slots: int | None = None) -> JobFacts:
    """The job with the padding of each rank's window: `tokens` are the real ones of one rank's whole window.

    `slots` where the user knows them; else they are read from the trace. A rank whose slots cannot be told has a note.
    """
    return dataclasses.replace(job, ranks=tuple(_with_padding(rank, tokens, slots) for rank in job.ranks))


def _with_padding(rank: RankFacts, tokens: int, given: int | None) -> RankFacts:
    slots = given or slots_of_shapes(rank, rank.device()) or slots_of_grids(Path(rank.path))
    if not slots or slots < tokens:
        why = (
            "no operator shapes (record_shapes=True) and no softmax over the vocabulary"
            if not slots
            else (f"the trace computes {slots:,} slots, fewer than the {tokens:,} tokens given")
        )
        return dataclasses.replace(rank, notes=(*rank.notes, f"padding is not known: {why}; give --slots"))
    devices = tuple(dataclasses.replace(item, efficiency=_efficiency(item, tokens, slots)) for item in rank.devices)
    return dataclasses.replace(rank, devices=devices)


def _efficiency(device: DeviceFacts, tokens: int, slots: int) -> Efficiency:
    known = device.efficiency or Efficiency(
        mfu=None, hfu=None, flops=None, coverage=0.0, tokens=None, slots=None, padding=None, padding_is_hint=False,
        peak_text="", convention="", why="no model was given, so FLOPs are not known",
    )  # fmt: skip
    return dataclasses.replace(known, tokens=tokens, slots=slots, padding=1 - tokens / slots, padding_is_hint=False)


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
