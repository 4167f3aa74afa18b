"""A small run that stands for a large one: the same work on each GPU, the same messages, the same share of the step.

TP, CP, micro-batch, recompute, hidden size and sequence stay; layers follow the pipeline stages, experts follow EP, the
vocabulary follows the layers (so that the head weighs the same), and the micro-batches follow the bubble. Of all the
small plans that leaves, the one whose predicted step has most nearly the target's shares is taken.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.plan.cluster import Cluster
from headway.plan.constants import Constants
from headway.plan.layout import Layout, problems
from headway.plan.predict import Prediction, predict
from headway.plan.search import HEADROOM
from headway.plan.workload import shape_of

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CLOSE = 0.01  # shares of the step nearer than this are called preserved

# Why a term differs when it does.
_WHY = {
    "dp": "fewer replicas: (n-1)/n of a ring and log n of its latency shrink, state is sharded over fewer",
    "optimizer": "state is sharded over fewer replicas, so each updates more of it",
    "bubble": "fewer stages: the micro-batches can keep the ratio (p-1)/(v m) only roughly",
    "pp": "sends cross other links than in the large run",
    "ep": "tokens go to fewer domains",
    "straggler": "the slowest of few nodes is not the slowest of many",
    "host": "the step is shorter, the host's work for it is not",
    "loss": "the head falls on another share of the layers",
    "offload": "state is sharded over fewer replicas",
}
NEVER = (
    "failures, slow nodes and the spread between ranks of many nodes (plan goodput)",
    "a spine that is shared or oversubscribed beyond the small run's nodes",
    "memory: optimizer state is sharded over fewer replicas",
    "the loss curve: a smaller model on a smaller batch (see the transfer of the learning rate)",
)


@dataclass(frozen=True)
class Shrunk:
    """The large run's prediction beside the small one's, and the small model's config.json."""

    target: Prediction
    small: Prediction
    config: Mapping[str, Any]

    def shares(self) -> list[tuple[str, float, float]]:
        """(term, share of the target's step, share of the small one's), terms that are zero in both left out."""
        large, small = self.target, self.small
        rows = [(n, large.terms[n] / large.step_s, small.terms[n] / small.step_s) for n in large.terms]
        return [row for row in rows if row[1] or row[2]]

    @property
    def distance(self) -> float:
        """Half the summed differences of shares: how much of the step stands in another place, 0 to 1."""
        return sum(abs(large - small) for _, large, small in self.shares()) / 2

    def lost(self) -> list[tuple[str, float, float, str]]:
        """Terms whose share differs by more than a point, with both shares and why."""
        return [(n, a, b, _WHY.get(n, "follows from the others")) for n, a, b in self.shares() if abs(a - b) > _CLOSE]

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.to_dict(),
            "small": self.small.to_dict(),
            "small_config": dict(self.config),
            "small_global_batch": self.small.workload.global_batch,
            "shares": [{"term": n, "target": a, "small": b} for n, a, b in self.shares()],
            "displaced_share": self.distance,
            "not_preserved": [{"term": n, "target": a, "small": b, "why": why} for n, a, b, why in self.lost()],
            "never_preserved": NEVER,
        }


def shrink(
    config: Mapping[str, Any], target: Prediction, cluster: Cluster, constants: Constants | None = None
) -> Shrunk:
    """The small run on `cluster` (as many GPUs of the same kind) that looks most like `target`, whose config is given.

    Raises UserError where TP and CP alone need more GPUs than that, or where nothing so shaped fits in memory.
    """
    layout, gpus = target.layout, cluster.gpus
    least = layout.tp * layout.cp
    if gpus >= target.cluster.gpus:
        raise UserError(f"--gpus {gpus}: the target has {target.cluster.gpus}; give fewer")
    if gpus % least:
        raise UserError(
            f"--gpus {gpus}: the target's tp·cp = {least} must divide it, or its messages change; "
            f"nearest: {', '.join(str(least * n) for n in sorted({max(1, gpus // least), gpus // least + 1}))}"
        )
    best: Shrunk | None = None
    shapes: dict[tuple[int, int, int], ModelShape | None] = {}
    for small, layers, experts, vocab, batch in _candidates(target, gpus):
        key = (layers, experts, vocab)
        if key not in shapes:
            shapes[key] = _shape(config, *key)
        shape = shapes[key]
        if shape is None:
            continue
        work = replace(target.workload, shape=shape, global_batch=batch)
        if problems(small, shape, cluster, work.seq, batch):
            continue
        found = predict(work, small, cluster, constants)
        if found.memory.needed > HEADROOM * found.memory.capacity:
            continue
        tried = Shrunk(target, found, {"max_position_embeddings": work.seq, **small_config(config, *key)})
        if best is None or tried.distance < best.distance - 1e-9:
            best = tried
    if best is None:
        raise UserError(f"no run of this shape fits on {gpus} GPUs: its state needs more of them; give more --gpus")
    return best


