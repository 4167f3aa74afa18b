"""Counting a model from its real parameter names and shapes, for model types that have no exact formula."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from headway.account.errors import UserError
from headway.account.layers import Attention, Layer, Role, Weight

Shape = tuple[int, ...]

_LAYER = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.(?P<rest>.+)$")
_NUMBERED_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
_LOOKUP = re.compile(r"(^|[._])(embed|embeds|embedding|embeddings|wte|wpe|embed_in|embed_tokens\w*|embed_positions)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_head|output|output_projection)\.weight$")
_QUERY = re.compile(r"(^|[._])(q|qkv|query|q_a|q_b|c_attn|wqkv|query_key_value|qkv_proj|q_proj)($|_|\.)", re.IGNORECASE)
_NO_MATRIX = re.compile(r"bias$|norm\w*\.weight$")  # biases per expert and norms per head have two dimensions
_SOFTMAX_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_ATTENTION_OUT = {"o_proj", "out_proj", "dense", "c_proj", "wo"}
_MLP_OUT = {"down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "fc_out"}
_ALIASES = {
    "hidden_size": ("n_embd", "d_model", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k", "moe_k", "num_experts_per_token", "top_k_experts"),
}


@dataclass
class Found:
    """What the parameters show; every one of them is in exactly one place, so the counts sum up."""

    hidden: int
    vocab: int
    layers: tuple[Layer, ...] = ()
    tied: bool = False
    head: Weight | None = None
    embedding: int = 0
    vectors: int = 0  # no matrices of the language model: norms, biases, other towers
    outer: list[Weight] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def count(parameters: Mapping[str, Sequence[int]]) -> int:
    """Number of parameters; tied ones appear once in `named_parameters()` and so count once."""
    return sum(prod(shape) for shape in parameters.values())


def measure(
    config: Mapping[str, Any],
    parameters: Mapping[str, Sequence[int]],
    embeddings: Collection[str] | None = None,
    wrapped: bool = False,
) -> Found:
    """Sort every parameter into lookup table, head, layer matrix or vector.

    `wrapped`: the language model is part of a larger one, whose other towers see no text tokens.
    """
    found = Found(_number(config, "hidden_size"), _number(config, "vocab_size"))
    depth = _number(config, "num_hidden_layers")
    stack = _decoder_stack(parameters, depth)
    inside = stack.rpartition(".")[0]
    per_layer: list[dict[str, Shape]] = [{} for _ in range(depth)]
    tied_inputs = found.hidden
    for name, sizes in parameters.items():
        size = tuple(int(n) for n in sizes)
        match = _LAYER.match(name)
        if match and match["stack"] == stack:
            per_layer[int(match["index"])][match["rest"]] = size
        elif _is_head(name, size, found.vocab):
            found.head = Weight("lm_head", size[1], size[0], "outer")
        elif name in embeddings if embeddings is not None else _is_lookup(name, size, found.vocab):
            found.embedding += prod(size)
            if size[0] == found.vocab:
                tied_inputs = size[1]
        elif (wrapped and not name.startswith(f"{inside}.")) or len(size) < 2:
            found.vectors += prod(size)
        else:
            found.outer.append(Weight(name.removesuffix(".weight"), prod(size[1:]), size[0], "outer"))
    found.tied = found.head is None
    found.head = found.head or Weight("lm_head", tied_inputs, found.vocab, "outer")
    kinds = _layer_kinds(config, depth, found.notes)
    found.layers = tuple(
        _layer(config, weights, kind, found.notes) for weights, kind in zip(per_layer, kinds, strict=True)
    )
    found.notes = list(dict.fromkeys(found.notes))
    return found


def _find(config: Mapping[str, Any], key: str) -> int | None:
    for name in (key, *_ALIASES.get(key, ())):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _number(config: Mapping[str, Any], key: str) -> int:
    value = _find(config, key)
    if value is None:
        raise UserError(f"config.json ({config.get('model_type')}): key {key!r} is missing; counting needs it")
    return value


def _decoder_stack(parameters: Mapping[str, Sequence[int]], depth: int) -> str:
    """The module list with as many entries as the config has layers (the one with most weights, should two have)."""
    indices: dict[str, set[int]] = defaultdict(set)
    weight: dict[str, int] = defaultdict(int)
    for name, shape in parameters.items():
        match = _LAYER.match(name)
        if match:
            indices[match["stack"]].add(int(match["index"]))
            weight[match["stack"]] += prod(shape)
    fitting = [stack for stack, seen in indices.items() if seen == set(range(depth))]
    if not fitting:
        raise UserError(f"no stack of {depth} layers among the model's parameters; is num_hidden_layers right?")
    return max(fitting, key=lambda stack: weight[stack])


def _is_head(name: str, size: Shape, vocab: int) -> bool:
    return len(size) == 2 and size[0] == vocab and bool(_HEAD.search(name))


def _is_lookup(name: str, size: Shape, vocab: int) -> bool:
    """A table that is looked up: named like one, or with a row per token without being the head."""
    return len(size) == 2 and (size[0] == vocab or bool(_LOOKUP.search(name.removesuffix(".weight"))))


def _layer_kinds(config: Mapping[str, Any], depth: int, notes: list[str]) -> list[str]:
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) != depth:
            raise UserError(f"config.json ({config.get('model_type')}): {len(kinds)} layer_types for {depth} layers")
        return [str(kind) for kind in kinds]
    if _find(config, "sliding_window") and config.get("use_sliding_window", True):
        notes.append("the config has no layer_types; its sliding_window is taken to hold in every layer")
        return ["sliding_attention"] * depth
    return ["full_attention"] * depth


def _attention(config: Mapping[str, Any], names: Collection[str], kind: str, notes: list[str]) -> Attention | None:
    """Attention's dimensions, or None (noted) for a layer that mixes tokens in another way."""
    heads = _find(config, "num_attention_heads")
    has_query = any(_QUERY.search(name) for name in names)
    if heads is None or not has_query or kind not in _SOFTMAX_KINDS:
        notes.append(f"layers of kind {kind!r}" if has_query else "layers without a query projection")
        notes[-1] += " are counted by their matrices only"
        return None
    dim = _find(config, "head_dim") or _number(config, "hidden_size") // heads
    nope, rope = _find(config, "qk_nope_head_dim"), _find(config, "qk_rope_head_dim")
    window = _find(config, "sliding_window") if config.get("use_sliding_window", True) else None
    return Attention(
        heads=heads,
        kv_heads=_find(config, "num_key_value_heads") or heads,
        qk_dim=nope + rope if nope is not None and rope is not None else dim,
        v_dim=_find(config, "v_head_dim") or dim,
        window=window if kind == "sliding_attention" else None,
        chunk=_find(config, "attention_chunk_size") if kind == "chunked_attention" else None,
    )


