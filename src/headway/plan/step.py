"""One optimizer step, term by term, on the slowest pipeline stage. docs/plan.md has the equations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.plan.cluster import Cluster
from headway.plan.collectives import Network
from headway.plan.constants import Constants
from headway.plan.kernels import BF16, LayerTime, Rates, head_time, layer_time
from headway.plan.layout import Layout
from headway.plan.pipeline import bubble
from headway.plan.profile import Profile
from headway.plan.workload import Workload


@dataclass(frozen=True)
class _Context:
    model: Profile
    work: Workload
    layout: Layout
    cluster: Cluster
    rates: Rates
    network: Network
    c: Constants

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.layout.micro_batch * self.work.seq / self.layout.cp

    @property
    def micro_batches(self) -> int:
        return self.layout.micro_batches(self.work.global_batch)


def step_terms(
    model: Profile, work: Workload, layout: Layout, cluster: Cluster, constants: Constants
) -> tuple[dict[str, float], dict[str, float]]:
    """(terms, facts): seconds of one step by name, and ratios that explain them."""
    rates = Rates.of(cluster.device, work.precision, constants, layout.grad_bytes)
    x = _Context(model, work, layout, cluster, rates, Network.of(cluster, constants), constants)
    layer = _mean_layer(x)
    once = head_time(model, x.tokens, layout.tp, rates, constants, work.lora)
    head = (once[0] * (1 + work.mtp), once[1] * (1 + work.mtp), once[2] * (1 + work.mtp))
    comm = _per_micro_batch(x, layer)
    m = x.micro_batches
    again = _recompute(layout, layer)
    passes = 3 + (layout.recompute_share if layout.recompute == "full" else 0.0)
    launch = _launch(x, layer, again, passes)
    per_layer = layer.forward + layer.backward + again + sum(comm.values()) + launch
    layers, share, others = _slowest_stage(x, per_layer, sum(head))
    terms = {
        "forward": m * (layers * layer.forward + share * head[0]),
        "backward": m * (layers * layer.backward + share * head[1]),
        "recompute": m * layers * again,
        "loss": m * share * head[2],
        "optimizer": _optimizer(x),
        "tp": m * layers * comm["tp"],
        "cp": m * layers * comm["cp"],
        "ep": m * layers * comm["ep"],
        "launch": m * layers * launch,
    }
    mine = sum(terms.values()) - terms["optimizer"]
    around = terms["tp"] + terms["cp"] + terms["ep"] + terms["launch"]
    forward = (terms["forward"] + terms["loss"] / 2 + around / 3) / m
    # The pipeline fills and drains through the other stages, which have no head; the slowest one sets the pace between.
    between = sum(comm.values()) + launch
    fill = others * (layer.forward + between / 3)
    waits = bubble(layout, m, fill, others * (layer.backward + again + 2 * between / 3))
    terms["bubble"] = waits.seconds
    terms["pp"] = _sends(x, layout.vpp)
    terms["dp"], hidden = _data_parallel(x, layers, forward, mine / m - forward)
    terms["offload"] = _offload(x)
    terms["host"] = constants.step
    terms["straggler"] = sum(terms.values()) * constants.straggler * math.log2(max(1, cluster.nodes))
    facts = {
        "micro_batches": float(m),
        "bubble_ratio": waits.ratio,
        "bubble_fraction": waits.fraction,
        "dp_hidden_s": hidden,
        "layers_on_slowest_stage": layers,
    }
    return terms, facts


def sends_per_chunk(model: Profile, work: Workload, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    """Seconds that each further chunk of a stage adds to a step in sends."""
    rates = Rates.of(cluster.device, work.precision, constants, layout.grad_bytes)
    x = _Context(model, work, layout, cluster, rates, Network.of(cluster, constants), constants)
    return _sends(x, 1) - _sends(x, 0)


def _mean_layer(x: _Context) -> LayerTime:
    """The average layer: stages hold a mixture of a model's kinds."""
    total = [0.0] * 6
    for kind in x.model.kinds:
        time = layer_time(kind, x.model.hidden, x.tokens, x.work.attended, x.layout, x.rates, x.c, x.work.lora)
        for index, value in enumerate(_fields(time)):
            total[index] += value * kind.count / x.model.layers
    return LayerTime(*total)


def _fields(time: LayerTime) -> tuple[float, ...]:
    return time.forward, time.backward, time.core, time.elementwise, time.kernels, time.issued


def _launch(x: _Context, layer: LayerTime, again: float, passes: float) -> float:
    """Gaps between one layer's kernels, and what the host takes longer to issue than the device to run them."""
    gaps = passes * layer.kernels * x.c.kernel
    device = layer.forward + layer.backward + again + gaps
    return gaps + max(0.0, passes * layer.issued * x.c.launch - device)


