"""When `headway tune` tries which registered remedy, with the gain and the exact change that this run's account tells.

The remedies themselves are registered once, in `diagnose.remedies`. Those of data come first, then those of compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headway.account.remedy import Remedy
from headway.config.run import RunConfig
from headway.diagnose.remedies import predict
from headway.tune.profile import Profile

LEAST_FILL = 0.9
"""Share of a pack's slots that the step it replaces must fill; packs of many documents are about as full."""
SLOTS = 64
"""Packs are a multiple of this, which kernels are made for."""

Maker = Callable[[RunConfig, Profile], Remedy | list[Remedy] | None]


def pack(config: RunConfig, seen: Profile) -> Remedy | None:
    """Whole documents share a pack instead of each padding a row; a step stays as large as it was, in tokens."""
    if config.data.packed or seen.padding < 0.01:
        return None
    rows = config.sequences_per_step(1)
    per_row = seen.tokens / max(1, seen.documents)
    tokens = rows * per_row
    if tokens < LEAST_FILL * config.data.seq_len:
        return None  # a pack must hold the longest document: one would already be more than the step
    # A pack holds about what a micro-batch of rows held; its size follows from a whole number of them.
    packs = max(1, round(tokens / max(config.data.seq_len, min(rows, config.data.rows) * per_row)))
    slots = max(config.data.seq_len, SLOTS * math.ceil(tokens / packs / SLOTS))
    change: dict[str, Any] = {"data.pack": "best_fit", "data.slots": slots, "train.global_batch_sequences": packs}
    if config.model.attention in ("sdpa", "eager"):
        # transformers' masks over a pack cost its square; one call a document costs only what is real
        change["model.attention"] = "auto"
    compute = seen.account.share("compute")
    return predict(
        "pack",
        gain=(0.7 * seen.padding * compute, seen.padding * compute),
        evidence=(
            f"{seen.padding:.1%} of {seen.slots:,} slots are padding",
            f"{rows} rows a step hold about {tokens:,.0f} tokens: {packs} packs of {slots} slots",
        ),
        change=change,
    )


def prefetch(config: RunConfig, seen: Profile) -> Remedy | None:
    """More batches ahead where the step waits for them."""
    share = seen.account.share("data")
    if share < 0.005:
        return None
    return predict(
        "load-ahead",
        gain=(0.0, share),
        evidence=(f"{share:.1%} of the step waits for the next batch",),
        change={"data.prefetch": config.data.prefetch * 4},
    )


def recompute(config: RunConfig, seen: Profile) -> Remedy | None:
    """Keep activations where they fit: `auto` takes the least recompute that does, and falls back when memory ends."""
    if config.model.recompute in ("none", "auto") or not seen.flops.recompute:
        return None
    share = seen.flops.recompute / seen.flops.computed * seen.account.share("compute")
    return predict(
        "less-recompute",
        gain=(0.7 * share, share),
        evidence=(f"{seen.flops.recompute / seen.flops.computed:.1%} of the FLOPs are activations computed again",),
        change={"model.recompute": "auto"},
    )


def fuse(config: RunConfig, seen: Profile) -> Remedy | None:
    """Head and loss as one, and the fastest right kernel of each kind on this run's shapes."""
    if config.model.fuse != "none":
        return None
    share = seen.account.share("compute.loss")
    return predict(
        "fuse-loss",
        gain=(0.5 * share, min(1.0, share + 0.25 * seen.account.share("compute"))),
        evidence=(f"{share:.1%} of the step is the loss over all logits",),
        change={"model.fuse": "auto"},
    )


def larger_micro_batch(config: RunConfig, seen: Profile) -> list[Remedy]:
    """More slots in fewer micro-batches: the same documents a step, larger matrix products.

    Only what divides the step's packs: five packs are no two of four times the size. Four times as many first, then
    twice as many, or the smallest number that divides: each trial costs a profile.
    """
    packs = config.sequences_per_step(1)
    if not config.data.packed:
        return []
    whole = [times for times in (4, 2) if packs % times == 0] or [times for times in (3, 5) if packs % times == 0][:1]
    host = seen.account.share("host") + seen.account.share("unaccounted")
    return [
        predict(
            "larger-micro-batch",
            gain=(0.0, min(1.0, host + 0.05 * (1 - 1 / times))),
            evidence=(f"a step is {packs} micro-batches of {config.data.slots} slots",),
            change={"data.slots": times * config.data.slots, "train.global_batch_sequences": packs // times},
        )
        for times in whole
    ]


def compile_layers(config: RunConfig, seen: Profile) -> Remedy | None:
    """Layers through torch.compile: fewer, larger kernels. `auto` measures one layer both ways before it compiles all,
    and only where the run is long enough to win the time back."""
    if config.train.compile:
        return None
    share = seen.account.share("compute.forward") + seen.account.share("compute.backward")
    return predict(
        "compile",
        gain=(0.0, 0.3 * share),
        evidence=(f"{share:.1%} of the step is forward and backward",),
        change={"train.compile": "auto"},
    )


DATA: tuple[Maker, ...] = (pack, prefetch)
COMPUTE: tuple[Maker, ...] = (recompute, fuse, larger_micro_batch, compile_layers)


def ranked(config: RunConfig, seen: Profile) -> list[Remedy]:
    """What could help this configuration: data remedies before compute remedies, the larger prediction first.

    Data comes first because padding inflates every compute category: what a kernel is worth shows only without it.
    """
    found = []
    for makers in (DATA, COMPUTE):
        made = [maker(config, seen) for maker in makers]
        some = [
            remedy for each in made for remedy in (each if isinstance(each, list) else [each]) if remedy is not None
        ]
        found += sorted(some, key=lambda remedy: -sum(remedy.gain))
    return found
