from __future__ import annotations

import errno
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headway.account.errors import UserError
from headway.model import export
from headway.model.export import new_folder, save_model
from headway.model.forward import forward_logits
from headway.model.load import load_model
from model.tiny_models import ATTENTION_FAMILIES, batch_of, documents, tiny
from model.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_transformers_loads_what_was_saved_bit_for_bit(family, tmp_path):
    model = tiny(family).eval()
    save_model(model.state_dict(), model.config, tiny_tokenizer(), tmp_path / "out", dtype=torch.float32)
    batch = batch_of([documents([17])])
    # Plain transformers, without headway's attention or anything else of it.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    mine = tiny(family, attention="eager").eval()
    assert torch.equal(forward_logits(loaded.eval(), batch), forward_logits(mine, batch))
    assert torch.equal(forward_logits(load_model(path=tmp_path / "out").eval(), batch), forward_logits(model, batch))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer().chat_template


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_in_state", [True, False])
def test_tied_heads_are_saved_once_and_untied_ones_are_needed(tied, head_in_state, tmp_path):
    model = tiny("llama", tie_word_embeddings=tied)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}  # separate storage, as gathered
    if not head_in_state:
        del state["lm_head.weight"]
    if not tied and not head_in_state:
        with pytest.raises(UserError, match=r"lack lm_head\.weight"):
            save_model(state, model.config, None, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    save_model(state, model.config, None, tmp_path / "out", dtype=torch.float32)
    loaded = load_model(path=tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_weights_are_rounded_to_the_asked_type_and_the_state_is_left_alone(tmp_path):
    model = tiny("llama")
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    save_model(state, model.config, None, tmp_path / "out", dtype=torch.bfloat16)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, before[name].bfloat16())


def test_generation_settings_lie_beside(tmp_path):
    model = tiny("llama")
    settings = GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.7)
    save_model(model.state_dict(), model.config, None, tmp_path / "out", generation_config=settings)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [2, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "weights lack model.norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "hold, unlike the model, extra"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(3)}),
            "do not fit the model: .*norm.weight",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_nothing_appears(change, message, tmp_path):
    model = tiny("llama")
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(UserError, match=message):
        save_model(state, model.config, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(tmp_path):
    model = tiny("llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists already"):
        save_model(model.state_dict(), model.config, None, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    model = tiny("llama")

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "_flush", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save_model(model.state_dict(), model.config, None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_only_when_complete(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_folder(target) as folder:
        (folder / "file").write_text("x")
        assert not target.exists() and folder.parent == target.parent
    assert (target / "file").read_text() == "x" and target.stat().st_mode & 0o777 == 0o755
    assert [p.name for p in target.parent.iterdir()] == ["out"]
    with pytest.raises(RuntimeError), new_folder(tmp_path / "other") as folder:
        (folder / "file").write_text("x")
        raise RuntimeError("killed half-way")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep"]