def _recompute(layout: Layout, layer: LayerTime) -> float:
    if layout.recompute == "full":
        return layer.forward * layout.recompute_share
    return layer.core + layer.elementwise if layout.recompute == "selective" else 0.0


def _slowest_stage(x: _Context, per_layer: float, head: float) -> tuple[float, float, float]:
    """(layers, 1 if it holds the head) of the stage the pipeline waits for, and layers of a stage before the last; both
    times are a micro-batch's seconds.

    Where embedding and head counted as one layer each make the stages even, they are placed so; else the last stage has
    what remains.
    """
    count, stages = x.model.layers + x.work.mtp, x.layout.pp
    if stages == 1:
        return float(count), 1.0, float(count)
    middle = float(math.ceil(count / stages))
    last = count - (stages - 1) * middle
    if last < 1:
        middle = last = count / stages
    if last * per_layer + head > middle * per_layer:
        return float(last), 1.0, float(middle)
    return float(middle), 0.0, float(middle)


def _per_micro_batch(x: _Context, layer: LayerTime) -> dict[str, float]:
    """Exposed communication of one average layer and micro-batch, forward and backward (and recompute)."""
    again = x.layout.recompute_share if x.layout.recompute == "full" else 0.0
    return {"tp": _tensor(x, again, layer), "cp": _context_parallel(x, layer), "ep": _expert(x, again, layer)}


def _tensor(x: _Context, again: float, layer: LayerTime) -> float:
    """An all-reduce (or its two halves) after attention and after the MLP, the same in backward."""
    if x.layout.tp == 1:
        return 0.0
    group = x.network.group(x.layout.tp, 1)
    size = BF16 * x.tokens * x.model.hidden
    # Sequence parallelism gathers and scatters instead, which switches cannot add up on the way.
    one = 2 * x.network.gather(size, group) if x.layout.sequence_parallel else x.network.all_reduce(size, group)
    blocks = 0.0
    for kind in x.model.kinds:
        inside = 1.0 if kind.experts and x.layout.expert_tp == 1 else 2.0
        blocks += (1.0 if kind.parallel or kind.blocks == 1 else inside) * kind.count / x.model.layers
    exposed = 1 - x.c.tp_overlap if x.layout.overlap_tp else 1.0
    # With sequence parallelism backward gathers the inputs once more for the weights' gradient.
    halves = 2.5 if x.layout.sequence_parallel and not x.work.lora else 2.0
    if x.layout.overlap_wgrad and not x.layout.overlap_tp and not x.work.lora:
        # Backward's all-reduce travels beside the weights' gradient, with sequence parallelism its scatter likewise and
        # the second gather beside the inputs' gradient: products of the layers split by columns, half of all.
        beside, products = blocks * one, layer.forward - layer.core - layer.elementwise
        window = products if x.layout.sequence_parallel else products / 2
        return (blocks * (halves + again) - blocks) * one + _exposed(beside, window, x.c)
    return blocks * (halves + again) * one * exposed


def _context_parallel(x: _Context, layer: LayerTime) -> float:
    """Keys and values pass round the ring while attention runs (Ring Attention, arXiv 2310.01889)."""
    cp = x.layout.cp
    if cp == 1:
        return 0.0
    width = 0.0
    for kind in x.model.kinds:
        if kind.attention is not None:
            one = kind.attention
            heads = max(one.kv_heads / x.layout.tp, 1)
            width += heads * (one.qk_dim + one.v_dim) * kind.count / x.model.layers
    ring = x.network.group(cp, x.layout.tp)
    passed = x.network.gather(BF16 * x.tokens * cp * width, ring)
    forward = _exposed(passed, layer.core, x.c)
    return forward + _exposed(2 * passed, layer.core * x.c.attention_backward, x.c)


def _expert(x: _Context, again: float, layer: LayerTime) -> float:
    """Dispatch and combine of every routed copy of a token, forward and backward.

    DualPipe (DeepSeek-V3, arXiv 2412.19437, sections 3.2.1 and 3.2.2) pairs a micro-batch's forward with another's
    backward, so that the all-to-all of one travels beside the products of the other: only what exceeds the layer's
    computation shows, and what the kernels lose to it.
    """
    ep = x.layout.ep
    if ep == 1 or not x.model.moe:
        return 0.0
    layout, inside = x.layout, x.layout.expert_tp
    group = x.network.group(ep, inside)
    paired = layout.schedule == "dualpipe"
    exposed = 1.0 if paired else x.c.ep_network if group.crosses else x.c.ep_exposed
    total = sent = 0.0
    for kind in x.model.kinds:
        if kind.experts:
            # Each TP rank sends its own slice of the tokens; ranks that share an expert then gather each other's.
            size = BF16 * x.tokens / layout.tp * kind.top_k * x.model.hidden * x.c.imbalance
            times = (4 + 2 * again) * kind.count / x.model.layers
            sent += exposed * x.network.all_to_all(size, group, kind.top_k if layout.dedup else 1) * times
            total += x.c.ep_exposed * x.network.gather(size * inside, x.network.group(inside, 1)) * times
    return total + (_exposed(sent, layer.forward + layer.backward, x.c) if paired else sent)


