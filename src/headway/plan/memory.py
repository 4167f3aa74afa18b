"""Bytes on the fullest device: weights, gradients, optimizer, activations, logits, working buffers, reserve.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), counted from the layer's real matrices instead of 34·h.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from headway.plan.cluster import Cluster
from headway.plan.layout import Layout
from headway.plan.profile import LayerKind, Profile
from headway.plan.workload import Workload

GIB = 2**30
# Driver context, NCCL's buffers and cuBLAS's workspaces, per device.
_CONTEXT = 1.5 * GIB
# DeepSpeed's flat reduce and all-gather buckets, 5e8 elements of 2 bytes each by default.
_BUCKETS = 2 * 5e8 * 2
# Of all that the allocator hands out: blocks of other sizes that cannot be reused at once. Fitted on rows with memory.
_FRAGMENTED = 1.13
# What remains of that when memory is short: the allocator frees and reuses before it gives up.
_FRAGMENTED_TIGHT = 1.012
# The vendor's memory that a program can have: the driver and ECC take the rest.
_USABLE = 0.99
_ADAM = 12  # fp32 master weight and two moments, bytes per parameter
_ADAM_8BIT = 6  # fp32 master weight and two quantised moments


_USES = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


@dataclass(frozen=True)
class Memory:
    """Bytes by use on the fullest device; `total` of `capacity` (what a program can have there)."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserve: float
    capacity: float

    @property
    def total(self) -> float:
        return (
            self.parameters + self.gradients + self.optimizer + self.activations
            + self.logits + self.buffers + self.reserve
        )  # fmt: skip

    @property
    def needed(self) -> float:
        """Bytes without which the step cannot run: `total` less what the allocator gives back when memory is short."""
        return (self.total - self.reserve) * _FRAGMENTED_TIGHT + _CONTEXT

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    @property
    def shown(self) -> float:
        """What tools will report at most: with the blocks that the allocator keeps, which cannot be more than there
        are. It decides nothing: blocks that are free are given back when memory is short (`needed`)."""
        return min(self.total, self.capacity)

    def lines(self) -> list[tuple[str, float]]:
        """(use, bytes) that add up to `needed`: what decides whether the plan fits."""
        parts = [(name, getattr(self, name)) for name in _USES if getattr(self, name) or name in _USES[:3]]
        return [*parts, ("context and libraries", self.needed - sum(held for _, held in parts))]

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "total": self.total, "needed": self.needed, "shown": self.shown}


def memory(model: Profile, work: Workload, layout: Layout, cluster: Cluster) -> Memory:
    """The fullest device of a plan: the first pipeline stage holds most micro-batches, the last one the logits."""
    first = _stage(model, work, layout, first=True)
    last = _stage(model, work, layout, first=False) if layout.pp > 1 else first
    parts = max(first, last, key=sum)
    capacity = cluster.device.memory * _USABLE
    reserve = _CONTEXT + (_FRAGMENTED - 1) * sum(parts)
    return Memory(*parts, reserve=reserve, capacity=capacity)


def _stage(
    model: Profile, work: Workload, layout: Layout, first: bool
) -> tuple[float, float, float, float, float, float]:
    share = _layers(model, work, layout, first) / model.layers
    dense = model.dense * share / layout.tp
    expert = model.expert * share / (layout.ep * layout.expert_tp)
    if layout.pp == 1:
        dense += (model.embedding + (0 if model.tied else model.head)) / layout.tp
    else:
        dense += (model.embedding if first else model.head) / layout.tp
    parameters, gradients, optimizer, buffers = _states(model, work, layout, dense, expert)
    activations, logits = _activations(model, work, layout, first)
    return parameters, gradients, optimizer, activations, logits, buffers


