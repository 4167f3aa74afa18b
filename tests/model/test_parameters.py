from __future__ import annotations

import torch
from torch import nn

from headway.config.model import LoraConfig
from headway.model.lora import apply_lora
from headway.model.parameters import decay_groups, parameter_roles
from model.tiny_models import tiny


def test_norms_by_the_type_of_their_module_and_biases_do_not_decay():
    model = tiny("qwen3", attention_bias=True, tie_word_embeddings=True)
    groups = decay_groups(model)
    assert sorted(groups.decay + groups.no_decay) == sorted(name for name, _ in model.named_parameters())
    assert set(groups.decay) & set(groups.no_decay) == set()
    assert {name.split(".", 3)[-1] for name in groups.no_decay if "layers.0" in name} == {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight",
        *(f"self_attn.{x}_proj.bias" for x in "qkvo"),
    }  # fmt: skip
    assert "model.norm.weight" in groups.no_decay
    assert "model.embed_tokens.weight" in groups.decay and "lm_head.weight" not in groups.decay  # tied: once


def test_roles_name_embedding_head_and_matrices():
    roles = parameter_roles(tiny("llama"))
    assert roles["model.embed_tokens.weight"] == "embedding" and roles["lm_head.weight"] == "head"
    assert {role for name, role in roles.items() if "proj" in name} == {"matrix"}


def test_gpt2_layer_norms_and_sinks_and_experts():
    roles = parameter_roles(tiny("gpt2"))
    assert roles["transformer.h.0.ln_1.weight"] == roles["transformer.h.0.ln_1.bias"] == "norm"
    assert roles["transformer.h.0.attn.c_attn.bias"] == "bias" and roles["transformer.wpe.weight"] == "embedding"
    roles = parameter_roles(tiny("gpt_oss"))
    assert roles["model.layers.0.self_attn.sinks"] == "other"
    assert roles["model.layers.0.mlp.experts.gate_up_proj_bias"] == "bias"
    assert roles["model.layers.0.mlp.experts.gate_up_proj"] == "matrix"


class Odd(nn.Module):
    """What deciding by names or by dimensions alone gets wrong."""

    def __init__(self):
        super().__init__()
        self.normalize = nn.Linear(3, 3)  # a matrix with a misleading name
        self.scale_by = nn.LayerNorm((2, 3))  # a norm whose weight has two dimensions


def test_names_and_dimensions_do_not_decide():
    assert parameter_roles(Odd()) == {
        "normalize.weight": "matrix", "normalize.bias": "bias", "scale_by.weight": "norm", "scale_by.bias": "norm",
    }  # fmt: skip


def test_frozen_parameters_belong_to_no_group_and_adapters_decay():
    model = apply_lora(tiny("llama"), LoraConfig(rank=2))
    groups = decay_groups(model)
    assert groups.no_decay == [] and groups.decay == [n for n, p in model.named_parameters() if p.requires_grad]
    assert torch.tensor([len(groups.decay)]).item() == 2 * 7 * 2