def _exposed(comm: float, window: float, c: Constants) -> float:
    """What of `comm` shows when it runs beside `window` seconds of kernels, and what it slows them by."""
    hidden = min(comm, window)
    return comm - hidden + c.contention * hidden


def _data_parallel(x: _Context, layers: float, forward: float, backward: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of gradient and parameter traffic in a step; windows are one micro-batch's passes."""
    layout, net = x.layout, x.network
    if layout.replicas == 1 or x.work.lora:
        return 0.0, 0.0
    share = layers / x.model.layers
    edge = x.model.embedding + (0 if x.model.tied else x.model.head)
    dense = (x.model.dense * share + (edge if layout.pp == 1 else edge / 2)) / layout.tp
    expert = x.model.expert * share / (layout.ep * layout.expert_tp)
    grad_bytes = 4 if layout.grad_bytes >= 4 else 2
    over = layout.sharded_over if layout.zero else layout.replicas
    dense_group = net.group(over, layout.tp)
    spread = max(1, layout.replicas * layout.tp // (layout.ep * layout.expert_tp))
    expert_group = net.group(min(over, spread), layout.ep * layout.expert_tp)

    def gather(width: float) -> float:
        return net.gather(width * dense, dense_group) + (net.gather(width * expert, expert_group) if expert else 0.0)

    grads, params = gather(grad_bytes), gather(BF16)
    outer = 0.0
    if over < layout.replicas:  # HSDP: each shard's gradients are summed over the replicas
        outer = net.all_reduce(
            grad_bytes * (dense + expert) / over, net.group(layout.replicas // over, layout.tp * over)
        )
    if layout.zero == 3:
        m = x.micro_batches
        pairs = [(params, forward), (params + grads, backward)] * m
        pairs[-1] = (pairs[-1][0] + outer, backward)
    elif layout.zero == 0:
        whole = net.all_reduce(grad_bytes * dense, dense_group)
        pairs = [(whole + (net.all_reduce(grad_bytes * expert, expert_group) if expert else 0.0), backward)]
    else:  # DeepSpeed's pipeline engine sums whole gradients before it keeps its shard
        pairs = [((2 if layout.buckets else 1) * grads + outer, backward), (params, forward)]
    if not layout.overlap_dp:
        return sum(comm for comm, _ in pairs), 0.0
    shown = sum(_exposed(comm, window, x.c) for comm, window in pairs)
    return shown, sum(min(comm, window) for comm, window in pairs)


def _sends(x: _Context, chunks: int) -> float:
    """Activations forward and their gradients backward, for each micro-batch and each of a stage's `chunks`."""
    layout = x.layout
    if layout.pp == 1:
        return 0.0
    size = BF16 * x.tokens * x.model.hidden / (layout.tp if layout.sequence_parallel else 1)
    crosses = layout.gpus // layout.pp >= x.network.domain
    one = x.network.send(size, crosses)
    rounds = x.micro_batches + layout.pp - 1
    waiting = x.c.pipe_sync * rounds if layout.buckets else 0.0
    return x.c.pp_exposed * 2 * chunks * rounds * one + waiting


def _optimizer(x: _Context) -> float:
    if x.work.lora:
        return 0.0
    layout = x.layout
    more = 1 + x.work.mtp / x.model.layers
    dense = (more * x.model.dense + x.model.embedding + x.model.head) / (layout.tp * layout.pp) / layout.sharded_over
    spread = max(1.0, layout.sharded_over * layout.tp / (layout.ep * layout.expert_tp)) if layout.zero else 1.0
    expert = more * x.model.expert / (layout.ep * layout.expert_tp * layout.pp) / spread
    return x.c.optimizer_bytes * (dense + expert) / x.rates.bandwidth


def _offload(x: _Context) -> float:
    """Optimizer state on the host or on NVMe: gradients out and parameters in; on NVMe the state itself too."""
    if x.layout.offload == "none":
        return 0.0
    over = x.layout.sharded_over * x.layout.tp * x.layout.pp
    parameters = (x.model.dense + x.model.expert + x.model.embedding + x.model.head) / over
    seconds = 6 * parameters / x.cluster.host
    if x.layout.offload == "nvme":
        seconds += 24 * parameters / x.cluster.nvme
    return seconds
