"""A model's shape from a row's sizes: a known model by its name, else a dense decoder of those sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from headway.account.errors import UserError
from headway.account.shape import ModelShape
from headway.plan.workload import model_presets

_VOCAB = 51_200  # GPT-2's vocabulary rounded up as Megatron pads it
_SIZES = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab")


def row_model(row: Mapping[str, str]) -> tuple[ModelShape, list[str]]:
    """(shape, what was assumed). Raises UserError naming the column that is missing.

    Mixtures of experts need a name that Headway knows (`models.json` lists the presets), because a row
    has no columns for experts; their layer count is the row's.
    """
    name = row.get("model", "")
    sizes = tuple(_whole(row.get(key, "")) for key in _SIZES)
    preset = _preset(name)
    if preset is not None and (row.get("family", "dense") != "dense" or not sizes[1]):
        return _preset_shape(preset, sizes[0]), [] if sizes[0] else ["sizes from the model's name"]
    if row.get("family", "dense") not in ("dense", ""):
        raise UserError(f"model {name!r}: its experts are not known (family {row.get('family')})")
    if not sizes[1]:
        raise UserError(f"column hidden is blank and model {name!r} is not a preset")
    total = _whole(row.get("params_total", ""))
    return _dense(sizes, total, row.get("params_total", ""))


def _preset(name: str) -> str | None:
    """Llama3-70B, Grok1-314B-proxy and DeepSeek-V3 are called as the presets are, apart from case and hyphens."""
    key = re.sub(r"[^a-z0-9.]", "", name.casefold())
    names = sorted(model_presets(), key=len, reverse=True)
    return next((one for one in names if key.startswith(re.sub(r"[^a-z0-9.]", "", one))), None)


@lru_cache(maxsize=256)
def _preset_shape(name: str, layers: int | None) -> ModelShape:
    config = dict(model_presets()[name])
    key = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
    if layers:
        config[key] = layers
        if "first_k_dense_replace" in config:
            config["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    return ModelShape.from_config(config)


@lru_cache(maxsize=1024)
def _dense(sizes: tuple[int | None, ...], total: int | None, _key: str) -> tuple[ModelShape, list[str]]:
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
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return ModelShape.from_config(config)


def _whole(text: str) -> int | None:
    try:
        value = round(float(text or 0))
    except (ValueError, OverflowError):
        return None
    return value if value > 0 else None
