"""Dropout is found where a layer keeps a probability only, and is not fused away."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from headway.model.dropout import dropouts, silence
from headway.model.kernels.glu import gated_mlps_of


@pytest.mark.parametrize(
    ("family", "changes", "names"),
    [
        ("llama", {}, set()),
        ("llama", {"attention_dropout": 0.1}, {"attention_dropout"}),
        ("seed_oss", {}, {"attention_dropout", "residual_dropout"}),
        ("phi3", {"resid_pdrop": 0.1, "pad_token_id": 0}, {"p"}),
    ],
)
def test_every_probability_is_found_and_silenced(family: str, changes: dict[str, object], names: set[str]) -> None:
    settings = tiny.config(**{**changes, "model_type": family})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), attn_implementation="eager")
    assert {name for _, name in dropouts(model)} == names
    model.eval()
    plain = family != "phi3" and "residual_dropout" not in names
    assert bool(gated_mlps_of(model)) == plain, "its own forward drops out, the fused one would not"
    silence(model)
    model.train()
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
