from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AttentionInterface

from headway.account.errors import Refused
from headway.model import attention, forward, isolation
from headway.model.documents_attention import attend_documents
from headway.model.forward import attention_of, call_arguments
from headway.model.isolation import prove_isolation
from model.tiny_models import ATTENTION_FAMILIES, tiny


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_models_pass_and_the_report_says_what_was_covered(family, dtype):
    model = tiny(family, dtype=dtype)
    report = prove_isolation(model)
    assert report.conclusive and report.attention == "headway" and report.packed
    assert max(report.leak, report.lookahead) <= report.tolerance < report.context
    assert report.reference is not None
    window = {"gemma2": 6, "gemma3": 5, "mistral": 7, "gpt_oss": 6}.get(family)
    assert report.window == window and report.window_covered == (window is not None)
    assert window is None or max(report.lengths) > window
    assert "isolated under headway attention" in report.summary()
    assert model.training and attention_of(model) == "headway"


@pytest.mark.parametrize("model_attention", ["headway", "sdpa", "eager"])
def test_rectangular_batches_pass_too(model_attention):
    report = prove_isolation(tiny("mistral", attention=model_attention), packed=False)
    assert report.conclusive and not report.packed
    assert (report.reference is None) == (model_attention == "eager")


def test_a_window_too_large_to_reach_is_reported():
    report = prove_isolation(tiny("mistral", sliding_window=480), max_tokens=200)
    assert not report.window_covered and "480 was not reached" in report.summary()
    assert prove_isolation(tiny("mistral", sliding_window=480)).window_covered


def test_a_model_that_does_not_look_at_its_context_is_inconclusive():
    model = tiny("llama")
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    report = prove_isolation(model)
    assert not report.conclusive and "inconclusive" in report.summary()


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("jamba", r"model\.layers\.0\.mamba \(JambaMambaMixer; the model has 1\)"),
        ("mamba2", r"backbone\.layers\.0\.mixer \(Mamba2Mixer; the model has 2\)"),
        ("qwen3_next", r"model\.layers\.0\.linear_attn \(Qwen3NextGatedDeltaNet; the model has 1\)"),
        ("lfm2", r"model\.layers\.0\.conv \(Lfm2ShortConv; the model has 1\)"),
        (
            "recurrent_gemma",
            r"model\.layers\.0\.temporal_block \(RecurrentGemmaRecurrentBlock; the model has 2\)",
        ),
        ("bloom", r"transformer\.h\.0\.self_attention \(BloomAttention; the model has 2\)"),
    ],
)
def test_layers_that_leak_are_refused_by_name_and_train_unpacked(family, module):
    """P08. Packed they are refused; one document a row, they are right."""
    model = tiny(family)
    with pytest.raises(Refused, match=rf"documents see each other through {module}.*set data\.pack to none"):
        prove_isolation(model)
    assert model.training
    assert prove_isolation(model, packed=False).attention != "headway"


def test_a_model_that_refuses_packs_itself_is_refused_with_its_reason():
    model = tiny("qwen3_next", attention="headway")
    with pytest.raises(Refused, match="Qwen3NextForCausalLM: "):
        prove_isolation(model)


def plant(monkeypatch, change, family="llama", **options):
    """prove_isolation on a model whose every call has been tampered with."""
    model = tiny(family, **options)
    model.config.use_cache = True

    def tampered(name, batch):
        return change(call_arguments(name, batch), batch)

    monkeypatch.setattr(forward, "call_arguments", tampered)
    return prove_isolation(model)


def merged(arguments, batch):
    cu = batch.cu_seqlens
    if len(cu) > 2:
        arguments = arguments | {"cu_seq_lens_q": torch.cat([cu[:1], cu[2:]]), "max_length_q": batch.slots}
    return arguments


