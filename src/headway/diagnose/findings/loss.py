"""A loss that writes the logits of a large vocabulary to memory, several times over."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from headway.diagnose.case import Case
from headway.diagnose.facts import NONE
from headway.diagnose.finding import Finding
from headway.diagnose.view import Mask, View, ms, short

NOTABLE = 0.01
LARGE_VOCABULARY = 16_384
_LOSS_OPS = r"log_softmax|LogSoftmax|nll_loss|NllLoss|cross_entropy_loss|CrossEntropy"
_NEIGHBOURS = 8


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: softmax, its backward and the copies of the logits. Put back: one pass over them (the softmax
    forward), which a fused loss still makes; on a CPU all but a quarter of the copies. There a pass is bound by
    its exponentials and not by memory, and most of a copy is the first touch of its pages, which falls to whoever is
    handed that memory without it (5,923 page faults a step with two copies of 16 MiB forth and back, 5,617 without)."""
    view = case.view
    softmax = _softmax(view)
    if not softmax.any():
        return
    every = softmax | _copies_beside(view, softmax)
    spent = view.time(every)
    vocabulary = _vocabulary(view)
    if spent < NOTABLE * view.wall_ns or (vocabulary is not None and vocabulary < LARGE_VOCABULARY):
        return
    softmaxes = view.time(softmax)
    forward = view.time(softmax & view.named(r"SoftMaxForward|aten::_?log_softmax$|softmax_warp_forward"))
    surely = spent - forward if view.on_gpu else (spent - softmaxes) // 4
    claims = {f"device.{kind}": ns for kind in view.device.by_kind if (ns := view.time(every & view.of_kind(kind)))}
    size = f" of {vocabulary:,} entries" if vocabulary else ""
    yield Finding(
        name="loss-unfused",
        title="the loss is not fused: logits over the vocabulary are materialised",
        claims=claims,
        lower_ns=max(0, min(surely, sum(claims.values()))),
        wall_ns=view.wall_ns,
        evidence=(
            f"{ms(spent)} in softmax over the vocabulary{size} and copies of the logits, beside the projection itself",
            *(f"{short(name)}: {count:,}×, {ms(ns)}" for name, count, ns in view.top_names(every)),
            "each copy of the logits holds tokens × vocabulary × 2 or 4 bytes of memory that a larger micro-batch "
            "could use",
        ),
        check="look for log_softmax and nll_loss in the trace; a fused loss has neither",
        remedy="fuse-loss",
    )


def _softmax(view: View) -> Mask:
    named = view.named(r"LogSoftMax|nll_loss|log_softmax|cross_entropy")
    return (named | view.from_op(_LOSS_OPS)) & view.computing & ~view.named(r"^triton_|_cce_|liger|Liger")


def _copies_beside(view: View, softmax: Mask) -> Mask:
    """Copies and elementwise kernels near the softmax whose size is that of the logits: they take a tenth of its time
    or more."""
    events = view.device.events
    beside = np.zeros(len(events), bool)
    large = np.flatnonzero(softmax)
    if not len(large):
        return beside
    longest = view.spent[large].max()
    loose = view.of_kind("copy", "elementwise", "memset") & view.computing & ~softmax
    if not view.on_gpu:
        main = softmax & (view.spent >= longest // 4)
        return loose & view.near(main, _NEIGHBOURS) & (view.spent >= 0.1 * longest)
    for row in large[view.spent[large] >= longest // 4]:
        near = slice(max(0, row - _NEIGHBOURS), row + _NEIGHBOURS + 1)
        beside[near] |= loose[near] & (view.spent[near] >= 0.1 * view.spent[row])
    return beside


def _vocabulary(view: View) -> int | None:
    """Size of the last dimension of what the loss was taken of, where shapes were recorded."""
    host = view.rank.host
    for name in (r"aten::_?log_softmax$", r"cross_entropy_loss"):
        for row in view.host_rows(name, (0,)):  # type: ignore[arg-type]
            if host.shapes[row] != NONE and (found := re.match(r"\[\[(?:\d+, ?)*(\d+)\]", view.shapes_of(int(row)))):
                return int(found[1])
    return None