def _layer(config: Mapping[str, Any], parameters: Mapping[str, Shape], kind: str, notes: list[str]) -> Layer:
    held, top_k = _find(config, "experts"), _find(config, "top_k")
    weights: list[Weight] = []
    vectors = 0
    numbered: dict[str, list[Shape]] = defaultdict(list)
    for name, size in parameters.items():
        if len(size) < 2 or _NO_MATRIX.search(name):
            vectors += prod(size)
        elif _NUMBERED_EXPERT.search(name):
            numbered[_NUMBERED_EXPERT.sub(r"\1experts.", name)].append(size)
        elif copies := _stacked_experts(name, size, held):
            weights.append(_expert(name, copies, prod(size) // copies, held, top_k, notes))
        else:
            weights.append(Weight(name.removesuffix(".weight"), prod(size[1:]), size[0], _role(name)))
    for name, sizes in numbered.items():
        weights.append(_expert(name, len(sizes), prod(sizes[0]), held, top_k, notes))
    return Layer(_attention(config, parameters, kind, notes), None, tuple(weights), vectors)


def _stacked_experts(name: str, size: Shape, held: int | None) -> int:
    """How many experts one parameter holds: its first dimension, or (DBRX) a multiple of them; 0 for no experts."""
    if len(size) == 3 and size[1] != 1 and ("experts" in name.split(".") or size[0] == held):
        return size[0]
    return held if held and "experts" in name.split(".") and size[0] % held == 0 else 0


def _expert(name: str, copies: int, each: int, held: int | None, top_k: int | None, notes: list[str]) -> Weight:
    if top_k is None or (held is not None and held != copies):
        notes.append(f"{name}: {copies} experts without a top-k in the config are all counted as active")
        top_k = copies
    return Weight(name.removesuffix(".weight"), each, 1, _role(name), copies, min(top_k, copies))


def _role(name: str) -> Role:
    """Place in the layer's flow by common names; only LoRA's first adapted layer depends on it."""
    *path, last = name.removesuffix(".weight").split(".")
    if last in ("gate", "router") and "experts" not in path:
        return "router"
    if any("attn" in part or "attention" in part for part in path):
        if last in _ATTENTION_OUT:
            return "attention_out"
        return "attention_mid" if last in ("q_b_proj", "kv_b_proj") else "attention_in"
    return "mlp_out" if last in _MLP_OUT else "mlp_in"
