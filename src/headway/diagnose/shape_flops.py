"""FLOPs of a device's events from the operator shapes that the profiler recorded, and how much of them that covers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from headway.account.events import Flops
from headway.diagnose.facts import KINDS, NONE, DeviceFacts, GpuClass, RankFacts
from headway.diagnose.phases import RECOMPUTE
from headway.diagnose.table import clipped, inside

CONVENTION = (
    "from operator shapes: 2 FLOPs a multiply-add of matrix products and fused attention, backward of attention twice "
    "its forward, attention with as many keys as queries counted as causal (half), nothing for anything else"
)

Dims = Sequence[Sequence[int]]
# What may hold matrix products: without shapes, their FLOPs are not known. All other kinds hold none.
_PRODUCTS = tuple(KINDS.index(kind) for kind in ("matmul", "attention", "convolution", "other"))
_FUSED_LOSS = re.compile(r"_cce_|linear_cross|_indexed_neg_dot|liger.*linear", re.IGNORECASE)
_LOSS = KINDS.index("loss")


@dataclass(frozen=True)
class Counted:
    """FLOPs inside the window. `coverage`: share of compute time whose FLOPs are known, and no more than the share of
    the products' own time; 0 to 1."""

    products: float
    recompute: float
    coverage: float

    def flops(self, filled: float) -> Flops:
        """`filled`: share of the slots that hold a token, 0 to 1."""
        once = self.products - self.recompute
        useful = round(once * filled)
        return Flops(useful=useful, padding=round(once) - useful, recompute=round(self.recompute))


def count(rank: RankFacts, device: DeviceFacts) -> Counted:
    """Every operator counts once, whatever number of kernels it launched; of one that reaches out of the window the
    share of its kernels' time that lies inside."""
    events = device.events
    rows = inside(events, device.window)
    rows = rows[events.klass[rows] == GpuClass.COMPUTE]
    spent = clipped(events, rows, device.window)
    ops, place = np.unique(events.op[rows], return_inverse=True)
    flops = np.array([_of_op(rank, op) if op != NONE else 0.0 for op in ops.tolist()])
    known = (flops > 0)[place]
    shaped = np.where(ops == NONE, False, rank.host.shapes[ops] != NONE)[place]
    fused = np.array([bool(_FUSED_LOSS.search(name)) for name in rank.names] or [False])
    product = np.isin(events.kind[rows], _PRODUCTS) | ((events.kind[rows] == _LOSS) & fused[events.name[rows]]) | known
    total, of_products, covered = (int(spent[mask].sum()) for mask in (spent >= 0, product, known))
    coverage = min(
        (covered + int(spent[~product & shaped].sum())) / total if total else 0.0,
        covered / of_products if of_products else 0.0,
    )
    whole = np.bincount(place, events.duration[rows], len(ops))
    part = flops * np.bincount(place, spent, len(ops)) / np.maximum(whole, 1)
    again = np.bincount(place, device.phase[rows] == RECOMPUTE, len(ops)) > 0
    return Counted(float(part.sum()), float(part[again].sum()), coverage)


def _of_op(rank: RankFacts, op: int) -> float:
    index = rank.host.shapes[op]
    return 0.0 if index == NONE else operator_flops(rank.names[rank.host.name[op]], rank.shapes[index])


@lru_cache(maxsize=4096)
def operator_flops(name: str, shapes: str) -> float:
    """FLOPs of one operator from its "Input Dims"; 0 for operators that hold no product or whose shapes do not tell.

    A padded batch counts as it was computed.
    """
    formula = _FORMULAS.get(name.removesuffix("_"))
    if formula is None:
        return 0.0
    try:
        found = formula(msgspec.json.decode(shapes))
    except (msgspec.DecodeError, ValueError, IndexError, TypeError):
        return 0.0
    return found if found > 0 and math.isfinite(found) else 0.0


def _mm(first: int) -> Callable[[Dims], float]:
    """Operands [.., m, k] and [.., k, n], the first at this place."""

    def flops(dims: Dims) -> float:
        left, right = dims[first], dims[first + 1]
        if len(right) == 1:  # a matrix and a vector
            right = [*right, 1]
        if len(left) < 2 or left[-1] != right[-2]:
            raise ValueError
        return 2.0 * math.prod(left) * right[-1]

    return flops


def _linear(dims: Dims) -> float:
    """Input [.., k] and weight [n, k]."""
    if not dims[0] or dims[0][-1] != dims[1][-1]:
        raise ValueError
    return 2.0 * math.prod(dims[0]) * dims[1][0]


def _attention(first: int, heads_first: bool, passes: int) -> Callable[[Dims], float]:
    """Query, key, value from this place on: [b, heads, s, d] or [b, s, heads, d]."""

    def flops(dims: Dims) -> float:
        query, key, value = dims[first : first + 3]
        if not len(query) == len(key) == len(value) == 4:  # packed documents have three: their lengths are not here
            raise ValueError
        heads, queries = (query[1], query[2]) if heads_first else (query[2], query[1])
        keys = key[2] if heads_first else key[1]
        seen = 0.5 if queries == keys else 1.0
        return passes * 2.0 * query[0] * heads * queries * keys * (query[3] + value[3]) * seen

    return flops


_FORMULAS: dict[str, Callable[[Dims], float]] = {
    "aten::mm": _mm(0),
    "aten::bmm": _mm(0),
    "aten::mv": _mm(0),
    "aten::addmm": _mm(1),
    "aten::baddbmm": _mm(1),
    "aten::addmv": _mm(1),
    "aten::_scaled_mm": _mm(0),
    "aten::_int_mm": _mm(0),
    "aten::mkldnn_linear": _linear,
    "aten::_flash_attention_forward": _attention(0, False, 1),
    "aten::_flash_attention_backward": _attention(1, False, 2),
    "aten::_efficient_attention_forward": _attention(0, False, 1),
    "aten::_efficient_attention_backward": _attention(1, False, 2),
    "aten::_cudnn_attention_forward": _attention(0, True, 1),
    "aten::_cudnn_attention_backward": _attention(1, True, 2),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, True, 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, True, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(0, True, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, True, 2),
    "flash_attn::_flash_attn_forward": _attention(0, False, 1),
    "flash_attn::_flash_attn_backward": _attention(1, False, 2),
}  # fmt: skip
