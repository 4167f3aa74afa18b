"""FLOPs against two references: a slow loop over tokens written from the config, and torch's own FLOP counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from headway.account import flops as flops_module
from headway.account.errors import UserError
from headway.account.flops import (
    FlopCount,
    LoraShape,
    Pass,
    SlotLayout,
    StepFlops,
    attended_pairs,
    describe,
    document_flops,
    step_flops,
)
from headway.account.layers import Layer, Weight
from headway.account.shape import ModelShape

BASE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **BASE}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", **BASE, "sliding_window": 4, "sliding_window_pattern": 3}
MOE: dict[str, Any] = {
    "model_type": "qwen2_moe",
    **BASE,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "mlp_only_layers": [1],
}
MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **{key: value for key, value in BASE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
CONFIGS = {"llama": LLAMA, "gemma3_text": GEMMA, "qwen2_moe": MOE, "deepseek_v3": MLA}
LENGTHS = [1, 2, 5, 13, 4]


def slow_forward(config: dict[str, Any], lengths: list[int]) -> int:
    """Forward FLOPs token by token, straight from the config: no shape, no formula, no vectorisation."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    kv, dim, depth = config["num_key_value_heads"], config.get("head_dim", 0), config["num_hidden_layers"]
    total = 0
    for length in lengths:
        for position in range(length):
            for layer in range(depth):
                if config["model_type"] == "deepseek_v3":
                    qk, v = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
                    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
                    total += 2 * (h * q_rank + q_rank * heads * qk + h * (kv_rank + config["qk_rope_head_dim"]))
                    total += 2 * (kv_rank * heads * (config["qk_nope_head_dim"] + v) + heads * v * h)
                else:
                    qk = v = dim
                    total += 2 * h * heads * dim + 2 * (2 * h * kv * dim) + 2 * heads * dim * h
                sliding = config["model_type"] == "gemma3_text" and (layer + 1) % config["sliding_window_pattern"]
                for key in range(length):
                    if key <= position and (not sliding or position - key < config["sliding_window"]):
                        total += heads * (2 * qk + 2 * v)
                if layer in config.get("mlp_only_layers", []) or layer < config.get("first_k_dense_replace", 0):
                    total += 3 * 2 * h * config["intermediate_size"]
                elif "moe_intermediate_size" in config:
                    experts = config.get("num_experts", config.get("n_routed_experts"))
                    total += 2 * h * experts  # router
                    total += config["num_experts_per_tok"] * 3 * 2 * h * config["moe_intermediate_size"]
                    if config["model_type"] == "qwen2_moe":
                        total += 3 * 2 * h * config["shared_expert_intermediate_size"] + 2 * h
                    else:
                        total += 3 * 2 * h * config["moe_intermediate_size"]  # one shared expert
                else:
                    total += 3 * 2 * h * config["intermediate_size"]
            total += 2 * h * config["vocab_size"]
    return total


def check_slow(config: dict[str, Any], lengths: list[int]) -> None:
    found = document_flops(ModelShape.from_config(config), lengths)
    assert found.forward == slow_forward(config, lengths)
    assert found.backward == 2 * found.forward


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_loop_over_tokens(name: str) -> None:
    check_slow(CONFIGS[name], LENGTHS)


@given(st.lists(st.integers(0, 24), max_size=6), st.sampled_from(sorted(CONFIGS)))
@settings(max_examples=25, deadline=None)
def test_equals_the_loop_for_any_lengths(lengths: list[int], name: str) -> None:
    check_slow(CONFIGS[name], lengths)


@given(
    st.lists(st.integers(0, 40), max_size=5),
    st.one_of(st.none(), st.integers(1, 50)),
    st.one_of(st.none(), st.integers(1, 50)),
)
@settings(deadline=None)
def test_pairs_equal_counting_them(lengths: list[int], window: int | None, chunk: int | None) -> None:
    window = None if chunk is not None else window
    causal = full = 0
    for length in lengths:
        q, k = np.mgrid[:length, :length]
        near = np.ones_like(q, dtype=bool) if chunk is None else q // chunk == k // chunk
        causal += int((near & (k <= q) & (q - k < (window or 99))).sum())
        full += int(near.sum()) if window is None else length * min(length, window)
    assert attended_pairs(lengths, window, chunk) == causal
    assert attended_pairs(lengths, window, chunk, "full-attention") == full