def _states(
    model: Profile, work: Workload, layout: Layout, dense: float, expert: float
) -> tuple[float, float, float, float]:
    if work.lora:
        return 2 * (dense + expert), 0.0, 0.0, 0.0
    over = layout.sharded_over
    expert_over = max(1.0, over * layout.tp / (layout.ep * layout.expert_tp)) if layout.zero else 1.0
    total, sharded = dense + expert, dense / over + expert / expert_over
    optimizer = (_ADAM_8BIT if layout.optimizer_bits == 8 else _ADAM) * sharded
    if layout.offload != "none":
        optimizer = 0.0
    if layout.zero < 3:
        # DeepSpeed's ZeRO-1 keeps an fp32 copy of the gradients beside the sharded state.
        deepspeed = layout.buckets and layout.zero == 1
        optimizer += 4 * sharded if deepspeed and layout.offload == "none" else 0.0
        held = sharded if layout.zero == 2 else total
        return 2 * total, layout.grad_bytes * held, optimizer, _BUCKETS if deepspeed else 0.0
    # FSDP: the fp32 master is the sharded parameter itself (counted with the optimizer); two layers are whole at a
    # time, in bf16, and one layer's whole gradient waits for its reduction.
    layer = max(kind.dense / layout.tp + kind.expert / (layout.ep * layout.expert_tp) for kind in model.kinds)
    whole = max(layer, max(model.head, model.embedding) / layout.tp)
    return 0.0, 4 * sharded, optimizer, 4 * layer + 6 * whole


def _layers(model: Profile, work: Workload, layout: Layout, first: bool) -> float:
    """Layers of the first (fullest) or the last stage, embedding and head counted as layers where that evens it out."""
    count = model.layers + work.mtp
    if layout.pp == 1:
        return count
    if first:
        return -(-count // layout.pp)
    return max(1, count - (layout.pp - 1) * (-(-count // layout.pp)))


def _activations(model: Profile, work: Workload, layout: Layout, first: bool) -> tuple[float, float]:
    tokens = layout.micro_batch * work.seq / layout.cp
    layers = _layers(model, work, layout, first)
    flight = _in_flight(work, layout, first)
    mean = sum(kind.count * _per_token(kind, model, work, layout) for kind in model.kinds) / model.layers
    stored = mean * tokens * layers * flight
    working = 0.0
    if layout.recompute == "full":  # one layer is whole while it is computed again, its gradients beside it
        whole = max(_whole(kind, model, work, layout) for kind in model.kinds)
        working = 1.3 * whole * tokens
    logits = 0.0
    if layout.pp == 1 or not first:  # bf16 logits, their log-softmax and its gradient
        logits = 6 * tokens * model.vocab / layout.tp * (1 + work.mtp)
    return stored + working, logits


def _in_flight(work: Workload, layout: Layout, first: bool) -> float:
    """Micro-batches a stage holds at once: 1F1B holds as many as stages follow; interleaving a share more."""
    if layout.pp == 1:
        return 1.0
    depth = layout.pp if first else 1
    extra = (layout.pp - 1) / (layout.pp * layout.vpp) if layout.vpp > 1 else 0.0
    held = depth * (1 + extra)
    if layout.schedule == "dualpipe":
        held = layout.pp + 1
    return min(held, layout.micro_batches(work.global_batch))


def _stream(model: Profile, layout: Layout, copies: float) -> float:
    """Bytes per token of `copies` of the residual stream."""
    return 2 * copies * model.hidden / (layout.tp if layout.sequence_parallel else 1)


def _per_token(kind: LayerKind, model: Profile, work: Workload, layout: Layout) -> float:
    """Bytes per token that one layer keeps for its backward pass."""
    whole = _whole(kind, model, work, layout)
    if layout.recompute == "full":
        return layout.recompute_share * _stream(model, layout, 1) + (1 - layout.recompute_share) * whole
    return whole


def _whole(kind: LayerKind, model: Profile, work: Workload, layout: Layout) -> float:
    selective = layout.recompute == "selective" or (layout.recompute == "full" and layout.recompute_share < 1)
    width = 1 if work.precision in ("fp8", "fp4") else 2  # inputs of products are kept as they were multiplied
    inputs = kind.kept_inputs(selective and layout.flash)
    norms = 0.0 if selective and layout.flash else _stream(model, layout, width)
    kept = _stream(model, layout, 2) + norms + (2 * kind.outputs + width * inputs) / layout.tp
    if kind.experts:
        routed = kind.top_k * layout.expert_tp / layout.tp
        kept += 2 * kind.expert_stored(selective) / layout.expert_tp * routed
    if kind.attention and not layout.flash and not selective:  # scores, softmax, dropout mask: 2 + 2 + 1 bytes
        kept += 5 * kind.attention.heads * work.attended / layout.tp
    return kept
