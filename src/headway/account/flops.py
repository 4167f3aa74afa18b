"""Exact training FLOPs of real documents: matrices per token, attention per pair of tokens that see each other.

Conventions (docs/flops.md): a multiply-add is 2 FLOPs; lookups, norms, activations, softmax and the optimizer are 0;
the backward pass of a fully trained model is twice its forward. Everything is a Python int and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.account.errors import UserError
from headway.account.events import Flops
from headway.account.layers import Attention, Layer, Weight
from headway.account.shape import ModelShape

Convention = Literal["causal", "full-attention"]
Recompute = Literal["none", "selective", "full", "offload"] | int
Lengths = npt.NDArray[np.int64]

_PAIRS: dict[str, str] = {
    "causal": "attention per document over the pairs the causal mask and window allow",
    "full-attention": "full attention: per document over all n*n pairs (n*window where windowed), not halved",
}


@dataclass(frozen=True, slots=True)
class LoraShape:
    """LoRA (arXiv 2106.09685) of one `rank` on the modules whose name is, or ends with, one of `targets`.

    `input_gradient`: something makes the embedding's output require a gradient (transformers' own gradient
    checkpointing does), so that nothing in the first layer is saved.
    """

    rank: int
    targets: tuple[str, ...]
    input_gradient: bool = False

    def adapts(self, weight: Weight) -> bool:
        """PEFT adapts Linear modules; experts are stored as one parameter and are left alone."""
        if weight.copies > 1:
            return False
        return any(weight.name == target or weight.name.endswith(f".{target}") for target in self.targets)


Trainable = Literal["full"] | LoraShape


def describe(convention: Convention = "causal", trainable: Trainable = "full", trained_head: bool = False) -> str:
    """One line that names what is counted; every printed MFU carries it, because conventions differ by a third.

    `trained_head`: the head runs only where a label is, and only that is counted, as useful too.
    """
    weights = "6 FLOPs per active matrix weight and token"
    if isinstance(trainable, LoraShape):
        weights = "4 FLOPs per frozen active matrix weight and token, 6 per LoRA weight (adapters of experts uncounted)"
    head = "head at trained tokens only" if trained_head else "head included"
    matrices = f"{weights} (no input embedding, {head})"
    return f"convention {convention!r}: {matrices}; {_PAIRS[convention]}; no recompute"


@dataclass(frozen=True, slots=True)
class Pass:
    """FLOPs of one part, forward and backward."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __sub__(self, other: Pass) -> Pass:
        return Pass(self.forward - other.forward, self.backward - other.backward)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """FLOPs by part: the layers' matrices (adapters included), attention's two products, the output head."""

    matmul: Pass = Pass()
    attention: Pass = Pass()
    head: Pass = Pass()

    @property
    def forward(self) -> int:
        return self.matmul.forward + self.attention.forward + self.head.forward

    @property
    def backward(self) -> int:
        return self.matmul.backward + self.attention.backward + self.head.backward

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.matmul + other.matmul, self.attention + other.attention, self.head + other.head)

    def __sub__(self, other: FlopCount) -> FlopCount:
        return FlopCount(self.matmul - other.matmul, self.attention - other.attention, self.head - other.head)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """One step's FLOPs. The four parts add up to `computed`, always: what is not useful has a name."""

    useful: FlopCount = FlopCount()
    padding: FlopCount = FlopCount()
    recompute: FlopCount = FlopCount()
    rework: FlopCount = FlopCount()

    @property
    def computed(self) -> int:
        """Everything the devices did."""
        return self.useful.total + self.padding.total + self.recompute.total + self.rework.total

    def as_rework(self) -> StepFlops:
        """The same FLOPs of a step that was later rolled back or lost: none of it was useful."""
        return StepFlops(rework=self.useful + self.padding + self.recompute + self.rework)

    def to_flops(self) -> Flops:
        """The totals, as a step's line of metrics.jsonl holds them."""
        return Flops(
            useful=self.useful.total,
            padding=self.padding.total,
            recompute=self.recompute.total,
            rework=self.rework.total,
        )

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(
            self.useful + other.useful,
            self.padding + other.padding,
            self.recompute + other.recompute,
            self.rework + other.rework,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SlotLayout:
    """What a step really computes: the lengths of the segments attention runs over, int64, padding among them."""

    segments: Lengths

    @classmethod
    def packed(cls, segments: npt.ArrayLike) -> SlotLayout:
        """Every document and every padding document of the packs: `np.diff(cu_seqlens)` of all micro-batches."""
        return cls(_lengths(segments, "segments"))

    @classmethod
    def rectangular(cls, rows: int, width: int) -> SlotLayout:
        """`rows` rows padded to `width`: every row is computed at the padded width."""
        return cls(np.full(rows, width, dtype=np.int64))

    @property
    def slots(self) -> int:
        return int(self.segments.sum())

    def __add__(self, other: SlotLayout) -> SlotLayout:
        return SlotLayout(np.concatenate([self.segments, other.segments]))


def attended_pairs(
    lengths: npt.ArrayLike, window: int | None = None, chunk: int | None = None, convention: Convention = "causal"
) -> int:
    """(query, key) pairs that attention multiplies, summed over documents of `lengths`; exact.

    Causal: n(n+1)/2, with a sliding window sum(min(i, window)), with chunks each chunk on its own.
    """
    n = _lengths(lengths, "lengths")
    if chunk is not None:
        full, rest = np.divmod(n, chunk)
        whole = attended_pairs(np.array([chunk]), convention=convention)
        return int(full.sum()) * whole + attended_pairs(rest, convention=convention)
    inside = n if window is None else np.minimum(n, window)
    if convention == "full-attention":
        return _exact_sum(n * inside)
    return _exact_sum(inside * (inside + 1) // 2 + (n - inside) * inside)


def document_flops(
    shape: ModelShape,
    lengths: npt.ArrayLike,
    *,
    trainable: Trainable = "full",
    convention: Convention = "causal",
    head_tokens: int | None = None,
) -> FlopCount:
    """Exact FLOPs of training once on documents of `lengths` (int64 [D], tokens), forward and backward.

    `head_tokens`: positions the output head is computed at, when the loss skips some (default: every token).
    Raises UserError when no module matches the LoRA targets, ValueError for negative lengths.
    """
    n = _lengths(lengths, "lengths")
    tokens = int(n.sum())
    rates = _rates(shape, trainable)
    heads = tokens if head_tokens is None else head_tokens
    attention = Pass()
    for kind, per_pair in rates.attention:
        pairs = attended_pairs(n, kind.window, kind.chunk, convention)
        attention += Pass(per_pair.forward * pairs, per_pair.backward * pairs)
    return FlopCount(
        matmul=Pass(rates.matmul.forward * tokens, rates.matmul.backward * tokens),
        attention=attention,
        head=Pass(rates.head.forward * heads, rates.head.backward * heads),
    )


def step_flops(
    shape: ModelShape,
    lengths: npt.ArrayLike,
    layout: SlotLayout,
    *,
    recompute: Recompute = "none",
    trainable: Trainable = "full",
    convention: Convention = "causal",
    head_tokens: int | None = None,
    head_slots: int | None = None,
) -> StepFlops:
    """Split everything a step computes into useful, padding and recompute; their sum is `computed`.

    `lengths` are the real documents (int64 [D]), `layout` the segments computed. Padding is the difference between
    the two: its slots, its own attention, and in rectangular rows the attention over the padded width. `recompute`
    "full" (and "offload") runs the layers' forward again (the head is kept), a number that of the first so many layers;
    "selective" keeps every product but those of experts. Raises ValueError when the layout is smaller than the
    documents.
    """
    useful = document_flops(shape, lengths, trainable=trainable, convention=convention, head_tokens=head_tokens)
    computed = document_flops(
        shape, layout.segments, trainable=trainable, convention=convention, head_tokens=head_slots
    )
    padding = computed - useful
    if min(padding.matmul.forward, padding.attention.forward, padding.head.forward) < 0:
        raise ValueError("the layout computes less than its documents hold; is a document missing from it?")
    again = FlopCount()
    if isinstance(recompute, int):
        part = replace(shape, layers=shape.layers[:recompute], outer=())
        some = document_flops(part, layout.segments, trainable=trainable, convention=convention)
        experts = _experts_forward(shape.layers[recompute:], layout.slots)
        again = FlopCount(matmul=Pass(some.matmul.forward + experts), attention=Pass(some.attention.forward))
    elif recompute == "selective":
        again = FlopCount(matmul=Pass(_experts_forward(shape.layers, layout.slots)))
    elif recompute in ("full", "offload"):
        again = FlopCount(matmul=Pass(computed.matmul.forward), attention=Pass(computed.attention.forward))
    return StepFlops(useful, padding, again)


def _experts_forward(layers: Sequence[Layer], slots: int) -> int:
    return sum(2 * w.active_parameters * slots for layer in layers for w in layer.weights if w.copies > 1)


@dataclass(frozen=True, slots=True)
class _Rates:
    """FLOPs per token (`matmul`), per head position (`head`) and per attended pair (`attention`)."""

    matmul: Pass
    head: Pass
    attention: tuple[tuple[Attention, Pass], ...]


@lru_cache(maxsize=64)
def _rates(shape: ModelShape, trainable: Trainable) -> _Rates:
    """Coefficients of one shape; cached, because the step must not walk a hundred layers again."""
    walk = _Walk(trainable)
    for weight in shape.outer:
        walk.weight(weight, upstream=walk.upstream)
    for layer in shape.layers:
        walk.layer(layer)
    if isinstance(trainable, LoraShape) and not walk.adapted:
        names = sorted({weight.name for layer in shape.layers for weight in layer.weights if weight.copies == 1})
        raise UserError(f"LoRA targets {', '.join(trainable.targets)} match no module; there are: {', '.join(names)}")
    layers = walk.matmul
    walk.matmul = Pass()
    walk.weight(shape.head, upstream=walk.upstream)
    return _Rates(layers, walk.matmul, tuple(walk.attention.items()))


class _Walk:
    """Follows the forward order to know which matrices need a gradient with respect to their input.

    A frozen matrix needs one (2 FLOPs per weight) only if something trainable lies before it. Fully trained models
    train the embedding, so there everything needs both gradients. Under LoRA the first adapted layer saves some.
    """

    def __init__(self, trainable: Trainable) -> None:
        self.lora = trainable if isinstance(trainable, LoraShape) else None
        self.upstream = self.lora is None or self.lora.input_gradient
        self.adapted = 0
        self.matmul = Pass()
        self.attention: dict[Attention, Pass] = {}

    def weight(self, weight: Weight, upstream: bool) -> bool:
        """Add one matrix; returns whether it carries a trainable adapter."""
        size = 2 * weight.active_parameters
        if self.lora is None:
            self.matmul += Pass(size, 2 * size)
            return False
        self.matmul += Pass(size, size * upstream)
        if not self.lora.adapts(weight):
            return False
        self.adapted += 1
        down, up = 2 * self.lora.rank * weight.inputs, 2 * self.lora.rank * weight.outputs
        self.matmul += Pass(down + up, down * (1 + upstream) + 2 * up)
        return True

    def layer(self, layer: Layer) -> None:
        before = self.upstream
        inside = before | self._stage(layer, ("attention_in",), before)
        inside |= self._stage(layer, ("attention_mid",), inside)
        if layer.attention is not None:
            kind = layer.attention
            per_pair = 2 * kind.heads * (kind.qk_dim + kind.v_dim)
            self.attention[kind] = self.attention.get(kind, Pass()) + Pass(per_pair, 2 * per_pair * inside)
        after_attention = inside | self._stage(layer, ("attention_out",), inside)
        inside = before if layer.parallel else after_attention
        inside |= self._stage(layer, ("mlp_in", "router"), inside)
        inside |= self._stage(layer, ("mlp_out",), inside)
        self.upstream = after_attention | inside

    def _stage(self, layer: Layer, roles: tuple[str, ...], upstream: bool) -> bool:
        found = [self.weight(weight, upstream) for weight in layer.weights if weight.role in roles]
        return any(found)


def _lengths(values: npt.ArrayLike, what: str) -> Lengths:
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what} must be whole numbers of tokens, not {array.dtype}")
    array = array.astype(np.int64, copy=False).ravel()
    if array.size and int(array.min()) < 0:
        raise ValueError(f"{what} must not be negative")
    return array


def _exact_sum(values: Lengths) -> int:
    """Sum without int64 overflow: a million long documents pass 2^63 pairs."""
    return (int((values >> 31).sum()) << 31) + int((values & 0x7FFFFFFF).sum())
