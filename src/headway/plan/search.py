"""Search: every plan that a cluster, a model and a batch allow, priced; and why the others cannot be.

DP is what the other degrees leave over. Heavy traffic stays in the fast domain: TP never leaves it, and says so.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.account.errors import UserError
from headway.plan.cluster import Cluster, check_precision
from headway.plan.constants import Constants, default_constants
from headway.plan.layout import RECOMPUTES, Layout, most_chunks, problems
from headway.plan.memory import Memory, memory
from headway.plan.predict import Prediction, predict
from headway.plan.profile import Profile, profile
from headway.plan.step import sends_per_chunk, step_terms
from headway.plan.workload import Workload

Objective = Literal["time", "cost", "memory"]
# A plan that is booked must survive a library's new workspace: this much of the memory is planned for.
HEADROOM = 0.96
OBJECTIVES: tuple[Objective, ...] = ("time", "cost", "memory")


class NothingFits(UserError):
    """Plans run and none fits into memory (`smallest_change` has what would help)."""


@dataclass(frozen=True)
class Found:
    """The best plans, best first; how many were priced; and why others were not, each reason with a count.

    `unbound_s`: the fastest step of all, also of plans that do not fit (None where that was not asked).
    """

    plans: tuple[Prediction, ...]
    priced: int
    removed: Mapping[str, int]
    unbound_s: float | None = None


def search(
    work: Workload,
    cluster: Cluster,
    fixed: Mapping[str, Any] | None = None,
    *,
    objective: Objective = "time",
    top: int = 5,
    constants: Constants | None = None,
    factor: float = 1.0,
    unbound: bool = False,
) -> Found:
    """The `top` plans that run and fit, by step time (which on one cluster is also cost) or by memory.

    `fixed`: fields of Layout that are given. `unbound`: also price what does not fit. Raises UserError when nothing
    runs, with the commonest reason, or NothingFits.
    """
    given = dict(fixed or {})
    _check_given(work, cluster, given)
    c = constants or default_constants()
    prices = _Prices(profile(work.shape), work, cluster, c, unbound)
    for layout in _candidates(work, cluster, given, prices.removed):
        fits, bubble = prices.add(layout)
        if "vpp" not in given and bubble:
            prices.interleave(layout, bubble, fits)
    fitting = prices.fitting
    if not fitting:
        raise _why_nothing(prices.removed, prices.smallest)
    order = 1 if objective == "memory" else 0
    fitting.sort(key=lambda item: (item[order], item[1 - order]))
    plans = tuple(predict(work, layout, cluster, c, factor) for _, _, layout in _distinct(fitting)[:top])
    return Found(plans, len(fitting), dict(prices.removed), prices.fastest * factor if unbound else None)


@dataclass
class _Prices:
    """Step time and memory of layouts as they come; `unbound` also prices the step of what does not fit."""

    model: Profile
    work: Workload
    cluster: Cluster
    c: Constants
    unbound: bool
    fitting: list[tuple[float, float, Layout]] = field(default_factory=list)
    removed: Counter[str] = field(default_factory=Counter)
    smallest: tuple[float, Layout, Memory] | None = None
    fastest: float = math.inf

    def add(self, layout: Layout) -> tuple[bool, float]:
        """Prices one layout: whether it fits, and seconds of its bubble (0 where it does not and nobody asks)."""
        held = memory(self.model, self.work, layout, self.cluster)
        fits = held.needed <= HEADROOM * held.capacity
        if not fits:
            self.removed["does not fit in memory"] += 1
            if self.smallest is None or held.needed < self.smallest[0]:
                self.smallest = (held.needed, layout, held)
            if not self.unbound:
                return False, 0.0
        terms, _ = step_terms(self.model, self.work, layout, self.cluster, self.c)
        seconds = sum(terms.values())
        self.fastest = min(self.fastest, seconds)
        if fits:
            self.fitting.append((seconds, held.needed, layout))
        return fits, terms["bubble"]

    def interleave(self, layout: Layout, bubble: float, fits: bool) -> None:
        """The best number of chunks for a layout without interleave, whether or not they divide its layers evenly.

        The step is a + b/v + c·v (the bubble shrinks, sends grow) and memory shrinks from v = 2 on, so only the two
        whole numbers about the optimum matter, or the first above them that fits. One chunk holds least: where that
        does not fit, none does.
        """
        most = most_chunks(len(self.work.shape.layers), layout.pp)
        # Interleaving runs micro-batches in rounds of the pipeline's depth; other schedules have chunks of their own.
        if layout.schedule != "1f1b" or most < 2 or layout.micro_batches(self.work.global_batch) % layout.pp:
            return
        sends = sends_per_chunk(self.model, self.work, layout, self.cluster, self.c)
        best = math.sqrt(bubble / sends) if sends else most
        low = min(max(2, math.floor(best)), most)
        found = any([self.add(replace(layout, vpp=vpp))[0] for vpp in range(low, min(low + 1, most) + 1)])
        vpp = low + 2
        while fits and not found and vpp <= most:
            found, _ = self.add(replace(layout, vpp=vpp))
            vpp += 1


def _check_given(work: Workload, cluster: Cluster, given: Mapping[str, Any]) -> None:
    """Raises UserError for a precision that the device has no units for, and for a given degree that no plan can have,
    with the nearest that one could."""
    check_precision(cluster.device, work.precision, "--precision")
    heads = max((kind.heads for kind, _ in work.shape.attention_kinds), default=1)
    experts = max((layer.mlp.experts for layer in work.shape.layers if layer.mlp), default=0)
    if given.get("ep", 1) > 1 and not experts:
        raise UserError(
            f"ep={given['ep']} needs a mixture of experts, and {work.name or 'this model'} is none; nearest: 1"
        )
    for key, whole, what in (("tp", heads, "heads"), ("ep", experts, "experts")):
        value = given.get(key, 1)
        if value > 1 and (not whole or whole % value):
            raise UserError(f"{key}={value} does not divide {whole} {what}; nearest: {_nearest(whole or 1, value)}")
    if given.get("etp", 1) > 1:
        width = max((layer.mlp.width for layer in work.shape.layers if layer.mlp and layer.mlp.experts), default=0)
        if not width or width % given["etp"]:
            what = f"an expert's width of {width}" if width else "a model without experts"
            raise UserError(f"etp={given['etp']} does not divide {what}; nearest: {_nearest(width or 1, given['etp'])}")
    if given.get("pp", 1) > len(work.shape.layers):
        raise UserError(f"pp={given['pp']} is more than the model's {len(work.shape.layers)} layers")
    micro = given.get("micro_batch", 1)
    if work.global_batch % micro:
        near = _nearest(work.global_batch, micro)
        raise UserError(f"micro_batch={micro} does not divide global_batch {work.global_batch}; nearest: {near}")
    product = math.prod(given.get(key, 1) for key in ("dp", "tp", "pp", "cp"))
    if cluster.gpus % product or ("dp" in given and product > cluster.gpus):
        near = _nearest(cluster.gpus, product)
        raise UserError(f"the given degrees take {product} GPUs, not a divisor of {cluster.gpus}; nearest: {near}")


def _nearest(whole: int, value: int) -> str:
    """The three divisors of `whole` that are nearest to `value`."""
    return ", ".join(map(str, sorted(sorted(_divisors(whole), key=lambda one: abs(one - value))[:3])))


def _distinct(fitting: list[tuple[float, float, Layout]]) -> list[tuple[float, float, Layout]]:
    """One plan of each (dp, tp, pp, cp, ep): the runners-up should differ in more than a micro-batch."""
    seen: set[tuple[int, ...]] = set()
    kept = []
    for item in fitting:
        layout = item[2]
        key = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep)
        if key not in seen:
            seen.add(key)
            kept.append(item)
    return kept


def _candidates(work: Workload, cluster: Cluster, given: Mapping[str, Any], removed: Counter[str]) -> Iterator[Layout]:
    """Layouts that could run; each removal is counted with its reason, once for each set of degrees."""
    shape = work.shape
    layers = len(shape.layers)
    heads = max((kind.heads for kind, _ in shape.attention_kinds), default=1)
    experts = max((layer.mlp.experts for layer in shape.layers if layer.mlp), default=0)
    tps = _given(given, "tp", [n for n in _divisors(heads) if n <= 64])
    pps = _given(
        given, "pp", [n for n in range(1, min(layers, cluster.gpus) + 1) if cluster.gpus % n == 0 and n <= 128]
    )
    cps = _given(given, "cp", [n for n in (1, 2, 4, 8, 16, 32) if n == 2 or work.seq >= min(16384, 2048 * n) or n == 1])
    eps = _given(given, "ep", [n for n in _divisors(experts)] if experts else [1])
    for tp, pp, cp in itertools.product(tps, pps, cps):
        if tp > cluster.domain and "tp" not in given:
            removed[f"TP {tp} leaves the fast domain of {cluster.domain}"] += 1
            continue
        if cluster.gpus % (tp * pp * cp):
            continue
        dp = cluster.gpus // (tp * pp * cp)
        if given.get("dp", dp) != dp:
            continue
        for ep in eps:
            base = replace(Layout(), **{**given, "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep})
            yield from _details(base, work, cluster, given, removed)


def _details(
    base: Layout, work: Workload, cluster: Cluster, given: Mapping[str, Any], removed: Counter[str]
) -> Iterator[Layout]:
    """Micro-batch, sharding and recompute of one set of degrees."""
    # TP's slices hide behind products and state is sharded wherever there is a group for it.
    base = replace(base, overlap_tp=given.get("overlap_tp", base.tp > 1))
    zeros = _given(given, "zero", [1, 3] if base.pp == 1 and base.replicas > 1 else [1])
    recomputes = _given(given, "recompute", list(RECOMPUTES))
    shards = _given(given, "shard", _hybrid_shards(base, cluster))
    each = work.global_batch // base.dp
    micros = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n in (1, 2, 4, 8) or each % n == 0]
    for micro in _given(given, "micro_batch", micros):
        tried = replace(base, micro_batch=micro)
        found = problems(tried, work.shape, cluster, work.seq, work.global_batch)
        if found:
            removed[found[0]] += 1
            continue
        if tried.vpp > 1 and tried.micro_batches(work.global_batch) % base.pp:
            removed[f"vpp={tried.vpp}: interleaving needs micro-batches in rounds of pp"] += 1
            continue
        for zero, recompute in itertools.product(zeros, recomputes):
            for shard in shards if zero == 3 else shards[:1]:
                yield replace(tried, zero=zero, recompute=recompute, shard=shard)


def _hybrid_shards(base: Layout, cluster: Cluster) -> list[int]:
    """Over how many replicas FSDP shards: all of them (0), or (HSDP) those of one fast domain or of eight."""
    inside = max(1, cluster.domain // (base.tp * base.cp))
    return [0, *(n for n in (inside, 8 * inside) if 1 < n < base.replicas and base.replicas % n == 0)]


def _given(given: Mapping[str, Any], key: str, otherwise: list[Any]) -> list[Any]:
    return [given[key]] if key in given else otherwise


def _divisors(number: int) -> list[int]:
    low = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*low, *(number // value for value in low)})


def _why_nothing(removed: Mapping[str, int], smallest: tuple[float, Layout, Memory] | None) -> UserError:
    if smallest is None:
        # A TP that leaves the fast domain is never why nothing runs: smaller ones do not.
        why = {key: count for key, count in removed.items() if not key.startswith("TP ")}
        reason = max(why, key=lambda key: why[key]) if why else "no degrees divide the cluster's GPUs"
        return UserError(f"no plan runs: {reason}")
    needed, layout, held = smallest
    return NothingFits(
        f"no plan fits: the smallest ({layout.describe()}) needs {needed / 2**30:.1f} GiB a GPU and "
        f"{held.capacity / 2**30:.1f} are there, of which {HEADROOM:.0%} are planned for: "
        f"{(needed - HEADROOM * held.capacity) / 2**30:.1f} GiB short"
    )
