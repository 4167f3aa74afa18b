"""Bytes that one rank needs to train, and the least activation recompute with which they fit. Arithmetic, no torch.

What a layer keeps for its backward pass is counted from its real matrices, for the eager path (the largest); fused
kernels keep less, so the estimate errs towards more recompute, and a rehearsal on the worst pack has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headway.account.layers import Layer
from headway.account.shape import ModelShape

Level = Literal["none", "selective", "full", "offload"] | int
"""How much of the forward pass is computed again in backward, in order of memory: nothing; everything but matrix
products and attention (``selective``); that, and the first n layers wholly; every layer (``full``); every layer, their
inputs kept in host memory (``offload``)."""

_PARTS = 4  # steps between selective and full; finer ones would cost a rehearsal each and gain little
# Blocks of the allocator that cannot be reused at once, and the driver's and libraries' own memory.
_FRAGMENTED = 1.08
_CONTEXT = 1.5 * 2**30


@dataclass(frozen=True)
class Work:
    """What one micro-batch looks like to memory.

    Attributes:
        slots: token slots of a micro-batch.
        compute_bytes: width of the compute dtype.
        residual_bytes: width of the residual stream (float32 under autocast, the compute dtype under FSDP2).
        attention_bytes: width that attention's kernel works in (0: the compute dtype's).
        score_slots: key slots that stored attention scores have a query (0: the attention keeps no scores).
        logit_copies: full [slots, vocab] copies of the logits in the compute dtype; 0 with a fused loss.
    """

    slots: int
    compute_bytes: int
    residual_bytes: int
    attention_bytes: int = 0
    score_slots: int = 0
    logit_copies: int = 2


@dataclass(frozen=True)
class States:
    """What a rank holds whatever the micro-batch is, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights in the compute dtype: autocast's copies, or what FSDP2 gathers at once."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class Estimate:
    """Predicted peak of one rank at one level, in bytes; `total` holds an allowance for fragmentation on a device."""

    level: Level
    states: float
    activations: float
    logits: float
    working: float
    reserve: float

    @property
    def total(self) -> float:
        return self.states + self.activations + max(self.logits, self.working) + self.reserve


