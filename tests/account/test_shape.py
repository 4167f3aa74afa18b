"""ModelShape against the real models of transformers: every family, full size and small with varied traits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from account.shape_models import COMPLETE, default_config, lookups_of, on_meta, shapes_of, small_config
from headway.account import family_table
from headway.account.errors import UserError
from headway.account.family_table import FAMILIES
from headway.account.flops import attended_pairs
from headway.account.shape import ModelShape

FAMILY_NAMES = sorted(FAMILIES)
DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def check_exact(config: dict[str, Any], model: Any) -> None:
    """The one check: as many parameters as the model has, and as many multiplied weights as its matrices show."""
    shape = ModelShape.from_config(config)
    assert shape.parameters == model.num_parameters()
    real = ModelShape.measured(config, shapes_of(model), lookups_of(model))
    assert (shape.matmul_parameters, shape.active_matmul_parameters) == (
        real.matmul_parameters,
        real.active_matmul_parameters,
    )


def test_at_least_fourteen_families() -> None:
    required = "llama qwen2 qwen3 qwen3_moe qwen2_moe gemma gemma2 gemma3_text mistral mixtral phi3 deepseek_v3 gpt2"
    assert {*required.split(), "gpt_neox", "olmo2", "granite", "starcoder2", "gpt_oss"} <= set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_full_size_default(model_type: str) -> None:
    config = default_config(model_type)
    model = on_meta(config)
    check_exact(config.to_dict(), model)
    # what save_pretrained writes leaves out keys that equal the library's defaults
    assert ModelShape.from_config(config.to_diff_dict()).parameters == model.num_parameters()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_small_with_varied_traits(model_type: str, seed: int) -> None:
    config = small_config(model_type, seed)
    model = on_meta(config)
    check_exact(config.to_dict(), model)
    guessed = ModelShape.measured(config.to_dict(), shapes_of(model))
    assert guessed.parameters == model.num_parameters()
    assert guessed.matmul_parameters == ModelShape.from_config(config.to_dict()).matmul_parameters


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_left_out_keys_mean_what_the_class_says(model_type: str) -> None:
    """Every default in the table, one by one: drop the key, and the class must build the same model."""
    full = default_config(model_type).to_dict()
    for per_layer in ("layer_types", "no_rope_layers", "moe_layers"):
        full.pop(per_layer, None)
    family = FAMILIES[model_type]
    layers = family.aliases.get("num_hidden_layers", ("num_hidden_layers",))[-1]
    for key in set(family.defaults) - {"mlp_ratio", *COMPLETE.get(model_type, {})}:
        names = {key, *family.aliases.get(key, ())}
        without = {name: value for name, value in full.items() if name not in names | {"model_type"}}
        without[layers] = full[layers] if key == "max_window_layers" else 5
        config = AutoConfig.for_model(model_type, **without)
        mine = ModelShape.from_config({**without, "model_type": model_type})
        assert mine.parameters == on_meta(config).num_parameters(), key
        assert mine.attention_kinds == ModelShape.from_config(config.to_dict()).attention_kinds, key
        assert mine.mtp_layers == ModelShape.from_config(config.to_dict()).mtp_layers, key


WINDOWED = [
    ("mistral", {}),
    ("mixtral", {}),
    ("phi3", {}),
    ("starcoder2", {}),
    ("ministral3", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
    ("qwen3_moe", {"use_sliding_window": True}),
    ("dots1", {"max_window_layers": 2}),
    ("gemma2", {}),
    ("gemma3_text", {"num_hidden_layers": 7}),
    ("gpt_oss", {}),
    ("cohere2", {}),
    ("olmo3", {}),
    ("exaone4", {}),
    ("smollm3", {"use_sliding_window": True}),
    ("llama4_text", {}),
    ("llama", {}),
    ("deepseek_v3", {}),
]


@pytest.mark.parametrize(("model_type", "fixed"), WINDOWED)
def test_windows_are_those_the_real_attention_has(model_type: str, fixed: dict[str, Any]) -> None:
    """Count the non-zero attention weights of the running model, layer by layer."""
    config = small_config(model_type, **fixed)
    shape = ModelShape.from_config(config.to_dict())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    length = 13
    with torch.no_grad():
        found = model(input_ids=torch.arange(length)[None] + 3, output_attentions=True, use_cache=False).attentions
    seen = [int((weights[0, 0, :, :length] != 0).sum()) for weights in found]
    said = []
    for layer in shape.layers:
        assert layer.attention is not None
        said.append(attended_pairs([length], layer.attention.window, layer.attention.chunk))
    assert said == seen


def test_attention_dimensions_of_grouped_and_latent_heads() -> None:
    grouped = ModelShape.from_config(DENSE).layers[0].attention
    assert grouped is not None and (grouped.heads, grouped.kv_heads, grouped.qk_dim, grouped.v_dim) == (4, 2, 16, 16)
    latent = ModelShape.from_config(default_config("deepseek_v3").to_dict()).layers[0].attention
    assert latent is not None and (latent.heads, latent.qk_dim, latent.v_dim, latent.kv_rank) == (128, 192, 128, 512)


def test_deepseek_v3_counts_what_its_report_says() -> None:
    """671B in all, 37B active (arXiv 2412.19437); its MTP layer is not in the model class."""
    shape = ModelShape.from_config(default_config("deepseek_v3").to_dict())
    assert round(shape.parameters / 1e9) == 671
    assert round((shape.active_matmul_parameters + shape.embedding_parameters) / 1e9) in (37, 38)
    assert shape.mtp_layers == 1


def test_tied_head_is_multiplied_but_stored_once() -> None:
    untied = ModelShape.from_config({**DENSE, "tie_word_embeddings": False})
    tied = ModelShape.from_config({**DENSE, "tie_word_embeddings": True})
    assert untied.parameters - tied.parameters == 64 * 128
    assert untied.matmul_parameters == tied.matmul_parameters


def test_published_multimodal_config_that_relies_on_its_class() -> None:
    """google/gemma-3-4b-it's text_config names neither heads nor vocabulary."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    shape = ModelShape.from_config(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    )
    assert shape.parameters == on_meta(AutoConfig.for_model(**text)).num_parameters()
    assert [kind.window for kind, _ in shape.attention_kinds] == [1024, None]
    assert "text part of 'gemma3' only" in shape.notes[0]


