"""Hybrids of Mamba-2, attention and (routed) MLP blocks: Nemotron-H's config.json as a shape.

A layer is one block: of `hybrid_override_pattern` (M Mamba-2, * attention, - MLP, E experts) or, as transformers 5
writes it, of `layers_block_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headway.account.errors import UserError
from headway.account.layers import Attention, Layer, Mlp, Scan, Weight
from headway.account.shape import ModelShape
from headway.plan.hybrid_keys import refuse_missing, whole

HYBRIDS = ("nemotron_h",)
_FAMILY = "nemotron_h"
_NEEDED = ("hidden_size", "vocab_size", "num_attention_heads")
_NAMES = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_whole = partial(whole, _FAMILY)


def hybrid_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of such a config. Raises UserError naming a missing or impossible key, and an unknown block."""
    refuse_missing(_FAMILY, config, _NEEDED)
    hidden, vocab = _whole(config, "hidden_size"), _whole(config, "vocab_size")
    made = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}
    kinds: dict[str, Layer] = {}
    layers = []
    for sign in _pattern(config):
        if sign not in made:
            raise UserError(f"config.json (nemotron_h): the layer pattern holds {sign!r}; nearest: M, *, -, E")
        if sign not in kinds:
            kinds[sign] = made[sign](config, hidden)
        layers.append(kinds[sign])
    return ModelShape(
        model_type="nemotron_h",
        hidden=hidden,
        vocab=vocab,
        layers=tuple(layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        embedding_parameters=vocab * hidden,
        head=Weight("lm_head", hidden, vocab, "outer"),
        vectors=hidden,
        notes=("the scan of Mamba blocks takes time in a plan, but is no useful FLOP",),
    )


def _pattern(config: Mapping[str, Any]) -> list[str]:
    listed, text = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if isinstance(listed, list) and listed:
        return [_NAMES.get(str(name), str(name)) for name in listed]
    if not isinstance(text, str) or not text:
        raise UserError("config.json (nemotron_h): key 'hybrid_override_pattern' is missing; the size needs it")
    return list(text)


def _mamba(config: Mapping[str, Any], hidden: int) -> Layer:
    heads, dim = _whole(config, "mamba_num_heads", 128), _whole(config, "mamba_head_dim", 64)
    groups, state = _whole(config, "n_groups", 8), _whole(config, "ssm_state_size", 128)
    inner, mixed = heads * dim, heads * dim + 2 * groups * state
    weights = (
        Weight("mixer.in_proj", hidden, inner + mixed + heads, "mlp_in"),
        Weight("mixer.out_proj", inner, hidden, "mlp_out"),
    )
    convolution = mixed * (_whole(config, "conv_kernel", 4) + 1)  # its kernel and bias
    scan = _mamba_scan(heads, dim, groups, state, _whole(config, "chunk_size", 128))
    return Layer(None, None, weights, vectors=hidden + convolution + 3 * heads + inner, scan=scan)


def _mamba_scan(heads: int, dim: int, groups: int, state: int, chunk: int) -> Scan:
    """State-space duality by chunks (Dao and Gu 2024, arXiv 2405.21060, section 6): inside a chunk scores of C and B
    and their product with x, between chunks the states' making and reading.

    Streams: convolution in and out; x and B for the states; B and C and their scores; x, z, C and scores for the
    output; the output; and the gated norm's two inputs and one output.
    """
    inner, groups_state = heads * dim, groups * state
    flops = 2 * chunk * groups_state + 2 * chunk * inner + 4 * inner * state
    mixed, scores = inner + 2 * groups_state, 2 * groups * chunk
    stream = 2 * mixed + 7 * inner + 4 * groups_state + 2 * scores
    return Scan(flops, inner * state / chunk, stream)


def _attention(config: Mapping[str, Any], hidden: int) -> Layer:
    heads = _whole(config, "num_attention_heads")
    kv, dim = _whole(config, "num_key_value_heads", heads), _whole(config, "head_dim", hidden // heads)
    weights = (
        Weight("mixer.q_proj", hidden, heads * dim, "attention_in"),
        Weight("mixer.k_proj", hidden, kv * dim, "attention_in"),
        Weight("mixer.v_proj", hidden, kv * dim, "attention_in"),
        Weight("mixer.o_proj", heads * dim, hidden, "attention_out"),
    )
    return Layer(Attention(heads, kv, dim, dim), None, weights, vectors=hidden)


def _mlp(config: Mapping[str, Any], hidden: int) -> Layer:
    width = _whole(config, "intermediate_size")
    weights = (
        Weight("mixer.up_proj", hidden, width, "mlp_in"),
        Weight("mixer.down_proj", width, hidden, "mlp_out"),
    )
    return Layer(None, Mlp(width, gated=False), weights, vectors=hidden)


def _experts(config: Mapping[str, Any], hidden: int) -> Layer:
    experts, top_k = _whole(config, "n_routed_experts"), _whole(config, "num_experts_per_tok")
    width = _whole(config, "moe_intermediate_size")
    shared = _whole(config, "n_shared_experts", 1) * _whole(config, "moe_shared_expert_intermediate_size", width)
    inside = _whole(config, "moe_latent_size") if config.get("moe_latent_size") else hidden
    weights = [
        Weight("mixer.gate", hidden, experts, "router"),
        Weight("mixer.experts.up_proj", inside, width, "mlp_in", experts, top_k),
        Weight("mixer.experts.down_proj", width, inside, "mlp_out", experts, top_k),
        Weight("mixer.shared_experts.up_proj", hidden, shared, "mlp_in"),
        Weight("mixer.shared_experts.down_proj", shared, hidden, "mlp_out"),
    ]
    if inside != hidden:  # experts work in a narrower space
        weights += [
            Weight("mixer.fc1_latent_proj", hidden, inside, "mlp_in"),
            Weight("mixer.fc2_latent_proj", inside, hidden, "mlp_out"),
        ]
    return Layer(None, Mlp(width, False, experts, top_k, shared), tuple(weights), vectors=hidden)
