"""Learning rate, initialisation and multipliers from a small model to a large one: the maximal-update rules for Adam.

Width: Yang et al. 2022 (arXiv 2203.03466, table 8; the `mup` package's MuAdam). Depth: Yang et al. 2023 (arXiv
2310.02244), residual branches and their rates by 1/sqrt(depth). Batch: the square-root rule for Adam (Malladi et al.
2022, arXiv 2205.10287), with the decay rates and epsilon that go with it; it holds below the critical batch
(McCandlish et al. 2018, arXiv 1812.06162), which these figures cannot tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headway.account.errors import UserError
from headway.account.shape import ModelShape


@dataclass(frozen=True)
class Scale:
    """What changes from the small run to the large one: width, depth, head dimension and tokens a step."""

    width: float
    depth: float
    head_dim: float
    batch: float


@dataclass(frozen=True)
class Group:
    """One kind of parameters in the large run: rate, and the standard deviation and output multiplier as factors."""

    name: str
    lr: float
    init: float
    multiplier: float


@dataclass(frozen=True)
class Transfer:
    scale: Scale
    groups: tuple[Group, ...]
    attention: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    beyond: bool

    def lines(self) -> list[str]:
        s = self.scale
        found = [
            f"learning rate (width ×{s.width:g}, depth ×{s.depth:.3g}, tokens a step ×{s.batch:.3g}; muP for Adam, "
            "arXiv 2203.03466, 2310.02244, 2205.10287):"
        ]
        for one in self.groups:
            found.append(
                f"  {one.name:<42} lr {one.lr:.4g} · init std × {one.init:.4g} · output × {one.multiplier:.4g}"
            )
        found.append(f"  attention scores × {self.attention:.4g} against 1/sqrt(d) as in the small model (muP: 1/d)")
        found.append(
            f"  Adam: betas {self.beta1:.4g}, {self.beta2:.4g} · eps × {self.eps:.3g} · weight decay of matrices "
            f"× {self.weight_decay:.3g} (keeps lr · decay)"
        )
        if self.beyond:
            found.append(
                f"  ×{s.batch:.3g} tokens a step is past the square-root rule (1 - beta would pass 1): betas are "
                "the small run's, and the rates an upper bound; measure near them"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "scale": vars(self.scale), "groups": [vars(one) for one in self.groups]}


def scale_of(small: ModelShape, large: ModelShape, small_tokens: float, large_tokens: float) -> Scale:
    """The ratios large / small of two models and their tokens a step."""
    dims = [
        max((kind.qk_dim for kind, _ in shape.attention_kinds), default=1) for shape in (small, large)
    ]  # the head dimension that scores are divided by
    return Scale(
        width=large.hidden / small.hidden,
        depth=len(large.layers) / len(small.layers),
        head_dim=dims[1] / dims[0],
        batch=large_tokens / small_tokens,
    )


def transfer(scale: Scale, lr: float, beta1: float = 0.9, beta2: float = 0.95) -> Transfer:
    """The large run's settings from the rate that was best in the small one.

    Where the batch grows so much that the square-root rule leaves a moment no memory (1 - beta grows with the batch),
    the decay rates stay and `beyond` says so. Raises UserError for a rate that is not positive.
    """
    if not (lr > 0 and math.isfinite(lr)):
        raise UserError(f"--lr {lr:g}: give the small run's best learning rate, above zero")
    new1, new2 = (1 - (1 - beta) * scale.batch for beta in (beta1, beta2))
    beyond = min(new1, new2) <= 0
    new1, new2 = (beta1, beta2) if beyond else (new1, new2)
    batch, width, depth = math.sqrt(scale.batch), scale.width, math.sqrt(scale.depth)
    groups = (
        Group("embedding, norms, biases", lr * batch, 1.0, 1.0),
        Group("matrices inside layers", lr * batch / width / depth, 1 / math.sqrt(width), 1.0),
        Group("what a layer adds to the residual stream", lr * batch / width / depth, 1 / math.sqrt(width), 1 / depth),
        Group("output head (untied, or its multiplier)", lr * batch, 1.0, 1 / width),
    )
    attention, decay = 1 / math.sqrt(scale.head_dim), width * depth / batch
    return Transfer(scale, groups, attention, new1, new2, 1 / batch, decay, beyond)
