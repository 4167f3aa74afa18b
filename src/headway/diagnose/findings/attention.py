"""Attention that writes its scores to memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headway.diagnose.case import Case
from headway.diagnose.finding import Finding
from headway.diagnose.view import Mask, View, ms, short

NOTABLE = 0.03
_OPS = (
    r"aten::_?softmax$|aten::_softmax_backward_data|(?<!Log)SoftmaxBackward|aten::_safe_softmax|"
    r"_scaled_dot_product_attention_math"
)
_PRODUCTS = r"^aten::(?:bmm|baddbmm)$"  # by heads: what makes scores, or multiplies them with the values
_NEIGHBOURS = 5


def find(case: Case) -> Iterator[Finding]:
    """Upper bound: softmax over the scores, the masks, scalings and casts beside it, and half of the batched products
    beside it, which write and read the scores. Put back: a third of the softmax's part, for the scores that a fused
    kernel computes again in backward, and all of the products."""
    view = case.view
    softmax = view.from_op(_OPS) & view.computing & view.of_kind("softmax", "elementwise", "norm", "reduction", "other")
    products = view.from_op(_PRODUCTS) & view.computing
    # A softmax without such a product beside it is a router's, a sampler's or the loss's.
    softmax &= view.near(products, _NEIGHBOURS, measure_by=softmax)
    if not softmax.any():
        return
    every = softmax | _beside(view, softmax)
    spent = view.time(every)
    if spent < NOTABLE * view.wall_ns:
        return
    claims = {f"device.{kind}": ns for kind in view.device.by_kind if (ns := view.time(every & view.of_kind(kind)))}
    if moved := view.time(products & view.near(softmax, _NEIGHBOURS)) // 2:
        claims["device.matmul"] = claims.get("device.matmul", 0) + moved
    yield Finding(
        name="attention-unfused",
        title="attention materialises its scores",
        claims=claims,
        lower_ns=min(int(spent * 2 / 3), sum(claims.values())),
        wall_ns=view.wall_ns,
        evidence=(
            f"{int(softmax.sum()):,} softmax kernels between matrix products, {ms(spent)} with masks and casts beside "
            "them; memory grows with the square of the sequence",
            *(f"{short(name)}: {count:,}×, {ms(ns)}" for name, count, ns in view.top_names(every)),
        ),
        check="one fused kernel (flash, cudnn, mem_efficient) should stand where bmm, softmax, bmm stand now",
        remedy="fuse-attention",
    )


def _beside(view: View, softmax: Mask) -> Mask:
    """Elementwise kernels and copies near a softmax that are as large as it is (a third of its time or more)."""
    loose = view.of_kind("copy", "elementwise") & view.computing & ~softmax
    if not view.on_gpu:
        return loose & view.near(softmax, _NEIGHBOURS) & (view.spent * 3 >= np.median(view.spent[softmax]))
    beside = np.zeros(len(softmax), bool)
    for row in np.flatnonzero(softmax):
        near = slice(max(0, row - _NEIGHBOURS), row + _NEIGHBOURS + 1)
        beside[near] |= loose[near] & (view.spent[near] * 3 >= view.spent[row])
    return beside
