"""Seconds of one layer's kernels on one device, forward and backward.

A matrix product takes its FLOPs at the reachable rate plus its bytes at the reachable bandwidth, so that thin products
(TP slices, small micro-batches, experts with few tokens) lose efficiency by their shape and by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.account.layers import Scan
from headway.plan.cluster import Device
from headway.plan.constants import Constants
from headway.plan.layout import Layout
from headway.plan.profile import Gemm, LayerKind, Profile

BF16 = 2  # bytes
# Kernels of one layer's forward pass: products, norms, activation, rotary positions, attention, residuals; those that
# routing adds: router, top-k, sort, permute, unpermute, grouped products. Backward runs twice as many.
_KERNELS, _MOE_KERNELS = 14, 16
# A chunked scan: convolution, running decay, chunk products, chunk states, their passing, output, gated norm. Backward
# computes the states again and has two products for each of forward's.
_SCAN_KERNELS, _SCAN_BACKWARD = 7, 3.0
_STATE_PASSES = 4  # written by their chunk, read and written by the passing from chunk to chunk, read by the output


@dataclass(frozen=True)
class Rates:
    """What a device reaches: FLOP/s of layer products, bf16 ones and attention; bytes/s; whether inputs are cast."""

    product: float
    bf16: float
    attention: float
    bandwidth: float
    quantised: bool
    hopper: bool
    grad_bytes: int = 4

    @classmethod
    def of(cls, device: Device, precision: str, constants: Constants, grad_bytes: int = 4) -> Rates:
        bf16 = _ceiling(device, "bf16", constants)
        product = _ceiling(device, precision, constants) * constants.gemm(precision)
        return cls(
            product=product,
            bf16=bf16 * constants.gemm_bf16,
            attention=bf16 * constants.attention,
            bandwidth=device.bandwidth * constants.hbm,
            quantised=precision in ("fp8", "fp4") and precision in device.rates,
            hopper="fp8" in device.rates,
            grad_bytes=min(4, grad_bytes),
        )


def _ceiling(device: Device, precision: str, constants: Constants) -> float:
    """The matrix rate really measured on large products, or the usual share of the peak; fp4 has no measurement."""
    for name in (precision, "bf16", "fp16"):  # a device without fp8 runs an fp8 plan in bf16
        if name in device.measured:
            return device.measured[name]
        if name == "fp16" and "fp16" in device.rates and "bf16" in device.measured:  # the same units, fed alike
            return device.measured["bf16"] * device.rates["fp16"] / device.rates["bf16"]
        if name in device.rates:
            return device.rates[name] * constants.ceiling
    return next(iter(device.rates.values())) * constants.ceiling


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch. `core` is attention's products and scores, forward; `elementwise` too.

    `kernels` counts forward kernels that run, `issued` what the host does for them in kernels' worth of work.
    """

    forward: float
    backward: float
    core: float
    elementwise: float
    kernels: float
    issued: float


def layer_time(
    kind: LayerKind, hidden: int, tokens: float, attended: float, layout: Layout, rates: Rates, c: Constants, lora: bool
) -> LayerTime:
    """One layer on one rank: `tokens` of a micro-batch on this CP rank, each attending over `attended` tokens."""
    forward = backward = 0.0
    for gemm in kind.gemms:
        one, two = _gemm(gemm, tokens, layout.tp, rates, c, lora, fused=layout.fused_accumulate)
        forward += one
        backward += two
    if kind.experts:
        one, two = _experts(kind, tokens, layout, rates, c, lora)
        forward += one
        backward += two
    core, core_backward = _core(kind, tokens, attended, layout, rates, c)
    if kind.scan:
        one = _scan(kind.scan, tokens, layout, rates, c)
        core += one
        core_backward += _SCAN_BACKWARD * one
    elementwise = _elementwise(kind, hidden, tokens, layout, rates, c)
    kernels = _KERNELS * kind.blocks / 2 * (1.0 if layout.compiled else 2.0)
    kernels += (_MOE_KERNELS if kind.experts else 0) + (_SCAN_KERNELS if kind.scan else 0)
    return LayerTime(
        forward=forward + core + elementwise,
        backward=backward + core_backward + 2 * elementwise,
        core=core,
        elementwise=elementwise,
        kernels=kernels,
        issued=kernels + c.expert_kernels * kind.experts / layout.ep,
    )