def test_wrapper_decides_about_tying() -> None:
    wrapped = {"model_type": "llava", "tie_word_embeddings": True, "text_config": DENSE}
    assert ModelShape.from_config(wrapped).tied and not ModelShape.from_config(DENSE).tied


def test_other_towers_of_a_measured_wrapper_are_not_multiplied_with_text() -> None:
    text = {**DENSE, "model_type": "some_new_text"}
    inner = shapes_of(on_meta(AutoConfig.for_model(**DENSE)))
    parameters = {name.replace("model.", "model.language_model."): shape for name, shape in inner.items()}
    parameters |= {f"model.vision_tower.layers.{i}.fc.weight": (500, 500) for i in range(3)}
    shape = ModelShape.measured({"model_type": "some_new", "text_config": text}, parameters)
    assert shape.matmul_parameters == ModelShape.from_config(DENSE).matmul_parameters
    assert shape.parameters == ModelShape.from_config(DENSE).parameters + 3 * 500 * 500


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_missing_size_names_the_key(key: str) -> None:
    with pytest.raises(UserError, match=f"llama.*{key!r} is missing"):
        ModelShape.from_config({name: value for name, value in DENSE.items() if name != key})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "'hidden_size' is '64'"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"hidden_size": 66}, "hidden_size=66 does not divide by num_attention_heads=4; nearest sizes: 64, 68"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide into num_key_value_heads=3"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes'; give true or false"),
        ({"model_type": "lama"}, "'lama' has no exact shape; nearest supported: .*llama"),
        ({"model_type": None}, "None has no exact shape"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "no causal model"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 entries for 2 layers",
        ),
        ({"model_type": "gemma2", "layer_types": ["mamba", "full_attention"]}, r"layer_types\[0\] is 'mamba'"),
        ({"model_type": "qwen2", "layer_types": "full", "use_sliding_window": True}, "give a list"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 of"),
    ],
)
def test_bad_config_is_one_line_that_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        ModelShape.from_config({**DENSE, **change})
    assert "\n" not in str(error.value)


