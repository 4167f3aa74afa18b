"""A model's shape from a row's sizes: a known model by its name, else a decoder of those sizes.

What a row leaves out follows one rule each: mixtures of experts from total and active parameters, hidden size from the
parameters by GPT-3's proportions, hybrids that are not known as the dense decoder of their active parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.plan.row_values import number, whole
from headway.plan.workload import model_presets, shape_of

_VOCAB = 51_200  # GPT-2's vocabulary rounded up as Megatron pads it
_ASPECT = 128  # hidden size over layers, as in GPT-3 175B (12,288 / 96)
_MOST_EXPERTS = 4096
_SIZES = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")


def row_model(row: Mapping[str, str]) -> tuple[ModelShape, list[str]]:
    """(shape, what was assumed). Raises UserError naming the column that is missing."""
    name = row.get("model", "")
    family = row.get("family", "").strip().casefold() or "dense"
    sizes = tuple(whole(row, key) for key in _SIZES)
    preset = _preset(name)
    total, active = number(row, "params_total"), number(row, "params_active")
    if preset is not None and (family != "dense" or not sizes[1]):
        shape = _preset_shape(preset, sizes[0])
        if not total or sizes[0] or 0.5 < shape.parameters / total < 2:  # else another model of a like name
            return shape, [] if sizes[0] else ["sizes from the model's name"]
    assumed: list[str] = []
    _check_heads(name, sizes)
    if family != "dense" and "moe" in family and total and active and total > 1.2 * active and sizes[0] and sizes[1]:
        return _mixture(sizes, total, active), ["experts from total and active parameters"]
    if family != "dense":
        if not (active or total or sizes[1]):
            raise UserError(f"model {name!r}: its experts are not known (family {family})")
        total = active or total
        assumed.append(f"family {family}: a dense decoder of its active parameters")
    if not sizes[1]:
        if not total:
            raise UserError(f"column hidden is blank and model {name!r} is not a preset")
        sizes = (_layers_of(total), _hidden_of(total), None, None, None, sizes[5])
        assumed.append(f"layers {sizes[0]}, hidden {sizes[1]} from params_total")
    shape, about = _dense(sizes, round(total) if total and total < 1e16 else None)
    return shape, assumed + about


def _check_heads(name: str, sizes: tuple[int | None, ...]) -> None:
    """Raises UserError where nobody could say how wide a head is."""
    hidden, heads = sizes[1], sizes[3]
    if hidden and heads and hidden % heads:
        raise UserError(f"column heads: {heads} does not divide hidden {hidden}, and model {name!r} is no preset")


def _hidden_of(total: float) -> int:
    """12 · layers · hidden² parameters with hidden = 128 · layers, on a multiple of 128."""
    return max(128, round((total * _ASPECT / 12) ** (1 / 3) / 128) * 128)


def _layers_of(total: float) -> int:
    return max(1, round(total / (12 * _hidden_of(total) ** 2)))


def _preset(name: str) -> str | None:
    """Llama3-70B, Meta-Llama-3.1-70B-Instruct, Grok1-314B-proxy and Nemotron_3_Nano are called as the presets are,
    apart from case, signs, a maker before it and what follows."""
    key = _letters(name).replace("qwen3vl", "qwen3")  # the language model of a vision model has its namesake's sizes
    names = sorted(model_presets(), key=len, reverse=True)
    for wanted in (
        key,
        re.sub(r"^(meta|nvidia|hf|mistralai|google)", "", key),
        re.sub(r"llama3[.][123]", "llama3", key),
    ):
        found = next((one for one in names if wanted.startswith(_letters(one))), None)
        if found is not None:
            return found
    return None


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.casefold())


@lru_cache(maxsize=256)
def _preset_shape(name: str, layers: int | None) -> ModelShape:
    config = dict(model_presets()[name])
    if "hybrid_override_pattern" in config:
        pattern = config["hybrid_override_pattern"]
        config["hybrid_override_pattern"] = pattern[:layers] if layers else pattern
        return shape_of(config)
    key = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
    if layers:
        config[key] = layers
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    return shape_of(config)


@lru_cache(maxsize=256)
def _mixture(sizes: tuple[int | None, ...], total: float, active: float) -> ModelShape:
    """Gated experts of the stated width (else of hidden's), every layer routed: as many as the
    parameters that a token leaves unused make, and as many a token as those it uses."""
    layers, hidden, ffn, heads, kv_heads, vocab = sizes
    assert layers and hidden
    heads = heads or max(1, hidden // 128)
    vocab = vocab or _VOCAB
    kv = kv_heads if kv_heads and heads % kv_heads == 0 else heads
    head_dim = max(1, hidden // heads)
    rest = 2 * vocab * hidden + layers * 2 * hidden * (heads + kv) * head_dim
    width = ffn if ffn and 3 * hidden * ffn * layers < total - active else hidden
    one = 3 * hidden * width * layers
    top_k = max(1, round((active - rest) / one))
    experts = max(top_k + 1, round((total - rest) / one))
    config = {
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_local_experts": min(experts, _MOST_EXPERTS),
        "num_experts_per_tok": min(top_k, _MOST_EXPERTS - 1),
        "tie_word_embeddings": False,
    }
    return ModelShape.from_config(config)


@lru_cache(maxsize=1024)
def _dense(sizes: tuple[int | None, ...], total: int | None) -> tuple[ModelShape, list[str]]:
    """A decoder of these sizes; gated or not and tied or not as comes nearest to the stated parameters."""
    layers, hidden, ffn, heads, kv_heads, vocab = sizes
    assert hidden
    assumed = []
    if not heads:
        heads = max(1, hidden // 128)
        while hidden % heads:
            heads -= 1
        assumed.append(f"heads {heads}")
    if not vocab:
        vocab = _VOCAB
        assumed.append(f"vocab {vocab}")
    if not layers:
        if not total:
            raise UserError("columns layers and params_total are blank")
        one = _shape(2, hidden, ffn, heads, kv_heads, vocab, False, True)
        layers = max(1, round((total - vocab * hidden) / one.layers[0].parameters))
        assumed.append(f"layers {layers} from params_total")
    if layers > 10_000:
        raise UserError(f"column layers: {layers} layers")
    options = [
        _shape(layers, hidden, ffn, heads, kv_heads, vocab, gated, tied)
        for gated in (bool(ffn) and ffn != 4 * hidden, False, True)
        for tied in (True, False)
    ]
    if total:
        return min(options, key=lambda shape: abs(shape.parameters - total)), assumed
    return options[0], [*assumed, "gated" if ffn and ffn != 4 * hidden else "not gated"]


def _shape(
    layers: int, hidden: int, ffn: int | None, heads: int, kv_heads: int | None, vocab: int, gated: bool, tied: bool
) -> ModelShape:
    config: dict[str, Any] = {
        "model_type": "llama" if gated else "nemotron",
        "hidden_size": hidden,
        "intermediate_size": ffn or 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if kv_heads and heads % kv_heads == 0 else heads,
        "head_dim": max(1, hidden // heads),
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return ModelShape.from_config(config)
