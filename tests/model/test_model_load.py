from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.account.errors import UserError
from headway.model.forward import attention_of
from headway.model.load import (
    check_vocabulary,
    load_model,
    load_tokenizer,
    read_config,
    seeded_on_host,
    set_attention,
)
from model.tiny_models import BASE, FAMILIES, VOCAB, tiny
from model.tiny_tokenizer import tiny_tokenizer

LLAMA = BASE | FAMILIES["llama"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def states_equal(a, b):
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_come_back_in_the_asked_type(saved, name, dtype):
    model = load_model(path=saved, dtype=name)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.training and attention_of(model) == "headway"
    expected = tiny("llama").to(dtype)
    assert states_equal(model, expected)


def test_random_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = load_model(config=LLAMA, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert states_equal(first, load_model(config=LLAMA, seed=7))
    assert not states_equal(first, load_model(config=LLAMA, seed=8))


def test_a_config_may_be_a_mapping_a_file_or_a_folder(saved):
    models = [load_model(config=source) for source in (LLAMA, saved, saved / "config.json", str(saved))]
    assert all(states_equal(models[0], model) for model in models)
    assert LLAMA["model_type"] == "llama"  # the caller's mapping is left alone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of model.path and model.config"),
        ({"path": "a", "config": LLAMA}, "exactly one of model.path and model.config"),
        ({"config": LLAMA, "dtype": "float8"}, "model.dtype 'float8' is unknown"),
        ({"path": "/no/such/folder"}, "model.path /no/such/folder: no such folder"),
        ({"path": "folder"}, "model.path folder: no such folder"),
        ({"config": "./nowhere.json"}, "model.config ./nowhere.json: no such folder"),
        ({"config": {"hidden_size": 8}}, "model.config needs model_type"),
        ({"config": {"model_type": "lama"}}, "no model_type 'lama'; the nearest is llama"),
        ({"config": {"model_type": "distilbert"}}, "model.config .distilbert.: transformers has no causal"),
        (
            {"config": LLAMA | {"num_attention_heads": 5}},
            "model.config .llama.: .*not a multiple of the number of attention",
        ),
        ({"config": LLAMA, "attention": "flash"}, "model.attention flash"),
    ],
)
def test_bad_requests_are_one_line_that_names_the_key(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        load_model(**arguments)
    assert "\n" not in str(error.value)


def rewrite_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_unknown_model_type_on_disk_names_the_nearest(broken):
    rewrite_config(broken, model_type="qwen33")
    for arguments in ({"path": broken}, {"config": broken}):
        with pytest.raises(UserError, match="no model_type 'qwen33'; the nearest is qwen3"):
            load_model(**arguments)


def test_a_folder_without_config_or_safetensors_is_named(broken):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no \*\.safetensors in it \(found pytorch_model\.bin\)"):
        load_model(path=broken)
    (broken / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json in it"):
        load_model(path=broken)
    with pytest.raises(UserError, match=r"model\.config"):
        load_model(config=broken)


def test_a_config_that_is_not_json_is_named(broken):
    (broken / "config.json").write_text("{")
    for arguments in ({"path": broken}, {"config": broken}):
        with pytest.raises(UserError, match="copy: ") as error:
            load_model(**arguments)
        assert "\n" not in str(error.value)


def test_a_cut_weight_file_is_named(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"model.path {broken}: .*not fully covered"):
        load_model(path=broken)


def test_missing_weights_are_an_error_where_transformers_would_fill_in_random_ones(broken):
    from transformers import AutoModelForCausalLM

    tensors = load_file(broken / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    silent = AutoModelForCausalLM.from_pretrained(broken)  # the plant: no error here
    assert not torch.equal(silent.model.layers[1].mlp.up_proj.weight, lost)
    with pytest.raises(UserError, match=r"1 of the model's weights .* e\.g\. model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(path=broken)


def test_weights_of_another_shape_are_an_error(broken):
    rewrite_config(broken, intermediate_size=40)
    with pytest.raises(UserError, match=f"model.path {broken}"):
        load_model(path=broken)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", "headway"), ("stablelm", "sdpa"), ("lfm2", "sdpa"), ("recurrent_gemma", "sdpa"), ("bloom", "eager")],
)
def test_auto_is_headway_where_the_model_can_run_it(family, expected):
    assert attention_of(tiny(family)) == expected


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("bloom", "headway", "BloomForCausalLM computes its attention itself"),
        ("llama4", "headway", "Llama4ForCausalLM attends in chunks"),
        ("gpt_oss", "sdpa", "GptOssForCausalLM does not support.*; set model.attention=eager or auto"),
        ("gemma2", "sdpa", "Gemma2ForCausalLM does not support.*; set model.attention=eager or auto"),
    ],
)
def test_an_attention_that_the_model_cannot_run_is_an_error(family, attention, reason):
    with pytest.raises(UserError, match=f"model.attention {attention}: .*{reason}"):
        tiny(family, attention=attention)


def test_attention_can_be_changed_later():
    model = tiny("llama")
    for name in ("eager", "sdpa", "headway"):
        assert set_attention(model, name) == name == attention_of(model)


def test_a_tokenizer_loads_and_a_missing_one_is_named(saved, tmp_path):
    assert load_tokenizer(saved).chat_template
    with pytest.raises(UserError, match=r"model\.tokenizer /no/such: no such folder"):
        load_tokenizer("/no/such")
    with pytest.raises(UserError, match="no tokenizer can be loaded") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_vocabulary_larger_than_the_model_is_caught():
    model = tiny("llama")
    check_vocabulary(tiny_tokenizer(), model)
    exact = tiny_tokenizer(["<unk>", *map(str, range(VOCAB - 4)), "<pad>", "<s>", "</s>"])
    assert max(exact.get_vocab().values()) == VOCAB - 1
    check_vocabulary(exact, model)
    exact.add_tokens(["one-too-many"])
    with pytest.raises(UserError, match=f"highest token id is {VOCAB}, but the model embeds only ids 0..{VOCAB - 1}"):
        check_vocabulary(exact, model)


def test_a_config_read_keeps_its_values():
    config = read_config(LLAMA)
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("llama", 32, VOCAB)


def test_weights_drawn_on_the_host_leave_the_gpus_alone(monkeypatch):
    """`headway train` checks a model before it starts its ranks: a context of its own on GPU 0 would stay there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a GPU is asked"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda *_: pytest.fail("a GPU is asked"))
    before = torch.get_rng_state()
    with seeded_on_host(3):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    weights = [load_model(config=LLAMA, seed=5).lm_head.weight for _ in range(2)]
    assert torch.equal(*weights) and torch.equal(torch.get_rng_state(), before)