def test_unknown_family_is_counted_from_its_matrices() -> None:
    config = AutoConfig.for_model("apertus", hidden_size=48, intermediate_size=64, num_hidden_layers=2, vocab_size=99)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = 12
    model = on_meta(config)
    with pytest.raises(UserError, match="apertus"):
        ModelShape.from_config(config.to_dict())
    shape = ModelShape.of_model(config.to_dict(), shapes_of(model))
    assert (shape.source, shape.parameters) == ("parameters", model.num_parameters())
    assert shape.matmul_parameters == sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def test_recurrent_layers_of_a_hybrid_are_noted() -> None:
    config = {**DENSE, "model_type": "jamba", "num_hidden_layers": 2}
    parameters = {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.mamba.in_proj.weight": (256, 64),
        "model.layers.0.mamba.conv1d.weight": (128, 1, 4),
        "model.layers.1.self_attn.q_proj.weight": (64, 64),
        "lm_head.weight": (128, 64),
    }
    shape = ModelShape.measured(config, parameters)
    assert [layer.attention is None for layer in shape.layers] == [True, False]
    assert shape.matmul_parameters == 256 * 64 + 128 * 4 + 64 * 64 + 128 * 64
    assert "without a query projection" in shape.notes[0]


def test_of_model_believes_the_parameters_where_the_config_is_wrong() -> None:
    model = on_meta(AutoConfig.for_model(**DENSE))
    assert ModelShape.of_model(DENSE, shapes_of(model)).source == "config"
    wrong = {**DENSE, "intermediate_size": 100}
    shape = ModelShape.of_model(wrong, shapes_of(model))
    assert (shape.source, shape.parameters) == ("parameters", model.num_parameters())


def test_numbered_experts_and_unknown_top_k() -> None:
    stack = {f"model.layers.0.mlp.experts.{i}.up.weight": (10, 64) for i in range(4)}
    parameters = {"model.embed_tokens.weight": (128, 64), **stack, "model.layers.0.mlp.gate.weight": (4, 64)}
    config = {**DENSE, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    shape = ModelShape.measured(config, parameters)
    assert shape.matmul_parameters - shape.active_matmul_parameters == 2 * 10 * 64
    unknown = ModelShape.measured({**config, "num_experts_per_tok": None}, parameters)
    assert unknown.matmul_parameters == unknown.active_matmul_parameters
    assert any("all counted as active" in note for note in unknown.notes)


# --- planted faults: each must be caught by check_exact or the window test ---


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        ("qwen2", {"qkv_bias": False}),
        ("qwen3", {"qk_norm": ""}),
        ("gemma2", {"norms": 2}),
        ("gpt_oss", {"sinks": False}),
        ("phi", {"head_bias": False}),
        ("gpt2", {"positions": ""}),
        ("qwen2_moe", {"experts": replace(FAMILIES["qwen2_moe"].experts, shared_gate=False)}),  # type: ignore[type-var]
        ("deepseek_v3", {"experts": replace(FAMILIES["deepseek_v3"].experts, sparse=lambda keys, layer: True)}),  # type: ignore[type-var]
        ("llama", {"gated": False, "mlp": ("mlp.up_proj", "mlp.down_proj")}),  # Megatron-LM 682: a plain MLP assumed
    ],
)
def test_wrong_family_row_is_caught(monkeypatch: pytest.MonkeyPatch, model_type: str, fault: dict[str, Any]) -> None:
    config = default_config(model_type)
    model = on_meta(config)
    check_exact(config.to_dict(), model)
    monkeypatch.setitem(family_table.FAMILIES, model_type, replace(FAMILIES[model_type], **fault))
    with pytest.raises(AssertionError):
        check_exact(config.to_dict(), model)


def test_planted_ignored_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = replace(FAMILIES["gemma2"], windows=lambda keys, layer, count: (None, None))
    monkeypatch.setitem(family_table.FAMILIES, "gemma2", blind)
    with pytest.raises(AssertionError):
        test_windows_are_those_the_real_attention_has("gemma2", {})


def test_planted_all_experts_active_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelShape, "active_matmul_parameters", ModelShape.matmul_parameters)
    config = small_config("mixtral")
    real = ModelShape.measured(config.to_dict(), shapes_of(on_meta(config)))
    expected = sum(layer.active_matmul_parameters for layer in real.layers) + real.head.parameters
    assert ModelShape.from_config(config.to_dict()).active_matmul_parameters != expected


def test_account_needs_no_torch() -> None:
    code = (
        "import sys, json; from headway.account import shape, flops, peaks, mfu; "
        f"s = shape.ModelShape.from_config({DENSE!r}); flops.document_flops(s, [3]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
