"""The model families whose exact parameters Headway knows, as data, and the builder that reads a config with them.

Source: the modelling code of transformers 5.24; tests compare every family with the model built on the meta device.
A family that is not here is refused by name; `ModelShape.measured` then counts from the real model's matrices.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.account.config_keys import Keys
from headway.account.errors import UserError
from headway.account.layers import Attention, Layer, Mlp, Weight

Window = tuple[int | None, int | None]  # (sliding window, chunk)
WindowRule = Callable[[Keys, int, int], Window]  # (config, layer, number of layers)


@dataclass(frozen=True)
class Experts:
    """How a family's mixture-of-experts block reads its config."""

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    prefix: str = "mlp"
    router: str = "gate"
    shared: str = "shared_experts"
    shared_width: Callable[[Keys], int] = lambda keys: 0
    shared_gate: bool = False  # a [1, hidden] matrix that scales the shared expert
    biases: bool = False  # router and experts carry biases
    sparse: Callable[[Keys, int], bool] = lambda keys, layer: True
    dense_width: str = "intermediate_size"


@dataclass(frozen=True)
class Family:
    """What distinguishes one model type. A `bool | str` trait is fixed, or the name of the config key that decides."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names of a key, the class's own last
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    grouped: bool = True  # has num_key_value_heads; False: every head has its own keys and values
    head_dim_key: bool = True  # False: always hidden / heads, whatever the config says
    qk_norm: str = ""  # "head" [dim], "flat" [heads*dim], "query_hidden" [hidden] for q; "+bias" doubles
    qk_norm_if: bool | str = True
    latent: bool = False  # multi-head latent attention
    sinks: bool = False
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    gated: bool = True
    mlp_bias: bool | str = False
    experts: Experts | None = None
    norms: int = 2
    norm_vectors: int = 1  # per norm and channel: 1 scale, 2 scale and bias, 0 none
    parallel: bool | str = False
    parallel_drops_norm: bool = False
    windows: WindowRule = lambda keys, layer, count: (None, None)
    positions: str = ""  # key of the number of learned positions
    position_offset: int = 0
    embedding_norm: bool = False
    projected_embedding: bool = False
    head_bias: bool | str = False
    mtp: str = ""  # key of the number of multi-token-prediction layers the checkpoint carries


@dataclass(frozen=True)
class Built:
    """What a family makes of a config; `ModelShape` is assembled from it."""

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    embedding: int
    outer: tuple[Weight, ...]
    vectors: int
    head_inputs: int
    mtp_layers: int


_MOST_LAYERS = 10_000  # ten times DeepNet's 1,000 (arXiv 2203.00555): beyond it a typing error


def build(config: Mapping[str, Any], families: Mapping[str, Family]) -> Built:
    """Layers, matrices and vectors of the model that `config` describes.

    Raises UserError for an unsupported model type (nearest ones named) and for missing or impossible keys.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        near = difflib.get_close_matches(str(model_type), families, n=4, cutoff=0.3) or sorted(families)
        raise UserError(
            f"model_type {model_type!r} has no exact shape; nearest supported: {', '.join(near)}. "
            "A loaded model can be counted from its own matrices (ModelShape.measured)"
        )
    family = families[model_type]
    keys = Keys(config, model_type, family.defaults, family.aliases)
    if keys.flag("use_bidirectional_attention"):
        raise UserError(f"config.json ({model_type}): use_bidirectional_attention is true; this is no causal model")
    hidden, vocab, count = keys.number("hidden_size"), keys.number("vocab_size"), keys.number("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise UserError(
            f"config.json ({model_type}): key {keys.name('num_hidden_layers')!r} is {count}; "
            f"give at most {_MOST_LAYERS:,}"
        )
    kinds = keys.listing("layer_types")
    if kinds and len(kinds) < count:  # also where this family's layers are all of one kind
        raise UserError(f"config.json ({model_type}): layer_types has {len(kinds)} entries for {count} layers")
    embed_dim = keys.optional("word_embed_proj_dim") or hidden if family.projected_embedding else hidden
    outer: tuple[Weight, ...] = ()
    if embed_dim != hidden:
        outer = (Weight("project_in", embed_dim, hidden, "outer"), Weight("project_out", hidden, embed_dim, "outer"))
    positions = (keys.number(family.positions) + family.position_offset) * hidden if family.positions else 0
    norm = family.norm_vectors * hidden
    return Built(
        hidden=hidden,
        vocab=vocab,
        layers=tuple(_layer(keys, family, hidden, index, count) for index in range(count)),
        tied=keys.flag("tie_word_embeddings"),
        embedding=vocab * embed_dim + positions,
        outer=outer,
        vectors=norm * (1 + family.embedding_norm) + vocab * keys.flag(family.head_bias),
        head_inputs=embed_dim,
        mtp_layers=(keys.optional(family.mtp, minimum=0) or 0) if family.mtp else 0,
    )