PLANTS = {
    "use_cache at its default": (
        lambda a, b: {k: v for k, v in a.items() if k != "use_cache"}, {"attention": "sdpa"}, "LlamaAttention",
    ),
    "all-ones mask": (
        lambda a, b: a | {"attention_mask": torch.ones_like(b.input_ids)}, {"attention": "sdpa"}, "LlamaAttention",
    ),
    "two documents merged": (merged, {}, "LlamaAttention"),
    "positions not restarted": (
        lambda a, b: a | {"position_ids": torch.arange(b.slots)[None]}, {"family": "gpt2"},
        "not computed as it is alone",
    ),
    "positions run on from the document before": (
        lambda a, b: a | {"position_ids": (b.position_ids + b.position_ids.roll(1)).clamp(max=500)}, {"family": "gpt2"},
        "not computed as it is alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTS)
def test_planted_calls_are_caught(monkeypatch, fault):
    change, options, message = PLANTS[fault]
    with pytest.raises(Refused, match=message):
        plant(monkeypatch, change, **options)


ATTENTION_PLANTS = {
    "window ignored": ({"sliding_window": None}, "does not compute what the model's own eager attention"),
    "window one too long": ({"sliding_window": 8}, "does not compute what the model's own eager attention"),
    "softcap invented": ({"softcap": 0.5}, "does not compute what the model's own eager attention"),
    "scale lost": ({"scaling": 1.0}, "does not compute what the model's own eager attention"),
}


@pytest.mark.parametrize("fault", ATTENTION_PLANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_attentions_are_caught(monkeypatch, fault, dtype):
    change, message = ATTENTION_PLANTS[fault]
    model = tiny("mistral", dtype=dtype)

    def wrong(module, query, key, value, mask, **kwargs):
        return attention.headway_attention(module, query, key, value, mask, **kwargs | change)

    monkeypatch.setitem(AttentionInterface._global_mapping, "headway", wrong)
    with pytest.raises(Refused, match=message):
        prove_isolation(model)


def test_a_planted_look_ahead_is_caught(monkeypatch):
    def both_ways(module, query, key, value, mask, scaling=None, **kwargs):
        lengths = kwargs["cu_seq_lens_q"].diff().tolist()
        flipped = attend_documents(*(x.flip(2) for x in (query, key, value)), lengths[::-1], scale=scaling).flip(2)
        return flipped.transpose(1, 2), None

    model = tiny("llama")
    monkeypatch.setitem(AttentionInterface._global_mapping, "headway", both_ways)
    with pytest.raises(Refused, match="a token sees later tokens of its own document"):
        prove_isolation(model)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_mixed_precision_by_autocast_is_proved_as_it_trains(family):
    model = tiny(family)
    with torch.autocast("cpu", torch.bfloat16):
        report = prove_isolation(model)
    assert report.conclusive and report.tolerance == isolation.SAME_SHAPE[torch.bfloat16]


def test_a_recurrent_model_forced_into_flattened_rows_is_refused():
    """Unpacked rows are flattened under `headway`; only the proof in the same form shows that the state runs on."""
    model = tiny("recurrent_gemma", attention="headway")
    with pytest.raises(Refused, match=r"temporal_block .*set model\.attention to sdpa or eager"):
        prove_isolation(model, packed=False)


def test_weights_that_are_not_finite_are_refused():
    model = tiny("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(Refused, match="not finite"):
        prove_isolation(model)


def test_the_proof_leaves_no_trace():
    model = tiny("qwen3_moe").eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    first = prove_isolation(model)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model.training and not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert dataclasses.asdict(prove_isolation(model)) == dataclasses.asdict(first)


def test_ids_stay_below_the_given_vocabulary(monkeypatch):
    seen = []
    original = isolation.forward_logits

    def watching(model, batch):
        seen.append(int(batch.input_ids.max()))
        return original(model, batch)

    monkeypatch.setattr(isolation, "forward_logits", watching)
    prove_isolation(tiny("llama"), vocab_size=7)
    assert len(seen) == 9 and max(seen) < 7
