"""Tiny models of every tested family, and batches of documents made from lengths."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.data.batch import IGNORE, PADDING_DOC, Batch
from headway.model.load import load_model

VOCAB = 131  # prime: not a multiple of 8

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # at the usual 0.02 a random model hardly looks at its context
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

FAMILIES = {
    "llama": {"model_type": "llama"},
    "llama_hd80": {
        "model_type": "llama", "head_dim": 80, "hidden_size": 33,
        "num_attention_heads": 3, "num_key_value_heads": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 64},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **MOE},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 8,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "query_pre_attn_scalar": 16,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": 16},
    "gpt_oss": {
        "model_type": "gpt_oss", "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    },
}  # fmt: skip

ATTENTION_FAMILIES = list(FAMILIES)
"""Those that train packed under the `headway` attention."""

FAMILIES |= {
    "stablelm": {"model_type": "stablelm"},
    "llama4": {
        "model_type": "llama4_text", "head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2,
        "intermediate_size_mlp": 32,
    },
    "bloom": {"model_type": "bloom", "n_head": 4},
    "jamba": {
        "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, **MOE,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {
        "model_type": "recurrent_gemma", "num_hidden_layers": 3, "head_dim": 16, "lru_width": 32,
        "attention_window_size": 8,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2,
        "chunk_size": 16,
    },
}  # fmt: skip


def tiny(family: str, *, attention: str = "auto", dtype: str = "float32", seed: int = 0, **changes):
    return load_model(config=BASE | FAMILIES[family] | changes, attention=attention, dtype=dtype, seed=seed)


def documents(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def batch_of(rows: list[list[Tensor]], width: int | None = None, *, packed: bool | None = None) -> Batch:
    """The obvious construction, token by token: rows of documents, each row padded to `width`."""
    width = width or max(sum(map(len, row)) for row in rows)
    packed = len(rows) == 1 if packed is None else packed
    ids, labels, positions, bounds, owners, lengths = [], [], [], [0], [], []
    for row in rows:
        for document in row:
            ids += document.tolist()
            labels += [*document.tolist()[1:], IGNORE]
            positions += range(len(document))
            bounds.append(bounds[-1] + len(document))
            owners.append(len(lengths))
            lengths.append(len(document))
        padding = width - sum(map(len, row))
        if padding:
            ids += [0] * padding
            labels += [IGNORE] * padding
            positions += range(padding)
            bounds.append(bounds[-1] + padding)
            owners.append(PADDING_DOC)
    shape = (len(rows), width)
    return Batch(
        input_ids=torch.tensor(ids).view(shape),
        labels=torch.tensor(labels).view(shape),
        position_ids=torch.tensor(positions).view(shape),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=int(np.diff(bounds).max()),
        packed=packed,
        documents=np.array(owners, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        tokens=sum(lengths),
        trained_tokens=sum(label != IGNORE for label in labels),
    )