def _gemm(
    gemm: Gemm, tokens: float, tp: int, rates: Rates, c: Constants, lora: bool, copies: float = 1.0, fused: bool = False
) -> tuple[float, float]:
    """(forward, backward) of `copies` equal products of `tokens` rows each."""
    k = gemm.k / (tp if gemm.split == "row" else 1)
    n = gemm.n / (tp if gemm.split == "column" else 1)
    flops = 2 * tokens * k * n / rates.product
    inputs, outputs, weights = tokens * k, tokens * n, k * n
    ideal = BF16 * (inputs + outputs + weights)
    moved = ideal * c.gemm_traffic / rates.bandwidth
    cast = c.cast * 3 * (inputs + weights) / rates.bandwidth if rates.quantised else 0.0
    cast_backward = c.cast * 3 * outputs / rates.bandwidth if rates.quantised else 0.0
    # The weight's gradient is accumulated: read and written once a micro-batch, in fp32 or bf16.
    accumulate = 0.0 if lora else 2 * rates.grad_bytes * weights / rates.bandwidth
    accumulate *= c.gemm_traffic if fused else 1.0
    times = 1 if lora else 2
    forward = flops + moved + cast
    return copies * forward, copies * (times * (flops + moved) + cast_backward + accumulate)


def _experts(
    kind: LayerKind, tokens: float, layout: Layout, rates: Rates, c: Constants, lora: bool
) -> tuple[float, float]:
    """Grouped products of the local experts, and gathering and scattering the routed copies of the tokens."""
    etp = layout.expert_tp
    mine = tokens * etp / layout.tp  # distinct tokens of this rank: with whole experts TP ranks route their own slice
    local = kind.experts / layout.ep
    rows = mine * kind.top_k * layout.ep / kind.experts * c.imbalance
    forward = backward = 0.0
    for gemm in kind.expert_gemms:
        one, two = _gemm(gemm, rows, etp, rates, c, lora, copies=local, fused=layout.fused_accumulate)
        forward += one / c.expert
        backward += two / c.expert
    hidden = kind.expert_gemms[0].k
    copies = mine * kind.top_k * BF16
    fused = 1.0 if layout.compiled else c.eager
    moved = c.routing * copies * (4 * hidden + fused * kind.expert_inner / etp) / rates.bandwidth
    return forward + moved, backward + 2 * moved


def _core(
    kind: LayerKind, tokens: float, attended: float, layout: Layout, rates: Rates, c: Constants
) -> tuple[float, float]:
    """Attention's two products: causal pairs only with FlashAttention, all pairs and the scores' traffic without."""
    one = kind.attention
    if one is None:
        return 0.0, 0.0
    window = min(one.window or attended, one.chunk or attended, attended)
    heads = one.heads / layout.tp
    if layout.flash:
        pairs = tokens * (window - window * window / (2 * attended))
        rate = rates.attention * (1.0 if layout.native_attention or not rates.hopper else c.attention_ported)
        # Each score also costs an exponential, whatever the head dimension.
        forward = 2 * heads * (one.qk_dim + one.v_dim + 2 * c.head_dim) * pairs / rate
        return forward, forward * c.attention_backward
    pairs = tokens * attended
    aligned = one.qk_dim % 8 == 0 and one.v_dim % 8 == 0
    products = 2 * heads * (one.qk_dim + one.v_dim) * pairs / rates.bf16 * (1.0 if aligned else c.misaligned)
    scores = c.score_passes * BF16 * heads * pairs / rates.bandwidth
    return products + scores, 2 * (products + scores)


def _scan(scan: Scan, tokens: float, layout: Layout, rates: Rates, c: Constants) -> float:
    """Forward: products at the rate of attention kernels that are not written for the device (Triton), and the traffic
    of states and streams, which its fp32 recurrence does not hide."""
    rate = rates.attention * (c.attention_ported if rates.hopper else 1.0)
    moved = (4 * _STATE_PASSES * scan.states + BF16 * scan.stream) / rates.bandwidth
    return tokens / layout.tp * (scan.flops / rate + moved)


def _elementwise(kind: LayerKind, hidden: int, tokens: float, layout: Layout, rates: Rates, c: Constants) -> float:
    """A norm and a residual addition a block over the stream (five passes), activation and rotary positions."""
    stream = 5 * kind.blocks * hidden / (layout.tp if layout.sequence_parallel else 1)
    inner = kind.inner / layout.tp
    fused = 1.0 if layout.compiled else c.eager
    return c.elementwise * fused * BF16 * tokens * (stream + inner) / rates.bandwidth


def head_time(
    model: Profile, tokens: float, tp: int, rates: Rates, c: Constants, lora: bool
) -> tuple[float, float, float]:
    """(forward, backward, loss) of the output head and cross entropy, in bf16 products and fp32 logits."""
    bf16 = Rates(rates.bf16, rates.bf16, rates.attention, rates.bandwidth, False, rates.hopper, rates.grad_bytes)
    forward, backward = _gemm(Gemm(model.hidden, model.vocab, "column"), tokens, tp, bf16, c, lora)
    # Logits are read for the maximum and the sum and written as their gradient: 2 + 4 + 4 + 2 bytes each.
    loss = c.elementwise * 12 * tokens * model.vocab / tp / rates.bandwidth
    return forward, backward, loss