def _candidates(target: Prediction, gpus: int) -> Iterator[tuple[Layout, int, int, int, int]]:
    """(layout, layers, experts, vocabulary, global batch) of small runs; 0 experts for a model without."""
    large, work = target.layout, target.workload
    layers, micro = len(work.shape.layers), large.micro_batches(work.global_batch)
    experts = max((layer.mlp.experts for layer in work.shape.layers if layer.mlp), default=0)
    rest = gpus // (large.tp * large.cp)
    stages = [n for n in range(1, min(large.pp, rest) + 1) if rest % n == 0]
    for pp, cut in itertools.product(stages, (1, 2, 4, 8, 16)):
        few = -(-layers // (large.pp * cut)) * pp  # whole layers per stage, the same or a fraction
        vpp = large.vpp if pp > 1 and (few // pp) % large.vpp == 0 else 1
        dp = rest // pp
        vocab = _vocabulary(work.shape.vocab, few / layers, large.tp)
        for ep in [n for n in range(1, large.ep + 1) if large.ep % n == 0]:
            own = experts * ep // large.ep
            for count in _micro_batches(micro, large, pp, vpp):
                small = replace(large, dp=dp, pp=pp, vpp=vpp, ep=ep, shard=min(large.shard, dp * large.cp))
                if few >= pp and (own or not experts):
                    yield small, few, own, vocab, dp * large.micro_batch * count


def _micro_batches(large: int, layout: Layout, pp: int, vpp: int) -> list[int]:
    """As many as the target has, and as many as keep its bubble's ratio."""
    found = {large}
    if pp > 1 and layout.pp > 1:
        keep = large * (pp - 1) / (layout.pp - 1) * layout.vpp / vpp
        found.add(max(pp, round(keep / pp) * pp) if vpp > 1 else max(1, round(keep)))
    return sorted(found)


def _vocabulary(vocab: int, share: float, tp: int) -> int:
    """As large a part of the vocabulary as of the layers, in whole tiles on every TP rank."""
    tile = 128 * tp
    return vocab if share >= 1 else min(vocab, max(tile, round(vocab * share / tile) * tile))


def _shape(config: Mapping[str, Any], layers: int, experts: int, vocab: int) -> ModelShape | None:
    try:
        return shape_of(small_config(config, layers, experts, vocab))
    except UserError:
        return None


def small_config(config: Mapping[str, Any], layers: int, experts: int, vocab: int) -> dict[str, Any]:
    """config.json of the same model with fewer layers, experts and words; whatever is listed by layer is cut too."""
    made: dict[str, Any] = copy.deepcopy(dict(config))
    text = made.get("text_config") if isinstance(made.get("text_config"), dict) else made
    assert isinstance(text, dict)
    key = next((name for name in _LAYER_KEYS if text.get(name)), "num_hidden_layers")
    pattern = text.get("hybrid_override_pattern")
    before = len(pattern) if isinstance(pattern, str) else int(text.get(key) or layers)
    text[key] = layers
    if isinstance(pattern, str):
        text["hybrid_override_pattern"] = pattern[:layers]
    text["vocab_size"] = vocab
    if experts:
        many = next((name for name in _EXPERT_KEYS if text.get(name)), _EXPERT_KEYS[0])
        text[many] = experts
        for name in ("n_group", "topk_group"):  # groups of experts that a token may choose from
            if isinstance(text.get(name), int):
                text[name] = 1
        for name in ("num_experts_per_tok", "top_k", "moe_top_k"):
            if isinstance(text.get(name), int):
                text[name] = min(text[name], experts)
    if isinstance(text.get("first_k_dense_replace"), int):
        text["first_k_dense_replace"] = min(layers - 1, round(text["first_k_dense_replace"] * layers / before))
    for name, value in list(text.items()):
        if isinstance(value, list) and len(value) == before:
            text[name] = value[:layers]
        elif name in ("mlp_only_layers", "moe_layers") and isinstance(value, list):
            text[name] = [item for item in value if isinstance(item, int) and item < layers]
    return made
