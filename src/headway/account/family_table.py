"""The table of model families (see families.py). Each row states only what differs from a Llama layer.

`defaults` are what transformers' config class fills in when config.json leaves a key out, for keys that real files do
leave out. Sizes have no default: a forgotten hidden_size must not silently become some 7B model. The exception is
gemma3_text, whose published multimodal configs rely on the class for heads and vocabulary.
"""

from __future__ import annotations

from functools import partial

from headway.account import family_rules as rules
from headway.account.families import Experts, Family

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MTP_KEYS = {"num_mtp_layers": ("num_mtp_layers", "num_nextn_predict_layers")}
_FUSED_MLP = ("mlp.gate_up_proj", "mlp.down_proj")
_UP_DOWN = ("mlp.up_proj", "mlp.down_proj")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_ROUTED = Experts(count="n_routed_experts", shared_width=rules.shared_by_count, sparse=rules.after_first_k)
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

_Biased = partial(Family, qkv_bias="attention_bias", out_bias="attention_bias")
_LLAMA = _Biased(mlp_bias="mlp_bias")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "arcee": _Biased(mlp_bias="mlp_bias", mlp=_UP_DOWN, gated=False),
    "mistral": Family({"num_key_value_heads": 8, "sliding_window": 4096}, windows=rules.every_layer),
    "ministral3": Family({"num_key_value_heads": 8, "head_dim": 128}, windows=rules.every_layer),
    "mixtral": Family(
        {"num_key_value_heads": 8}, windows=rules.every_layer, experts=Experts("num_local_experts", "intermediate_size")
    ),
    "qwen2": Family(
        {**_QWEN_WINDOW, "num_key_value_heads": 32}, qkv_bias=True, windows=rules.split_at_max_window_layers(last=True)
    ),
    "qwen3": _Biased(
        {**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
        qk_norm="head",
        windows=rules.split_at_max_window_layers(last=True),
    ),
    "qwen2_moe": Family(
        {**_QWEN_WINDOW, "num_key_value_heads": 16, "qkv_bias": True, "decoder_sparse_step": 1},
        qkv_bias="qkv_bias",
        windows=rules.split_at_max_window_layers(last=False),
        experts=Experts(
            shared="shared_expert",
            shared_width=lambda keys: keys.number("shared_expert_intermediate_size"),
            shared_gate=True,
            sparse=rules.qwen_sparse,
        ),
    ),
    "qwen3_moe": _Biased(
        {"num_key_value_heads": 4, "sliding_window": 4096, "decoder_sparse_step": 1},
        {"num_experts": ("num_experts", "num_local_experts")},
        qk_norm="head",
        windows=rules.every_layer_if_used,
        experts=Experts(sparse=rules.qwen_sparse),
    ),
    "gemma": _Biased(
        {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "gemma2": _Biased(
        {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
        norms=4,
        windows=rules.all_but_every(2),
    ),
    "gemma3_text": _Biased(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        qk_norm="head",
        norms=4,
        windows=rules.all_but_every(6),
    ),
    "phi": Family(
        qkv_bias=True,
        out_bias=True,
        out="dense",
        qk_norm="head+bias",
        qk_norm_if="qk_layernorm",
        mlp=("mlp.fc1", "mlp.fc2"),
        gated=False,
        mlp_bias=True,
        norms=1,
        norm_vectors=2,
        parallel=True,
        head_bias=True,
    ),
    "phi3": Family(qkv=("qkv_proj",), mlp=_FUSED_MLP, windows=rules.every_layer),
    "phimoe": _Biased(
        {"num_key_value_heads": 8},
        norm_vectors=2,
        windows=rules.every_layer,
        experts=Experts("num_local_experts", "intermediate_size", router="router"),
        head_bias="lm_head_bias",
    ),
    "deepseek_v2": _Biased(
        {**_MLA, "n_shared_experts": 2},
        latent=True,
        mlp_bias="mlp_bias",
        experts=_ROUTED,
    ),
    "deepseek_v3": _Biased(
        {**_MLA, "n_shared_experts": 1, "first_k_dense_replace": 3, "num_mtp_layers": 1},
        _MTP_KEYS,
        latent=True,
        experts=_ROUTED,
        mtp="num_mtp_layers",
    ),
    "glm4_moe": Family(
        {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_mtp_layers": 1},
        _MTP_KEYS,
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=_ROUTED,
        mtp="num_mtp_layers",
    ),
    "dots1": _Biased(
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62},
        qk_norm="head",
        windows=rules.split_at_max_window_layers(last=True, used=True),
        experts=_ROUTED,
    ),
    "gpt2": Family(
        {"mlp_ratio": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True},
        {
            "hidden_size": ("hidden_size", "n_embd"),
            "num_hidden_layers": ("num_hidden_layers", "n_layer"),
            "num_attention_heads": ("num_attention_heads", "n_head"),
            "intermediate_size": ("n_inner",),
            "max_position_embeddings": ("max_position_embeddings", "n_positions"),
        },
        attention="attn",
        qkv=("c_attn",),
        out="c_proj",
        qkv_bias=True,
        out_bias=True,
        grouped=False,
        head_dim_key=False,
        mlp=("mlp.c_fc", "mlp.c_proj"),
        gated=False,
        mlp_bias=True,
        norm_vectors=2,
        positions="max_position_embeddings",
    ),
    "gpt_neox": _Biased(
        {"attention_bias": True, "use_parallel_residual": True},
        attention="attention",
        qkv=("query_key_value",),
        out="dense",
        grouped=False,
        head_dim_key=False,
        mlp=_NEOX_MLP,
        gated=False,
        mlp_bias=True,
        norm_vectors=2,
        parallel="use_parallel_residual",
    ),
    "bloom": Family(
        {"mlp_ratio": 4, "tie_word_embeddings": True},
        {
            "hidden_size": ("n_embed", "hidden_size"),
            "num_hidden_layers": ("num_hidden_layers", "n_layer"),
            "num_attention_heads": ("num_attention_heads", "n_head"),
            "intermediate_size": (),
        },
        attention="self_attention",
        qkv=("query_key_value",),
        out="dense",
        qkv_bias=True,
        out_bias=True,
        grouped=False,
        head_dim_key=False,
        mlp=_NEOX_MLP,
        gated=False,
        mlp_bias=True,
        norm_vectors=2,
        embedding_norm=True,
    ),
    "mpt": Family(
        {"mlp_ratio": 4, "tie_word_embeddings": True},
        {
            "hidden_size": ("hidden_size", "d_model"),
            "num_hidden_layers": ("num_hidden_layers", "n_layers"),
            "num_attention_heads": ("num_attention_heads", "n_heads"),
            "intermediate_size": (),
        },
        attention="attn",
        qkv=("Wqkv",),
        out="out_proj",
        grouped=False,
        head_dim_key=False,
        mlp=("ffn.up_proj", "ffn.down_proj"),
        gated=False,
    ),
    "opt": Family(
        {"enable_bias": True, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        {"intermediate_size": ("ffn_dim",)},
        out="out_proj",
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        grouped=False,
        head_dim_key=False,
        mlp=("fc1", "fc2"),
        gated=False,
        mlp_bias="enable_bias",
        norm_vectors=2,
        positions="max_position_embeddings",
        position_offset=2,
        projected_embedding=True,
    ),
    "olmo": _Biased(norm_vectors=0),
    "olmo2": _Biased(qk_norm="flat"),
    "olmo3": _Biased(
        {"sliding_window": 4096},
        qk_norm="flat",
        windows=rules.all_but_every(4),
    ),
    "olmoe": _Biased(
        qk_norm="query_hidden",
        experts=Experts(width="intermediate_size"),
    ),
    "granitemoe": _Biased(
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        experts=Experts("num_local_experts", "intermediate_size", "block_sparse_moe", "router"),
    ),
    "minimax_m2": Family(
        {"num_key_value_heads": 8, "head_dim": 128},
        qk_norm="flat",
        experts=Experts("num_local_experts", "intermediate_size"),
    ),
    "starcoder2": Family(
        {"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp=("mlp.c_fc", "mlp.c_proj"),
        gated=False,
        mlp_bias="use_bias",
        norm_vectors=2,
        windows=rules.every_layer,
    ),
    "gpt_oss": _Biased(
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "attention_bias": True},
        sinks=True,
        windows=rules.all_but_every(2),
        experts=Experts("num_local_experts", "intermediate_size", router="router", biases=True),
    ),
    "cohere": _Biased(
        {"tie_word_embeddings": True},
        qk_norm="flat",
        qk_norm_if="use_qk_norm",
        norms=1,
        parallel=True,
    ),
    "cohere2": _Biased(
        {"tie_word_embeddings": True, "sliding_window": 4096},
        norms=1,
        parallel=True,
        windows=rules.all_but_every(4),
    ),
    "stablelm": Family(
        {"num_key_value_heads": 32},
        qkv_bias="use_qkv_bias",
        head_dim_key=False,
        qk_norm="flat",
        qk_norm_if="qk_layernorm",
        norm_vectors=2,
        parallel="use_parallel_residual",
        parallel_drops_norm=True,
    ),
    "smollm3": _Biased(
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
        },
        mlp_bias="mlp_bias",
        windows=rules.smollm3_windows,
    ),
    "glm": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}, qkv_bias="attention_bias", mlp=_FUSED_MLP
    ),
    "glm4": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        qkv_bias="attention_bias",
        mlp=_FUSED_MLP,
        norms=4,
    ),
    "ernie4_5": Family(
        {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "seed_oss": Family(
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "nemotron": _Biased(
        mlp=_UP_DOWN,
        gated=False,
        mlp_bias="mlp_bias",
        norm_vectors=2,
    ),
    "exaone4": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="head",
        windows=rules.all_but_every(4),
    ),
    "llama4_text": _Biased(
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
        },
        mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        windows=rules.llama4_windows,
        experts=Experts(
            "num_local_experts",
            "intermediate_size",
            "feed_forward",
            "router",
            shared="shared_expert",
            shared_width=lambda keys: keys.number("intermediate_size"),
            sparse=rules.llama4_sparse,
            dense_width="intermediate_size_mlp",
        ),
    ),
}
