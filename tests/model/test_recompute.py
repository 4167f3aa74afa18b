from __future__ import annotations

import pytest
import torch

from headway.account.errors import UserError
from headway.config.model import LoraConfig
from headway.model import attention
from headway.model.forward import forward_logits
from headway.model.lora import apply_lora
from headway.model.loss import loss_sum
from headway.model.recompute import set_recompute
from model.tiny_models import ATTENTION_FAMILIES, batch_of, documents, tiny

BATCH = batch_of([documents([9, 1, 17])], 29)


def step(model):
    model.zero_grad()
    loss = loss_sum(forward_logits(model, BATCH), BATCH.labels).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_gradients_are_bitwise_those_without_recompute(family):
    model = tiny(family)
    loss, gradients = step(model)
    set_recompute(model, "full")
    again, recomputed = step(model)
    assert torch.equal(loss, again)
    assert len(gradients) == len(recomputed)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_the_attention_really_runs_twice_and_gets_its_documents_both_times(monkeypatch):
    tables = []
    original = attention._attend_documents

    def counting(query, key, value, cu_seqlens, **options):
        tables.append(cu_seqlens.unique().tolist())
        return original(query, key, value, cu_seqlens, **options)

    monkeypatch.setattr(attention, "_attend_documents", counting)
    model = tiny("llama")
    for policy, calls in (("none", 2), ("full", 4), ("none", 2)):
        tables.clear()
        set_recompute(model, policy)
        step(model)
        assert tables == [[0, 9, 10, 27, 29]] * calls


def test_dropout_draws_the_same_numbers_again():
    model = tiny("llama", attention_dropout=0.5)
    torch.manual_seed(0)
    loss, gradients = step(model)
    set_recompute(model, "full")
    torch.manual_seed(0)
    again, recomputed = step(model)
    assert torch.equal(loss, again) and all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_frozen_layers_under_adapters_still_get_gradients_through():
    model = apply_lora(tiny("llama"), LoraConfig(rank=4))
    _, gradients = step(model)
    set_recompute(model, "full")
    _, recomputed = step(model)
    assert gradients and all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))


def test_unknown_policies_and_models_that_cannot_are_errors():
    model = tiny("llama")
    with pytest.raises(UserError, match="'some' is unknown"):
        set_recompute(model, "some")
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="LlamaForCausalLM cannot recompute"):
        set_recompute(model, "full")
