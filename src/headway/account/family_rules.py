"""Which layers of a family have a window, and which are mixtures of experts: the rules the family table names."""

from __future__ import annotations

from headway.account.config_keys import Keys
from headway.account.errors import UserError
from headway.account.families import Window, WindowRule


def every_layer(keys: Keys, layer: int, count: int) -> Window:
    return keys.optional("sliding_window"), None


def every_layer_if_used(keys: Keys, layer: int, count: int) -> Window:
    return (keys.optional("sliding_window") if keys.flag("use_sliding_window") else None), None


def _declared(keys: Keys, layer: int, count: int) -> str | None:
    """This layer's entry in `layer_types`, where the config has one."""
    kinds = keys.listing("layer_types")
    if kinds is None:
        return None
    if len(kinds) < count:
        raise UserError(f"config.json ({keys.model_type}): layer_types has {len(kinds)} entries for {count} layers")
    if kinds[layer] not in ("full_attention", "sliding_attention", "chunked_attention"):
        raise UserError(f"config.json ({keys.model_type}): layer_types[{layer}] is {kinds[layer]!r}; not an attention")
    return str(kinds[layer])


def split_at_max_window_layers(last: bool, used: bool | str = "use_sliding_window") -> WindowRule:
    """Windows in the `last` layers, from max_window_layers on (Qwen2/3), or every other one before it (Qwen2-MoE)."""

    def window(keys: Keys, layer: int, count: int) -> Window:
        if not keys.flag(used):
            return None, None
        bound = keys.number("max_window_layers", minimum=0)
        default = layer >= bound if last else layer < bound and layer % 2 == 0
        kind = _declared(keys, layer, count)
        sliding = kind == "sliding_attention" if kind else default
        return (keys.optional("sliding_window") if sliding else None), None

    return window


def all_but_every(every: int) -> WindowRule:
    """Every `every`-th layer sees everything, the others a window; old files name the period."""

    def window(keys: Keys, layer: int, count: int) -> Window:
        kind = _declared(keys, layer, count)
        if kind is None:
            full = (layer + 1) % (keys.optional("sliding_window_pattern") or every) == 0
        else:
            full = kind == "full_attention"
        return (None if full else keys.optional("sliding_window")), None

    return window


def smollm3_windows(keys: Keys, layer: int, count: int) -> Window:
    if not keys.flag("use_sliding_window"):
        return None, None
    kind = _declared(keys, layer, count)
    sliding = kind == "sliding_attention" if kind else not _has_rope(keys, layer)
    return (keys.optional("sliding_window") if sliding else None), None


def llama4_windows(keys: Keys, layer: int, count: int) -> Window:
    kind = _declared(keys, layer, count) or ("chunked_attention" if _has_rope(keys, layer) else "full_attention")
    return None, (keys.optional("attention_chunk_size") if kind == "chunked_attention" else None)


def _has_rope(keys: Keys, layer: int) -> bool:
    """`no_rope_layers` holds 1 where rotary positions are *used*."""
    listed = keys.listing("no_rope_layers")
    return bool(listed[layer]) if listed else (layer + 1) % keys.number("no_rope_layer_interval") != 0


def qwen_sparse(keys: Keys, layer: int) -> bool:
    dense = keys.listing("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % keys.number("decoder_sparse_step") == 0


def after_first_k(keys: Keys, layer: int) -> bool:
    return layer >= (keys.optional("first_k_dense_replace", minimum=0) or 0)


def llama4_sparse(keys: Keys, layer: int) -> bool:
    listed, step = keys.listing("moe_layers"), keys.number("interleave_moe_layer_step")
    return layer in listed if listed is not None else (layer + 1) % step == 0


def shared_by_count(keys: Keys) -> int:
    return (keys.optional("n_shared_experts", minimum=0) or 0) * keys.number("moe_intermediate_size")
