"""Small and default configs of every supported model family, and real models on the meta device to compare with."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

# what a family's own default leaves out or has wrong (GLM-4.5's default heads do not divide its width)
COMPLETE: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 128, "n_shared_experts": 2, "first_k_dense_replace": 1},
}

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "ffn_dim": 40,
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 4,
    "d_model": 48,
    "n_layers": 4,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
}

# traits that decide about parameters or windows; each is varied only where the family's class has it
CHOICES: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 16),
    "attention_bias": (False, True),
    "attention_out_bias": (False, True),
    "mlp_bias": (False, True),
    "use_bias": (False, True),
    "enable_bias": (False, True),
    "qkv_bias": (False, True),
    "use_qkv_bias": (False, True),
    "use_qk_norm": (False, True),
    "qk_layernorm": (False, True),
    "lm_head_bias": (False, True),
    "tie_word_embeddings": (False, True),
    "use_parallel_residual": (False, True),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], [1, 3]),
    "moe_layers": (None, [1], [0, 2, 3]),
    "interleave_moe_layer_step": (1, 2),
    "q_lora_rank": (24, None),
    "use_sliding_window": (False, True),
    "sliding_window": (3, 5),
    "attention_chunk_size": (4,),
    "max_window_layers": (0, 1, 3),
    "word_embed_proj_dim": (48, 32),
    "n_inner": (None, 72),
}
_MLA = ("deepseek_v2", "deepseek_v3")


def small_config(model_type: str, seed: int = 0, **fixed: Any) -> PreTrainedConfig:
    """A tiny config of this family with randomly chosen traits; the same for the same seed."""
    default = AutoConfig.for_model(model_type)
    has = set(default.to_dict()) | set(getattr(default, "attribute_map", {}))
    rng = random.Random(f"{model_type}-{seed}")
    values = {key: value for key, value in SMALL.items() if key in has}
    values |= {key: rng.choice(options) for key, options in CHOICES.items() if key in has}
    if model_type in _MLA:
        values["num_key_value_heads"] = values["num_attention_heads"]
        values.pop("head_dim", None)
    if model_type == "olmoe":  # its key norm is sized by hidden / heads, so another head_dim cannot run
        values.pop("head_dim", None)
    return AutoConfig.for_model(model_type, **{**values, **fixed})


def default_config(model_type: str) -> PreTrainedConfig:
    """The family's full-size default."""
    return AutoConfig.for_model(model_type, **COMPLETE.get(model_type, {}))


def on_meta(config: PreTrainedConfig) -> torch.nn.Module:
    """The real model without memory for its weights."""
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # skipped with the initialisation
    return model


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def lookups_of(model: torch.nn.Module) -> set[str]:
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
