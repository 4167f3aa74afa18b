"""Prefill and decoding told from what attention is asked for, where nobody has annotated them.

A prompt's queries are as many as its keys (or many of them: a chunk), those of a decoding pass are few against a cache
of many: one position, or as many as heads share their keys, where a library folds those into positions. From the shapes
that PyTorch records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headway.account.intervals import measure
from headway.diagnose.facts import HostKind, Int64
from headway.diagnose.view import Mask, View

_ATTENTION = r"^aten::scaled_dot_product_attention$|^aten::_?(?:efficient|flash)_attention_forward$"
_BACKWARD = r"Backward\d*$|^autograd::engine"
_PACKED = re.compile(r"_attention_forward$")  # [batch, positions, heads, width], unlike the public call
_FEW = 16  # queries of a decoding pass at most: heads that share keys, or tokens guessed ahead


@dataclass(frozen=True)
class Passes:
    """Forward passes of generation: device ns of both kinds, how many passes, positions of the prompts."""

    prefill_ns: int
    decode_ns: int
    prefills: int
    decodes: int
    positions: tuple[int, ...]


def passes_of(view: View) -> Passes | None:
    """None where the trace shows no generation: no shapes, no single-position query, a backward pass, or single queries
    that pool (`_decodes`)."""
    rows = view.host_rows(_ATTENTION, (HostKind.OP,))
    if not len(rows) or len(view.host_rows(_BACKWARD, (HostKind.OP,))):
        return None
    counts = np.array([_queries_and_keys(view, int(row)) for row in rows], np.int64)
    rows, counts = rows[counts[:, 0] > 0], counts[counts[:, 0] > 0]
    queries, keys = counts[:, 0], counts[:, 1]
    long = (queries > _FEW) | ((queries == keys) & (queries > 1))
    if not len(rows) or long.all() or not long.any():
        return None
    starts = view.rank.host.start[rows]
    # A stretch of one kind lasts to the first attention of the next; what runs before any belongs to the first.
    turns = np.flatnonzero(np.diff(long.astype(np.int8))) + 1
    edges, kinds = starts[turns], long[np.concatenate(([0], turns))]
    of_prefill = kinds[np.searchsorted(edges, _when(view), "right")]
    stretches = np.concatenate(([0], turns))
    lengths = np.diff(np.append(stretches, len(rows)))
    if not _decodes([keys[at : at + count] for at, count in zip(stretches, lengths, strict=True)], kinds):
        return None
    layers = int(lengths.min())
    return Passes(
        prefill_ns=_busy(view, of_prefill),
        decode_ns=_busy(view, ~of_prefill),
        prefills=int(kinds.sum()),
        decodes=int((~long).sum()) // max(1, layers),
        positions=tuple(int(queries[at]) for at, kind in zip(stretches, kinds, strict=True) if kind),
    )


def _decodes(keys: Sequence[Int64], of_prefill: Mask) -> bool:
    """Whether the stretches of few queries generate: their cache grows, or (a cache of fixed size) they are longer than
    a prompt's. An image encoder that pools has one query a layer, too, in a few last layers, over the same keys."""
    decoding = [one for one, prefill in zip(keys, of_prefill, strict=True) if not prefill]
    prompts = [len(one) for one, prefill in zip(keys, of_prefill, strict=True) if prefill]
    grows = any(one.min() != one.max() for one in decoding)
    return grows or float(np.median([len(one) for one in decoding])) > float(np.median(prompts))


def _queries_and_keys(view: View, row: int) -> tuple[int, int]:
    """Positions of an attention call's queries and keys, zeros where its shapes do not tell (documents packed end to
    end have three axes, or their boundaries beside them)."""
    packed = _PACKED.search(view.rank.names[view.rank.host.name[row]])
    axis = 1 if packed else -2
    try:
        shapes = msgspec.json.decode(view.shapes_of(row), type=list[Any])
        if packed and (len(shapes[0]) != 4 or any(len(shape) == 1 and shape[0] > 1 for shape in shapes[3:6])):
            return 0, 0
        return int(shapes[0][axis]), int(shapes[1][axis])
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError):
        return 0, 0


def _when(view: View) -> np.ndarray:
    """When each device event was launched (on a CPU: began); its own start where no launch is known."""
    events = view.device.events
    if not view.on_gpu or not len(view.rank.host.start):
        return events.start
    return np.where(events.launch >= 0, view.rank.host.start[np.maximum(events.launch, 0)], events.start)


def _busy(view: View, mask: Mask) -> int:
    return measure(view.union(mask & view.inside))