def _layer(keys: Keys, family: Family, hidden: int, index: int, count: int) -> Layer:
    window, chunk = family.windows(keys, index, count)
    attend = _latent_attention if family.latent else _attention
    attention, attention_weights, attention_vectors = attend(keys, family, hidden, window, chunk)
    mlp, mlp_weights, mlp_vectors = _mlp(keys, family, hidden, index)
    parallel = keys.flag(family.parallel)
    norms = family.norms - (family.parallel_drops_norm and parallel)
    return Layer(
        attention=attention,
        mlp=mlp,
        weights=(*attention_weights, *mlp_weights),
        vectors=attention_vectors + mlp_vectors + norms * family.norm_vectors * hidden,
        parallel=parallel,
    )


def _attention(
    keys: Keys, family: Family, hidden: int, window: int | None, chunk: int | None
) -> tuple[Attention, list[Weight], int]:
    heads = keys.number("num_attention_heads")
    kv_heads = (keys.optional("num_key_value_heads") if family.grouped else None) or heads
    dim = (keys.optional("head_dim") if family.head_dim_key else None) or _divide(keys, hidden, heads)
    if heads % kv_heads:
        divisors = [one for one in range(1, min(heads, 4096) + 1) if heads % one == 0]
        near = sorted(sorted(divisors, key=lambda one: abs(one - kv_heads))[:3])
        raise UserError(
            f"config.json ({keys.model_type}): {heads} query heads do not divide into "
            f"{keys.name('num_key_value_heads')}={kv_heads} groups; nearest: {', '.join(map(str, near))}"
        )
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    if len(family.qkv) == 1:
        widths = [sum(widths)]
    weights = [
        Weight(f"{family.attention}.{name}", hidden, width, "attention_in")
        for name, width in zip(family.qkv, widths, strict=True)
    ]
    weights.append(Weight(f"{family.attention}.{family.out}", heads * dim, hidden, "attention_out"))
    vectors = sum(widths) * keys.flag(family.qkv_bias) + hidden * keys.flag(family.out_bias) + heads * family.sinks
    if family.qk_norm and keys.flag(family.qk_norm_if):
        vectors += _qk_norm(family.qk_norm, hidden, heads, kv_heads, dim)
    return Attention(heads, kv_heads, dim, dim, window, chunk), weights, vectors