def test_sums_past_int64_are_exact() -> None:
    """A year of long documents: 2^40 tokens in documents of 2^22."""
    lengths = np.full(2**18, 2**22, dtype=np.int64)
    assert attended_pairs(lengths) == 2**18 * (2**22 * (2**22 + 1) // 2)
    assert attended_pairs(lengths, convention="full-attention") == 2**18 * 2**44 > 2**61
    huge = np.full(8, 2**31, dtype=np.int64)
    assert attended_pairs(huge, convention="full-attention") == 8 * 2**62


# --- against torch's counter on real models ---


def real_model(config: dict[str, Any]) -> Any:
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = AutoConfig.for_model(config["model_type"], **values, experts_implementation="eager")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(built, attn_implementation="eager").float()


def counted(model: Any, lengths: list[int]) -> tuple[int, int]:
    """(forward, backward) FLOPs torch dispatches, each document alone. Eager attention multiplies all n*n pairs."""
    forward = backward = 0
    for length in lengths:
        with FlopCounterMode(display=False) as counter:
            logits = model(input_ids=torch.arange(length)[None] % 90 + 3, use_cache=False).logits
        forward += products(counter)
        with FlopCounterMode(display=False) as counter:
            logits.float().sum().backward()
        backward += products(counter)
    return forward, backward


def products(counter: FlopCounterMode) -> int:
    """All but the angles of the rotary embedding: transformers before 5.24 computes them by a product."""
    tables = [ops for name, ops in counter.get_flop_counts().items() if "rotary_emb" in name.rpartition(".")[2]]
    return counter.get_total_flops() - sum(sum(ops.values()) for ops in tables)


REAL: list[dict[str, Any]] = [
    LLAMA,
    {**GEMMA, "sliding_window": 64},
    MOE,
    MLA,
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    {"model_type": "gpt_oss", **BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    {"model_type": "mixtral", **BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "cohere", **{k: v for k, v in BASE.items() if k != "head_dim"}},
]


@pytest.mark.parametrize("config", REAL, ids=lambda config: config["model_type"])
def test_equals_torchs_counter(config: dict[str, Any]) -> None:
    found = document_flops(ModelShape.from_config(config), [3, 11], convention="full-attention")
    assert (found.forward, found.backward) == counted(real_model(config), [3, 11])


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen2_moe"])
def test_measured_shape_equals_torchs_counter(config: dict[str, Any]) -> None:
    model = real_model(config)
    names = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shape = ModelShape.measured(model.config.to_dict(), names)
    found = document_flops(shape, [7], convention="full-attention")
    assert (found.forward, found.backward) == counted(model, [7])


LORA_TARGETS = [
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj",),
    ("down_proj",),
]


def check_lora(config: dict[str, Any], targets: tuple[str, ...], input_gradient: bool) -> None:
    shape = ModelShape.from_config(config)
    model = get_peft_model(real_model(config), LoraConfig(r=4, target_modules=list(targets), lora_dropout=0.0))
    if input_gradient:
        model.enable_input_require_grads()
    lora = LoraShape(4, targets, input_gradient)
    found = document_flops(shape, [11], convention="full-attention", trainable=lora)
    assert (found.forward, found.backward) == counted(model, [11])


@pytest.mark.parametrize("targets", LORA_TARGETS, ids=lambda targets: targets[0] + str(len(targets)))
def test_lora_equals_torchs_counter(targets: tuple[str, ...]) -> None:
    check_lora(LLAMA, targets, input_gradient=False)


def test_lora_with_gradients_into_the_embedding() -> None:
    check_lora(LLAMA, ("q_proj", "v_proj"), input_gradient=True)


def test_lora_without_keys_counts_attention_backward_whole() -> None:
    """The one convention: a fused kernel computes all of attention's gradients, though layer 0's keys need none."""
    model = get_peft_model(real_model(LLAMA), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    lora = LoraShape(4, ("q_proj", "v_proj"))
    found = document_flops(ModelShape.from_config(LLAMA), [11], convention="full-attention", trainable=lora)
    assert found.backward - counted(model, [11])[1] == 2 * 4 * 16 * 11 * 11


def test_lora_on_experts_adapts_only_real_linear_modules() -> None:
    check_lora(MOE, ("q_proj", "k_proj", "v_proj", "gate_proj"), input_gradient=False)


def test_lora_on_latent_attention() -> None:
    check_lora(MLA, ("q_a_proj", "kv_a_proj_with_mqa"), input_gradient=False)


def test_lora_backward_has_no_weight_gradient_of_frozen_matrices() -> None:
    shape = ModelShape.from_config(LLAMA)
    full, lora = (document_flops(shape, [64], trainable=kind) for kind in ("full", LoraShape(2, ("q_proj", "v_proj"))))
    assert lora.head == Pass(full.head.forward, full.head.forward)
    assert lora.attention == full.attention
    assert 0.45 < lora.backward / full.backward < 0.6
    assert lora.forward > full.forward


def test_unknown_lora_target_names_the_modules() -> None:
    with pytest.raises(UserError, match=r"wq match no module; there are: .*self_attn\.q_proj"):
        document_flops(ModelShape.from_config(LLAMA), [3], trainable=LoraShape(4, ("wq",)))


def test_recompute_is_the_layers_forward_again() -> None:
    """Reentrant checkpointing runs every layer's forward twice; non-reentrant stops before each layer's last matrix."""
    shape = ModelShape.from_config(LLAMA)
    step = step_flops(shape, [11], SlotLayout.packed([11]), recompute="full", convention="full-attention")
    seen = {}
    for reentrant in (True, False):
        model = real_model(LLAMA).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        seen[reentrant] = sum(counted(model, [11]))
    assert step.computed == seen[True]
    assert step.computed - seen[False] == 3 * 2 * 80 * 48 * 11
    assert step.recompute.head == Pass() and step.recompute.backward == 0


def test_between_none_and_full_lie_experts_and_single_layers() -> None:
    for config, experts in ((LLAMA, 0), (MOE, 2 * 2 * 3 * 24 * 48)):  # two MoE layers of three, top 2, three matrices
        shape = ModelShape.from_config(config)
        layout = SlotLayout.packed([11, 5])
        parts = {
            level: step_flops(shape, [11, 5], layout, recompute=level).recompute for level in ("selective", 1, "full")
        }
        assert parts["selective"].total == 2 * experts * 16
        assert parts["selective"].total < parts[1].total < parts["full"].total
        every = step_flops(shape, [11, 5], layout, recompute=len(shape.layers)).recompute
        assert every == parts["full"] == step_flops(shape, [11, 5], layout, recompute="offload").recompute


# --- the parts of a step ---


def test_packed_step_counts_the_padding_document() -> None:
    shape = ModelShape.from_config(LLAMA)
    step = step_flops(shape, [5, 9], SlotLayout.packed([5, 9, 18]))
    assert step.useful == document_flops(shape, [5, 9])
    assert step.padding == document_flops(shape, [18])
    assert step.computed == document_flops(shape, [5, 9, 18]).total


def test_half_padded_rectangle_computes_the_padded_width() -> None:
    """P39: half the slots are padding. Padding is more than half of what is computed, and none of it is useful."""
    shape = ModelShape.from_config(LLAMA)
    layout = SlotLayout.rectangular(rows=4, width=16)
    step = step_flops(shape, [8, 8, 8, 8], layout)
    assert layout.slots == 64
    assert step.padding.matmul == step.useful.matmul
    assert step.padding.attention.forward == document_flops(shape, [16] * 4).attention.forward - (
        step.useful.attention.forward
    )
    assert step.padding.total > step.useful.total


def test_several_micro_batches_are_one_layout() -> None:
    layout = SlotLayout.packed([3, 5]) + SlotLayout.rectangular(2, 4)
    assert (layout.slots, layout.segments.tolist()) == (16, [3, 5, 4, 4])


def test_layout_without_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="less than its documents"):
        step_flops(ModelShape.from_config(LLAMA), [5, 9], SlotLayout.packed([9]))


def test_head_may_be_computed_at_some_positions_only() -> None:
    shape = ModelShape.from_config(LLAMA)
    step = step_flops(shape, [10], SlotLayout.packed([10, 6]), head_tokens=4, head_slots=4)
    assert step.useful.head.forward == 4 * 2 * 48 * 96
    assert step.padding.head == Pass()


def test_rework_moves_everything() -> None:
    step = step_flops(ModelShape.from_config(LLAMA), [5], SlotLayout.packed([5, 3]), recompute="full")
    lost = step.as_rework()
    assert lost.computed == step.computed and lost.useful == FlopCount()
    assert (step + lost).computed == 2 * step.computed
    assert lost.to_flops().rework == step.computed == step.to_flops().computed


@given(
    documents=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    padding=st.lists(st.integers(0, 40), max_size=3),
    recompute=st.sampled_from(["none", "full"]),
    convention=st.sampled_from(["causal", "full-attention"]),
    name=st.sampled_from(sorted(CONFIGS)),
)
@settings(max_examples=60, deadline=None)
def test_a_step_is_closed(documents: Any, padding: Any, recompute: Any, convention: Any, name: str) -> None:
    shape = ModelShape.from_config(CONFIGS[name])
    segments = [*documents, *padding]
    step = step_flops(shape, documents, SlotLayout.packed(segments), recompute=recompute, convention=convention)
    everything = document_flops(shape, segments, convention=convention)
    again = everything.matmul.forward + everything.attention.forward if recompute == "full" else 0
    assert step.computed == everything.total + again
    assert step.computed == step.useful.total + step.padding.total + step.recompute.total + step.rework.total
    each = sum((document_flops(shape, [n], convention=convention).total for n in documents), 0)
    assert step.useful.total == each
    assert all(isinstance(value, int) for value in (step.computed, step.useful.total, step.padding.total))


def test_full_attention_counts_more_and_says_so() -> None:
    shape = ModelShape.from_config(LLAMA)
    causal, full = document_flops(shape, [64]), document_flops(shape, [64], convention="full-attention")
    assert full.attention.forward * 65 == causal.attention.forward * 128
    assert full.matmul == causal.matmul
    assert "'causal'" in describe() and "'full-attention'" in describe("full-attention")
    assert "LoRA" in describe("causal", LoraShape(4, ("q_proj",)))


@pytest.mark.parametrize("lengths", [[-1], [1.5], ["3"]])
def test_nonsense_lengths_are_refused(lengths: list[Any]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        document_flops(ModelShape.from_config(LLAMA), lengths)


def test_no_documents_are_no_flops() -> None:
    assert document_flops(ModelShape.from_config(LLAMA), []) == FlopCount()
    assert StepFlops().computed == 0


# --- P38 and planted faults: each must be caught by the loop over tokens ---


def test_short_packed_documents_do_not_count_the_whole_context() -> None:
    """R2: with the pack's length instead of the documents', short documents inflate the useful FLOPs."""
    shape = ModelShape.from_config(LLAMA)
    assert document_flops(shape, [64] * 16).attention.total * 15 < document_flops(shape, [1024]).attention.total


def test_sliding_window_bounds_attention() -> None:
    """torchtitan PR 4300: a long document under a window, counted without it, passes 100 %."""
    shape = ModelShape.from_config({**LLAMA, "model_type": "mistral", "sliding_window": 8})
    kind = shape.attention_kinds[0][0]
    assert attended_pairs([1000], kind.window) == 8 * 9 // 2 + 992 * 8


def _each_layer(shape: ModelShape, change: Callable[[Layer], Layer]) -> ModelShape:
    return replace(shape, layers=tuple(change(layer) for layer in shape.layers))


def _embedding_multiplied(shape: ModelShape) -> ModelShape:
    return replace(shape, outer=(Weight("embed_tokens", shape.hidden, shape.vocab, "outer"),))


def _scores_per_kv_head(layer: Layer) -> Layer:
    assert layer.attention is not None
    return replace(layer, attention=replace(layer.attention, heads=layer.attention.kv_heads))


def _as_many_kv_heads_as_heads(layer: Layer) -> Layer:
    query, key, value, *rest = layer.weights
    same = [replace(weight, outputs=query.outputs) for weight in (key, value)]
    return replace(layer, weights=(query, *same, *rest))


def _all_experts(layer: Layer) -> Layer:
    return replace(layer, weights=tuple(replace(weight, active=weight.copies) for weight in layer.weights))


def _no_window(layer: Layer) -> Layer:
    assert layer.attention is not None
    return replace(layer, attention=replace(layer.attention, window=None))


def _no_gate(layer: Layer) -> Layer:
    return replace(layer, weights=tuple(weight for weight in layer.weights if not weight.name.endswith("gate_proj")))


PLANTS = {
    "embedding counted as matmul": (LLAMA, _embedding_multiplied),
    "scores per kv head": (LLAMA, lambda shape: _each_layer(shape, _scores_per_kv_head)),
    "grouped kv heads ignored": (LLAMA, lambda shape: _each_layer(shape, _as_many_kv_heads_as_heads)),
    "all experts active": (MOE, lambda shape: _each_layer(shape, _all_experts)),
    "sliding window ignored": (GEMMA, lambda shape: _each_layer(shape, _no_window)),
    "plain MLP assumed": (LLAMA, lambda shape: _each_layer(shape, _no_gate)),
}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault_in_the_shape_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config, plant = PLANTS[name]
    check_slow(config, LENGTHS)
    faulty = plant(ModelShape.from_config(config))
    monkeypatch.setattr(ModelShape, "from_config", lambda config: faulty)
    with pytest.raises(AssertionError):
        check_slow(config, LENGTHS)


def test_planted_dropped_causal_factor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = flops_module.attended_pairs
    monkeypatch.setattr(flops_module, "attended_pairs", lambda n, w, c, _: real(n, w, c, "full-attention"))
    with pytest.raises(AssertionError):
        check_slow(LLAMA, LENGTHS)


def test_planted_weight_gradient_of_frozen_matrices_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops_module, "LoraShape", _NeverLora)
    flops_module._rates.cache_clear()
    with pytest.raises(AssertionError):
        check_lora(LLAMA, LORA_TARGETS[0], input_gradient=False)
    flops_module._rates.cache_clear()


class _NeverLora:
    """Stands in for LoraShape so that no adapter is recognised: the model counts as fully trained."""
