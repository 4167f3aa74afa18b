from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from headway.account.errors import UserError
from headway.config.model import LoraConfig
from headway.model.export import save_model
from headway.model.forward import attention_of, forward_logits
from headway.model.isolation import prove_isolation
from headway.model.load import load_model
from headway.model.lora import apply_lora, lora_state, merge_lora, save_adapter
from headway.model.loss import loss_sum
from model.tiny_models import batch_of, documents, tiny

BATCH = batch_of([documents([9, 1, 17])], 29)


def adapted(lora=None, dtype="float32", family="llama", train=True, **changes):
    lora = lora or LoraConfig(rank=4, alpha=12.0)
    model = apply_lora(tiny(family, dtype=dtype, **changes), lora)
    if train:  # adapters start as no change at all
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2
    return model


def test_adapters_start_as_no_change_and_only_they_train():
    plain, model = tiny("llama"), adapted(train=False)
    assert torch.equal(forward_logits(model, BATCH), forward_logits(plain, BATCH))
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    assert {name.split(".")[-4] for name in trainable} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert model.training and attention_of(model) == "headway"
    loss_sum(forward_logits(model, BATCH), BATCH.labels).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_start_depends_on_the_seed_alone():
    state = torch.get_rng_state()
    a, b, c = (apply_lora(tiny("llama"), LoraConfig(rank=4), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    first, second, third = (lora_state(model) for model in (a, b, c))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], third[name]) for name in first)


def test_documents_stay_apart_under_adapters():
    report = prove_isolation(adapted())
    assert report.conclusive and report.attention == "headway"


def test_adapters_of_a_bfloat16_model_are_float32():
    model = adapted(dtype="bfloat16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert forward_logits(model, BATCH).dtype == torch.bfloat16


def test_targets_can_be_listed_and_unknown_ones_are_an_error():
    model = adapted(LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    assert {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match=r"model\.lora\.targets \['query'\]"):
        apply_lora(tiny("llama"), LoraConfig(targets=["query"]))


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("qwen3_moe", {})]
)
def test_merged_weights_compute_what_adapter_and_base_compute(family, changes, tmp_path):
    """gpt2 keeps its matrices transposed; the experts of qwen3_moe are one tensor, which PEFT adapts too."""
    lora = LoraConfig(rank=4, alpha=12.0)
    model = adapted(lora, family=family, **changes).eval()
    state = dict(model.state_dict())
    before = {name: tensor.clone() for name, tensor in state.items()}
    merged = merge_lora(state, model.config, lora)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())  # a live model's own tensors
    save_model(merged, model.config, None, tmp_path / "out", dtype=torch.float32)
    loaded = load_model(path=tmp_path / "out").eval()
    expected = forward_logits(model, BATCH)
    assert torch.allclose(forward_logits(loaded, BATCH), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(forward_logits(tiny(family, **changes).eval(), BATCH), expected, atol=1e-2)
    wrong = merge_lora(state, model.config, lora.model_copy(update={"alpha": 6.0}))
    save_model(wrong, model.config, None, tmp_path / "wrong", dtype=torch.float32)
    planted = forward_logits(load_model(path=tmp_path / "wrong").eval(), BATCH)
    assert not torch.allclose(planted, expected, atol=1e-2)


def test_merging_weights_that_are_not_finite_is_an_error():
    lora = LoraConfig(rank=4)
    model = adapted(lora)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    next(tensor for name, tensor in state.items() if "lora_B" in name)[0, 0] = float("nan")
    with pytest.raises(UserError, match="adapters cannot be merged"):
        merge_lora(state, model.config, lora)


def test_peft_loads_the_saved_adapter(tmp_path):
    model = adapted().eval()
    save_adapter(model, tmp_path / "adapter")
    assert model.peft_config["default"].inference_mode is False
    loaded = PeftModel.from_pretrained(tiny("llama"), tmp_path / "adapter").eval()
    assert torch.equal(forward_logits(loaded, BATCH), forward_logits(model, BATCH))
    with pytest.raises(UserError, match="exists already"):
        save_adapter(model, tmp_path / "adapter")


def test_an_adapter_is_saved_from_a_gathered_state_too(tmp_path):
    model = adapted()
    gathered = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
    save_adapter(model, tmp_path / "adapter", gathered)
    loaded = lora_state(PeftModel.from_pretrained(tiny("llama"), tmp_path / "adapter"))
    mine = lora_state(model)
    assert loaded.keys() == mine.keys() and all(torch.equal(loaded[name], mine[name] * 2) for name in mine)
