"""A model's layers reduced to the numbers the step model multiplies: matrix products, attention, widths. Cached."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from headway.account.layers import Attention, Layer, Scan
from headway.account.shape import ModelShape

Split = Literal["column", "row", "none"]
_SPLITS: dict[str, Split] = {
    "attention_in": "column", "attention_mid": "column", "attention_out": "row",
    "mlp_in": "column", "mlp_out": "row", "router": "none", "outer": "none",
}  # fmt: skip


@dataclass(frozen=True)
class Gemm:
    """A weight of k inputs and n outputs, and which side tensor parallelism splits."""

    k: int
    n: int
    split: Split


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike: how many, their dense products, one expert's products, attention.

    `inner` is the summed width of what elementwise kernels touch besides the residual stream (activation and rotary
    positions), per token; `expert_inner` the same for one routed token copy.
    """

    count: int
    gemms: tuple[Gemm, ...]
    expert_gemms: tuple[Gemm, ...]
    experts: int
    top_k: int
    attention: Attention | None
    inner: int
    expert_inner: int
    dense: int
    expert: int
    parallel: bool
    scan: Scan | None = None
    feeds: bool = True

    @property
    def blocks(self) -> int:
        """Residual blocks: mixer and MLP, or one of them (hybrids whose layer is a single block)."""
        mixes = self.attention is not None or self.scan is not None
        return 2 if mixes and (self.experts or self.feeds) else 1

    @property
    def outputs(self) -> int:
        """Elements per token of the products that TP splits by columns: q, k, v and the MLP's, needed by backward."""
        return sum(gemm.n for gemm in self.gemms if gemm.split == "column")

    def kept_inputs(self, selective: bool) -> int:
        """The same of the inputs of the other products; `selective` computes the MLP's activation again."""
        if selective:
            return self.attention.heads * self.attention.v_dim if self.attention else 0
        return sum(gemm.k for gemm in self.gemms if gemm.split == "row")

    def expert_stored(self, selective: bool) -> int:
        """The same of one routed copy of a token, its input included; `selective` computes the activation again."""
        if not self.expert_gemms:
            return 0
        outputs = sum(gemm.n for gemm in self.expert_gemms if gemm.split == "column")
        inputs = sum(gemm.k for gemm in self.expert_gemms if gemm.split == "row")
        return self.expert_gemms[0].k + outputs + (0 if selective else inputs)


@dataclass(frozen=True)
class Profile:
    """A model for the step model: `dense` and `expert` are parameters of all layers together."""

    hidden: int
    vocab: int
    layers: int
    kinds: tuple[LayerKind, ...]
    dense: int
    expert: int
    embedding: int
    head: int
    tied: bool

    @property
    def moe(self) -> bool:
        return self.expert > 0


@lru_cache(maxsize=256)
def profile(shape: ModelShape) -> Profile:
    """The profile of a shape; cached, because a search prices one model thousands of times."""
    kinds = tuple(_kind(layer, count) for layer, count in Counter(shape.layers).items())
    dense = sum(kind.count * kind.dense for kind in kinds) + sum(weight.parameters for weight in shape.outer)
    return Profile(
        hidden=shape.hidden,
        vocab=shape.vocab,
        layers=len(shape.layers),
        kinds=kinds,
        dense=dense + shape.vectors,
        expert=sum(kind.count * kind.expert for kind in kinds),
        embedding=shape.embedding_parameters,
        head=shape.head.parameters,
        tied=shape.tied,
    )


def _kind(layer: Layer, count: int) -> LayerKind:
    dense = tuple(Gemm(w.inputs, w.outputs, _SPLITS[w.role]) for w in layer.weights if w.copies == 1)
    routed = [weight for weight in layer.weights if weight.copies > 1]
    experts = max((weight.copies for weight in routed), default=0)
    top_k = max((weight.active for weight in routed), default=0)
    expert = sum(weight.parameters for weight in routed)
    attention = layer.attention
    rotary = 2 * attention.heads * attention.qk_dim + 2 * attention.kv_heads * attention.qk_dim if attention else 0
    activation = sum(w.outputs for w in layer.weights if w.copies == 1 and w.role == "mlp_in")
    activation += sum(w.inputs for w in layer.weights if w.copies == 1 and w.role == "mlp_out")
    return LayerKind(
        count=count,
        gemms=dense,
        expert_gemms=tuple(Gemm(weight.inputs, weight.outputs, _SPLITS[weight.role]) for weight in routed),
        experts=experts,
        top_k=top_k,
        attention=attention,
        inner=rotary + activation,
        expert_inner=sum(w.outputs if w.role == "mlp_in" else w.inputs for w in routed),
        dense=layer.parameters - expert,
        expert=expert,
        parallel=layer.parallel,
        scan=layer.scan,
        feeds=layer.mlp is not None or (layer.scan is None and any(w.role == "mlp_out" for w in layer.weights)),
    )
