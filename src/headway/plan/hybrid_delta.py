"""Hybrids of gated delta-rule layers and gated attention over experts: Qwen3-Next's config.json as a shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.account.errors import UserError
from headway.account.layers import Attention, Layer, Mlp, Scan, Weight
from headway.account.shape import ModelShape
from headway.plan.hybrid_keys import refuse_missing, whole

_FAMILY = "qwen3_next"
_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
_CHUNK = 64  # of the published kernels (flash-linear-attention)
_whole = partial(whole, _FAMILY)


def delta_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of such a config. Raises UserError naming a missing or impossible key, and an unknown layer type."""
    refuse_missing(_FAMILY, config, _NEEDED)
    hidden, vocab = _whole(config, "hidden_size"), _whole(config, "vocab_size")
    made = {"linear_attention": _delta, "full_attention": _attention}
    layers = []
    for index, name in enumerate(_types(config)):
        if name not in made:
            raise UserError(f"config.json (qwen3_next): layer_types holds {name!r}; nearest: {', '.join(made)}")
        mixer, scan, weights, vectors = made[name](config, hidden)
        mlp, more, extra = _mlp(config, hidden, index)
        layers.append(Layer(mixer, mlp, (*weights, *more), vectors=2 * hidden + vectors + extra, scan=scan))
    return ModelShape(
        model_type="qwen3_next",
        hidden=hidden,
        vocab=vocab,
        layers=tuple(layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        embedding_parameters=vocab * hidden,
        head=Weight("lm_head", hidden, vocab, "outer"),
        vectors=hidden,
        notes=("the scan of linear attention takes time in a plan, but is no useful FLOP",),
    )


def _types(config: Mapping[str, Any]) -> list[str]:
    count = _whole(config, "num_hidden_layers")
    listed = config.get("layer_types")
    if count > 10_000:
        raise UserError(f"config.json (qwen3_next): key 'num_hidden_layers' is {count}; give at most 10,000")
    if isinstance(listed, list) and listed:
        if len(listed) != count:
            raise UserError(f"config.json (qwen3_next): layer_types has {len(listed)} entries for {count} layers")
        return [str(name) for name in listed]
    every = _whole(config, "full_attention_interval", 4)
    return ["linear_attention" if (n + 1) % every else "full_attention" for n in range(count)]


def _delta(config: Mapping[str, Any], hidden: int) -> tuple[None, Scan, list[Weight], int]:
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), by chunks: scores of keys and of queries, the triangular
    solve's two products, and per chunk the state's making, its correction and its reading."""
    keys, values = _whole(config, "linear_num_key_heads", 16), _whole(config, "linear_num_value_heads", 32)
    k, v = _whole(config, "linear_key_head_dim", 128), _whole(config, "linear_value_head_dim", 128)
    wide_k, wide_v = keys * k, values * v
    mixed = 2 * wide_k + wide_v
    weights = [
        Weight("linear_attn.in_proj_qkvz", hidden, mixed + wide_v, "attention_in"),
        Weight("linear_attn.in_proj_ba", hidden, 2 * values, "attention_in"),
        Weight("linear_attn.out_proj", wide_v, hidden, "attention_out"),
    ]
    flops = values * (2 * _CHUNK * (3 * k + 2 * v) + 6 * k * v)
    # Convolution in and out; q, k, v, their solved forms and scores once more; the output; the gated norm.
    stream = 2 * mixed + 2 * (values * k + wide_v) + mixed + 2 * values * _CHUNK + wide_v + 3 * wide_v
    scan = Scan(flops, values * k * v / _CHUNK, stream)
    return None, scan, weights, mixed * _whole(config, "linear_conv_kernel_dim", 4) + 2 * values + v


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[Attention, None, list[Weight], int]:
    heads = _whole(config, "num_attention_heads")
    kv, dim = _whole(config, "num_key_value_heads", heads), _whole(config, "head_dim", hidden // heads)
    weights = [
        Weight("self_attn.q_proj", hidden, 2 * heads * dim, "attention_in"),  # queries and their gates
        Weight("self_attn.k_proj", hidden, kv * dim, "attention_in"),
        Weight("self_attn.v_proj", hidden, kv * dim, "attention_in"),
        Weight("self_attn.o_proj", heads * dim, hidden, "attention_out"),
    ]
    return Attention(heads, kv, dim, dim), None, weights, 2 * dim


def _mlp(config: Mapping[str, Any], hidden: int, index: int) -> tuple[Mlp, list[Weight], int]:
    experts = config.get("num_experts") or 0
    every = _whole(config, "decoder_sparse_step", 1)
    if not experts or index in (config.get("mlp_only_layers") or ()) or (index + 1) % every:
        width = _whole(config, "intermediate_size")
        return Mlp(width, True), _gated("mlp.", hidden, width), 0
    experts, top_k = _whole(config, "num_experts"), _whole(config, "num_experts_per_tok")
    width, shared = _whole(config, "moe_intermediate_size"), _whole(config, "shared_expert_intermediate_size")
    weights = [
        Weight("mlp.gate", hidden, experts, "router"),
        Weight("mlp.experts.gate_up_proj", hidden, 2 * width, "mlp_in", experts, top_k),
        Weight("mlp.experts.down_proj", width, hidden, "mlp_out", experts, top_k),
        *_gated("mlp.shared_expert.", hidden, shared),
        Weight("mlp.shared_expert_gate", hidden, 1, "router"),
    ]
    return Mlp(width, True, experts, top_k, shared), weights, 0


def _gated(name: str, hidden: int, width: int) -> list[Weight]:
    return [
        Weight(f"{name}gate_proj", hidden, width, "mlp_in"),
        Weight(f"{name}up_proj", hidden, width, "mlp_in"),
        Weight(f"{name}down_proj", width, hidden, "mlp_out"),
    ]