def _qk_norm(kind: str, hidden: int, heads: int, kv_heads: int, dim: int) -> int:
    kind, _, bias = kind.partition("+")
    sizes = {"head": 2 * dim, "flat": (heads + kv_heads) * dim, "query_hidden": hidden + hidden // heads * kv_heads}
    return sizes[kind] * (2 if bias else 1)


def _latent_attention(
    keys: Keys, family: Family, hidden: int, window: int | None, chunk: int | None
) -> tuple[Attention, list[Weight], int]:
    """DeepSeek's MLA: queries and keys/values through low ranks, one rotary key shared by all heads."""
    heads, kv_rank = keys.number("num_attention_heads"), keys.number("kv_lora_rank")
    rope, v_dim = keys.number("qk_rope_head_dim"), keys.number("v_head_dim")
    qk_dim, q_rank = keys.number("qk_nope_head_dim") + rope, keys.optional("q_lora_rank")
    bias = keys.flag(family.qkv_bias)
    at = family.attention
    vectors = kv_rank + hidden * keys.flag(family.out_bias) + (kv_rank + rope) * bias
    if q_rank is None:
        weights = [Weight(f"{at}.q_proj", hidden, heads * qk_dim, "attention_in")]
    else:
        weights = [
            Weight(f"{at}.q_a_proj", hidden, q_rank, "attention_in"),
            Weight(f"{at}.q_b_proj", q_rank, heads * qk_dim, "attention_mid"),
        ]
        vectors += q_rank + q_rank * bias
    weights += [
        Weight(f"{at}.kv_a_proj_with_mqa", hidden, kv_rank + rope, "attention_in"),
        Weight(f"{at}.kv_b_proj", kv_rank, heads * (qk_dim - rope + v_dim), "attention_mid"),
        Weight(f"{at}.{family.out}", heads * v_dim, hidden, "attention_out"),
    ]
    return Attention(heads, heads, qk_dim, v_dim, window, chunk, q_rank, kv_rank, rope), weights, vectors


def _mlp(keys: Keys, family: Family, hidden: int, index: int) -> tuple[Mlp, list[Weight], int]:
    experts = family.experts
    if experts is not None and experts.sparse(keys, index):
        return _experts(keys, family, experts, hidden)
    width = _dense_width(keys, family, hidden)
    return Mlp(width, family.gated), *_dense(family.mlp, family.gated, hidden, width, keys.flag(family.mlp_bias))


def _dense_width(keys: Keys, family: Family, hidden: int) -> int:
    key = family.experts.dense_width if family.experts else "intermediate_size"
    if keys.raw(key) is None and "mlp_ratio" in family.defaults:
        return int(family.defaults["mlp_ratio"]) * hidden
    return keys.number(key)


def _dense(names: tuple[str, ...], gated: bool, hidden: int, width: int, bias: bool) -> tuple[list[Weight], int]:
    """Two names with a gate: gate and up projection are stored as one matrix."""
    *into, out = names
    inner = 2 * width if gated and len(into) == 1 else width
    weights = [Weight(name, hidden, inner, "mlp_in") for name in into] + [Weight(out, width, hidden, "mlp_out")]
    return weights, (inner * len(into) + hidden) * bias


def _experts(keys: Keys, family: Family, experts: Experts, hidden: int) -> tuple[Mlp, list[Weight], int]:
    count, width, top_k = keys.number(experts.count), keys.number(experts.width), keys.number("num_experts_per_tok")
    if top_k > count:
        raise UserError(
            f"config.json ({keys.model_type}): {keys.name('num_experts_per_tok')}={top_k} "
            f"of {keys.name(experts.count)}={count}"
        )
    at = experts.prefix
    weights = [
        Weight(f"{at}.{experts.router}", hidden, count, "router"),
        Weight(f"{at}.experts.gate_up_proj", hidden, 2 * width, "mlp_in", count, top_k),
        Weight(f"{at}.experts.down_proj", width, hidden, "mlp_out", count, top_k),
    ]
    vectors = count * (1 + 2 * width + hidden) * experts.biases
    shared = experts.shared_width(keys)
    if shared:
        names = tuple(f"{at}.{experts.shared}.{name.rpartition('.')[2]}" for name in family.mlp)
        more, biases = _dense(names, family.gated, hidden, shared, keys.flag(family.mlp_bias))
        weights, vectors = weights + more, vectors + biases
        if experts.shared_gate:
            weights.append(Weight(f"{at}.{experts.shared}_gate", hidden, 1, "router"))
    return Mlp(width, family.gated, count, top_k, shared), weights, vectors


def _divide(keys: Keys, hidden: int, heads: int) -> int:
    if hidden % heads:
        low, high = (hidden // heads) * heads, (hidden // heads + 1) * heads
        raise UserError(
            f"config.json ({keys.model_type}): {keys.name('hidden_size')}={hidden} does not divide by "
            f"{keys.name('num_attention_heads')}={heads}; nearest sizes: {low or high}, {high}"
        )
    return hidden // heads