def ladder(layers: int, *, offload: bool = False) -> list[Level]:
    """Every level for a model of `layers` layers, the least first."""
    parts: list[Level] = [n for n in sorted({layers * i // _PARTS for i in range(1, _PARTS)}) if 0 < n < layers]
    return ["none", "selective", *parts, "full", *(["offload"] if offload else [])]  # type: ignore[list-item]


def layer_bytes(layer: Layer, hidden: int, work: Work, level: Literal["none", "selective", "full", "offload"]) -> float:
    """Bytes that one layer keeps between its forward and its backward pass, for `work.slots` slots."""
    wide, residual = work.compute_bytes, work.residual_bytes
    if level == "offload":
        return 0.0
    kept = float(residual * hidden)  # the layer's input
    if level == "full":
        return kept * work.slots
    products = sum(_per_token(layer))
    attention = layer.attention
    context = attention.heads * attention.v_dim if attention is not None else 0
    if level == "selective":
        # Outputs of the matrix products and of attention; everything between them is computed again.
        kept += wide * (products + context)
        return kept * work.slots
    kept += residual * hidden  # the stream between attention and MLP
    # Each norm: its normal form, and its input widened where the stream is narrow.
    kept += 2 * hidden * (residual + (4 if residual < 4 else 0))
    kept += wide * hidden * _kept_inputs(layer, casts=wide != residual)
    if attention is not None:
        kept += _attention_bytes(layer, hidden, work)
    kept += wide * _mlp_inner(layer)
    return kept * work.slots


def _kept_inputs(layer: Layer, *, casts: bool) -> int:
    """Inputs of matrix products that read the stream: one for attention and one for the MLP, but autocast makes (and
    autograd keeps) a narrow copy for each product."""
    readers = [weight for weight in layer.weights if weight.role in ("attention_in", "mlp_in") and weight.copies == 1]
    return max(2, len(readers)) if casts else 2


def _attention_bytes(layer: Layer, hidden: int, work: Work) -> float:
    """Per token: the kernel's inputs, output and log-sum-exp, the output projection's input, norms of queries and keys,
    and scores where the kernel keeps them (as softmax's result and as the product's input)."""
    attention, wide, kernel = layer.attention, work.compute_bytes, work.attention_bytes or work.compute_bytes
    assert attention is not None
    queries_keys = (attention.heads + attention.kv_heads) * attention.qk_dim
    context = attention.heads * attention.v_dim
    kept = kernel * (queries_keys + attention.kv_heads * attention.v_dim + context)
    kept += wide * context + 4 * attention.heads
    if layer.vectors == 2 * hidden + 2 * attention.qk_dim:
        kept += queries_keys * (4 + wide)
    return kept + kernel * 2 * attention.heads * work.score_slots


def _per_token(layer: Layer) -> Sequence[int]:
    """Outputs of every matrix product a token passes through."""
    return [weight.outputs * weight.active for weight in layer.weights if weight.copies == 1] + (
        [_expert_outputs(layer)] if any(weight.copies > 1 for weight in layer.weights) else []
    )


def _expert_outputs(layer: Layer) -> int:
    mlp = layer.mlp
    if mlp is None:
        return 0
    return mlp.top_k * mlp.width * (2 if mlp.gated else 1)


def _mlp_inner(layer: Layer) -> int:
    """Values per token inside the MLP: gate, its activation, up and their product; two of them where nothing gates."""
    mlp = layer.mlp
    if mlp is None:  # measured shapes: the matrices that end the MLP have its width as input
        return 4 * sum(weight.inputs * weight.active for weight in layer.weights if weight.role == "mlp_out")
    width = (mlp.top_k * mlp.width if mlp.experts else mlp.width) + mlp.shared_width
    return (4 if mlp.gated else 2) * width


def estimate(shape: ModelShape, work: Work, states: States, level: Level, *, device: bool = True) -> Estimate:
    """The peak of one rank that trains at `level`. `device`: an accelerator (its allocator and driver take a share)."""
    none = [layer_bytes(layer, shape.hidden, work, "none") for layer in shape.layers]
    if isinstance(level, int):
        kinds: list[Literal["full", "selective"]] = [
            "full" if index < level else "selective" for index in range(len(none))
        ]
        kept = [layer_bytes(one, shape.hidden, work, kind) for one, kind in zip(shape.layers, kinds, strict=True)]
    else:
        kept = [layer_bytes(layer, shape.hidden, work, level) for layer in shape.layers]
    # One layer is whole while it is computed again; its gradients lie beside it.
    working = 1.3 * max(none, default=0.0)
    logits = float(work.slots * shape.vocab * work.compute_bytes * work.logit_copies)
    activations = sum(kept)
    held = states.total + activations + max(logits, working)
    reserve = _CONTEXT + (_FRAGMENTED - 1) * held if device else 0.0
    return Estimate(level, states.total, activations, logits, working, reserve)


def least_that_fits(
    shape: ModelShape, work: Work, states: States, capacity: float, levels: Sequence[Level], *, device: bool = True
) -> tuple[Level, list[Estimate]]:
    """The first level whose estimate fits `capacity` bytes (the last one where none does), and all estimates."""
    estimates = [estimate(shape, work, states, level, device=device) for level in levels]
    fitting = [one.level for one in estimates if one.total <= capacity]
    return (fitting[0] if fitting else levels[-1]), estimates


# What a host link moves; PCIe 5 ×16 reaches about 50 GB/s, 20 is what pinned copies of this size commonly reach.
_LINK = 20e9


def offload_cost(shape: ModelShape, work: Work) -> tuple[float, float]:
    """(bytes a micro-batch sends to the host, seconds to send and fetch them, as if nothing overlapped)."""
    moved = float(len(shape.layers) * work.slots * shape.hidden * work.residual_bytes)
    return moved, 2 * moved / _LINK


def optimizer_offload_cost(trained: float, shards: int) -> tuple[float, float]:
    """(bytes a rank keeps on the host, seconds a step adds): weights, gradients and two moments in float32 live there;
    gradients come down and weights go up once a step, and the update runs at the host's memory speed (50 GB/s)."""
    mine = trained / shards
    return 16 * mine, 8 * mine / _LINK + 28 * mine / 50e9
