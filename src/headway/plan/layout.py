"""The parallel plan: how one training step is spread over devices."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.plan.cluster import Cluster

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["1f1b", "zero-bubble", "dualpipe"]
Offload = Literal["none", "host", "nvme"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and what goes with them. GPUs = dp · tp · pp · cp; ep divides dp · cp · tp.

    Attributes:
        dp: data-parallel replicas, sharded ones included.
        zero: 0 plain data parallel, 1 optimizer state sharded, 2 gradients too, 3 parameters too (FSDP).
        shard: how many replicas state is sharded over (0: all; less than dp is HSDP).
        vpp: model chunks per pipeline stage (interleave).
        micro_batch: sequences per replica and forward pass.
        recompute: activations computed again: none, selective (attention's core and elementwise work), full (layers).
        recompute_share: share of the layers that full recompute applies to (Megatron's recompute_num_layers).
        sequence_parallel: norms and residuals split over TP (Korthikanti et al. 2022).
        flash: attention never writes its scores to memory (FlashAttention).
        native_attention: its kernel is written for the device (cuDNN, FlashAttention-3), not carried over from Ampere.
        compiled: elementwise work fused by a compiler or by hand-written kernels.
        overlap_dp, overlap_tp: gradients and parameters (tensor slices) travel while kernels run.
        grad_bytes: bytes per parameter held for gradients (4: fp32 accumulation, 2, or 6: DeepSpeed's bf16 optimizer).
        fused_accumulate: the weights' gradient is added up inside its product (Megatron since 2022), its traffic beside
            the arithmetic.
        overlap_wgrad: where overlap_tp is off, backward's tensor slices still travel beside products that do not wait
            for them (Megatron since 2022: the all-reduce beside the weights' gradient; with sequence parallelism the
            second gather and the scatter, Korthikanti et al. 2022, section 4.2.2).
        etp: tensor parallelism inside an expert (0: TP where the expert group fits beside it, else 1).
        dedup: the dispatcher sends one copy of a token to a node, whatever it has experts there (DeepEP, HybridEP).
        buckets: DeepSpeed's ZeRO-1 with pipelines: flat reduce buckets, an fp32 copy of the gradient shard.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    micro_batch: int = 1
    zero: int = 1
    shard: int = 0
    recompute: Recompute = "none"
    recompute_share: float = 1.0
    sequence_parallel: bool = True
    schedule: Schedule = "1f1b"
    flash: bool = True
    native_attention: bool = True
    compiled: bool = True
    overlap_dp: bool = True
    overlap_tp: bool = False
    grad_bytes: int = 4
    buckets: bool = False
    offload: Offload = "none"
    optimizer_bits: int = 32
    fused_accumulate: bool = False
    overlap_wgrad: bool = False
    etp: int = 0
    dedup: bool = False

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense weights: data parallel times context parallel."""
        return self.dp * self.cp

    @property
    def sharded_over(self) -> int:
        """Ranks that optimizer state is sharded over."""
        return min(self.shard or self.replicas, self.replicas) if self.zero else 1

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism inside an expert: as given, else TP where the expert group fits beside it, else 1."""
        return self.etp or (self.tp if self.ep <= self.replicas else 1)

    def micro_batches(self, global_batch: int) -> int:
        """Forward passes of one replica per step (gradient accumulation, or what a pipeline is filled with)."""
        return max(1, round(global_batch / (self.dp * self.micro_batch)))

    def describe(self) -> str:
        """`dp 16 · tp 8 · pp 4×5 · mb 1 · zero 1 · recompute selective`, leaving out ones."""
        parts = [f"dp {self.dp}"]
        parts += [f"{name} {value}" for name, value in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if value > 1]
        if self.pp > 1:
            schedule = "" if self.schedule == "1f1b" else f" {self.schedule}"
            parts.append(f"pp {self.pp}" + (f"×{self.vpp}" if self.vpp > 1 else "") + schedule)
        parts += [f"micro-batch {self.micro_batch}", f"zero {self.zero}"]
        if 0 < self.shard < self.replicas and self.zero:
            parts.append(f"shard {self.shard}")
        if self.recompute != "none":
            part = f" ({self.recompute_share:.0%} of layers)" if self.recompute_share < 1 else ""
            parts.append(f"recompute {self.recompute}{part}")
        if self.offload != "none":
            parts.append(f"offload {self.offload}")
        return " · ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def most_chunks(layers: int, pp: int) -> int:
    """Most chunks of a pipeline stage: each holds a layer, or the embedding or the head (Llama 3 405B: 126 layers on 16
    stages of 8 chunks). They need not be even: the layers that are over lie in the same turn of different stages, so
    that no stage works on more than ceil(layers / pp) of them."""
    return max(1, min(-(-layers // pp), (layers + 2) // pp)) if pp > 1 else 1


def problems(layout: Layout, shape: ModelShape, cluster: Cluster, seq: int, global_batch: int) -> list[str]:
    """Why this plan cannot run, each naming the key and valid values; empty when it can."""
    found = []
    heads = max((kind.heads for kind, _ in shape.attention_kinds), default=1)
    experts = max((layer.mlp.experts for layer in shape.layers if layer.mlp is not None), default=0)
    layers = len(shape.layers)
    if layout.gpus != cluster.gpus:
        found.append(f"dp·tp·pp·cp = {layout.gpus} but the cluster has {cluster.gpus} GPUs")
    if heads % layout.tp:
        found.append(f"tp={layout.tp} does not divide {heads} heads; nearest: {_divisors(heads, layout.tp)}")
    found += _meaningless(layout)
    if layout.pp > layers + 2:
        found.append(f"pp={layout.pp} is more than {layers} layers; nearest: pp={layers}")
    elif layout.pp > 1 and layout.vpp > (most := most_chunks(layers, layout.pp)):
        found.append(f"pp={layout.pp} × vpp={layout.vpp} is more than {layers} layers; nearest: vpp={most}")
    if layout.ep > 1 and not experts:
        found.append(f"ep={layout.ep} needs a mixture of experts, and this model is none; nearest: 1")
    elif layout.ep > 1 and experts % layout.ep:
        found.append(f"ep={layout.ep} does not divide {experts} experts; nearest: {_divisors(experts, layout.ep)}")
    if layout.ep > 1 and (layout.replicas * layout.tp) % layout.ep:
        found.append(f"ep={layout.ep} does not divide dp·cp·tp = {layout.replicas * layout.tp}")
    if layout.etp > 1 and experts and (layout.replicas * layout.tp) % (layout.ep * layout.etp):
        found.append(f"ep·etp = {layout.ep * layout.etp} does not divide dp·cp·tp = {layout.replicas * layout.tp}")
    if layout.cp > 1 and seq % (2 * layout.cp):
        found.append(f"cp={layout.cp}: seq {seq} must be a multiple of {2 * layout.cp}")
    if global_batch % (layout.dp * layout.micro_batch):
        found.append(f"dp·micro_batch = {layout.dp * layout.micro_batch} does not divide global_batch {global_batch}")
    return found


def _meaningless(layout: Layout) -> list[str]:
    """Parts that cannot be had with the rest of the plan."""
    found = []
    if layout.pp == 1 and layout.vpp > 1:
        found.append(f"vpp={layout.vpp} are chunks of a pipeline's stages, and pp=1 has none; nearest: vpp=1")
    if layout.schedule != "1f1b" and layout.vpp > 1:
        found.append(
            f"vpp={layout.vpp}: schedule={layout.schedule} has chunks of its own; nearest: vpp=1 or schedule=1f1b"
        )
    if layout.schedule != "1f1b" and layout.pp == 1:
        found.append(f"schedule={layout.schedule} needs a pipeline, pp of 2 or more")
    if layout.schedule == "dualpipe" and layout.pp % 2:
        found.append(f"schedule=dualpipe feeds the pipeline from both ends and needs an even pp, not {layout.pp}")
    if layout.shard and (not layout.zero or layout.replicas % layout.shard):
        near = _divisors(layout.replicas, layout.shard) if layout.zero else "zero=1"
        found.append(f"shard={layout.shard} does not divide dp·cp = {layout.replicas} replicas; nearest: {near}")
    return found


def check(layout: Layout, shape: ModelShape, cluster: Cluster, seq: int, global_batch: int) -> None:
    """Raises UserError with the first problem of `problems`."""
    found = problems(layout, shape, cluster, seq, global_batch)
    if found:
        raise UserError(found[0])


def _divisors(number: int, near: int) -> str:
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    every = sorted({*low, *(number // value for value in low)})
    closest = sorted(sorted(every, key=lambda value: abs(value - near))[:3])
    return ", ".join(map(str, closest))
