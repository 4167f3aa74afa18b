"""`fuse: auto` on models: the same training in every family, wrong candidates named and never used, choices kept."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.config.optim import OptimConfig
from headway.data.batch import IGNORE
from headway.model.forward import forward_logits, forward_loss
from headway.model.head import install_loss_head, loss_head, remove_loss_head, why_no_loss_head
from headway.model.kernels import attention, glu, layer_norm, measure, norm, residual_norm, rotary, whole
from headway.model.kernels import choose as choose_module
from headway.model.kernels.cache import cache_key, cache_path, cached_choice
from headway.model.kernels.case import Candidate, Case, Choice, Result
from headway.model.kernels.choose import Before, Chosen, Setting, install_kernels, known_or_measured, measure_kernels
from headway.model.kernels.linear_loss import chunked_linear_loss
from headway.model.kernels.loss_case import loss_case
from headway.model.kernels.measure import choose
from headway.model.kernels.whole import _batch
from headway.model.load import load_model
from headway.model.loss import loss_sum
from headway.train.update_case import update_cases
from tiny import config

CPU = torch.device("cpu")
SETTING = Setting(96, 0.5, torch.float32, CPU, "cpu: test")


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))


def small(model_type="llama", **changes):
    return load_model(config=config(model_type=model_type, **changes), dtype="float32", attention="headway", seed=3)


def gradients(model, use=forward_loss):
    model.zero_grad()
    loss = use(model, _batch(320))
    loss.loss.backward()
    return float(loss.loss.detach()), float(loss.nll_sum), torch.cat([p.grad.flatten() for p in model.parameters()])


def plain(model, batch):
    return loss_sum(forward_logits(model, batch), batch.labels)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False, "vocab_size": 331, "head_dim": 80}),
        ("qwen3", {"head_dim": 64}),
        ("qwen2", {"head_dim": 96}),
        ("gemma", {"head_dim": 128}),
        ("mistral", {"sliding_window": 8}),
        ("phi3", {"pad_token_id": 0}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}),
    ],
)
def test_a_fused_model_trains_as_the_plain_one(model_type, changes):
    model = small(model_type, **changes)
    loss, nll, grads = gradients(model, plain)
    chosen = install_kernels(model, SETTING, _force(measure_kernels(model, SETTING, budget=9), "lean", "chunked"))
    assert chosen.loss_head() and not any("nothing is fused" in text for text in chosen.warnings)
    found, found_nll, found_grads = gradients(model)
    assert found == pytest.approx(loss, rel=1e-5) and found_nll == pytest.approx(nll, rel=1e-5)
    assert float((found_grads - grads).norm() / grads.norm()) < 1e-4
    each = forward_loss(model, _batch(320)).each
    remove_loss_head(model)
    assert each is not None, "the guard knows single documents under fused heads too"
    assert torch.allclose(each, forward_loss(model, _batch(320)).each, rtol=1e-3, atol=1e-5)


def _force(measured, *names):
    """Ours wherever it was found right, whatever was fastest in this noise."""
    from dataclasses import replace

    def best(choice):
        right = [r.name for r in choice.results if r.error is not None and not r.wrong]
        return next((name for name in names if name in right), choice.chosen)

    return replace(measured, choices=tuple(replace(c, chosen=best(c)) for c in measured.choices))


def test_a_norm_of_another_kind_keeps_its_own_code_and_is_named():
    """Gemma scales by 1 + weight: everyone else's norm is wrong for it, whatever its class is called."""
    measured = measure_kernels(small("gemma", head_dim=8), SETTING, budget=9)
    choice = next(c for c in measured.choices if c.operation == "rms_norm")
    assert choice.chosen == "eager" and {r.name for r in choice.results if r.wrong} >= {"torch", "lean"}
    assert any("rms_norm: lean is not used, it is wrong" in text for text in measured.warnings)


def test_a_soft_cap_behind_the_head_is_found_on_the_whole_model():
    model = small("gemma2", head_dim=8, final_logit_softcapping=3.0, sliding_window=64)
    before = gradients(model, plain)
    chosen = install_kernels(model, SETTING, measure_kernels(model, SETTING, budget=9))
    assert chosen.choices == () and "nothing is fused" in chosen.warnings[-1]
    assert loss_head(model) is None and gradients(model)[0] == before[0]
    again = install_kernels(model, SETTING, measure_kernels(model, SETTING, before=Before({}, chosen.plain)))
    assert again.choices == () and again.plain == chosen.plain and "as in the session before" in again.warnings[0]
    assert loss_head(model) is None, "a resume of a plain run stays plain"


def test_only_rows_with_a_label_reach_the_head_and_no_logits_exist():
    model = small()
    seen = []

    def spy(hidden, *rest):
        seen.append(hidden.shape)
        return chunked_linear_loss(hidden, *rest)

    install_loss_head(model, spy)
    batch = _batch(320)
    forward_loss(model, batch)
    assert seen == [(batch.trained_tokens, 32)] and batch.trained_tokens < batch.slots
    assert forward_logits(model, batch).shape == (1, batch.slots, 320), "without labels it is the ordinary head"
    remove_loss_head(model)
    assert loss_head(model) is None


def test_a_batch_without_any_label_gives_zero_gradients_everywhere():
    from dataclasses import replace

    model = small()
    install_loss_head(model, lambda *given: 1 // 0)  # as Liger's does without a row
    batch = _batch(320)
    empty = replace(batch, labels=torch.full_like(batch.labels, IGNORE), trained_tokens=0)
    forward_loss(model, empty).loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_head_that_is_no_plain_linear_is_left_alone_with_the_reason():
    from headway.config.model import LoraConfig
    from headway.model.lora import apply_lora

    model = apply_lora(small(tie_word_embeddings=False), LoraConfig(targets=["lm_head"]), seed=0)
    assert "not a plain linear layer" in str(why_no_loss_head(model))
    assert why_no_loss_head(apply_lora(small(), LoraConfig(), seed=0)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 65])
def test_lean_norm_equals_the_plain_one(dtype, width):
    class LlamaRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

        def forward(self, x):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(x.dtype)

    case = norm.norm_case(LlamaRMSNorm().to(dtype), 37, dtype, CPU)
    found = {r.name: r for r in choose(case, 9).results}
    assert not found["lean"].wrong and not found["torch"].wrong and found["lean"].gradient_error < 2e-2


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_lean_rotary_and_gate_equal_the_plain_ones(head_dim):
    model = small(head_dim=head_dim, num_attention_heads=4, num_key_value_heads=1)
    attention = rotary.rotary_attentions_of(model)[0]
    found = choose(rotary.rotary_case(attention, (4, 1), head_dim, 33, torch.float32, CPU), 9)
    assert [r.wrong for r in found.results if r.error is not None] == [False, False]
    found = choose(glu.gate_case(glu.gated_mlps_of(model)[0], 33, torch.float32, CPU), 9)
    assert [r.wrong for r in found.results if r.error is not None] == [False, False]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_attention_is_checked_and_a_leak_is_found(head_dim):
    """Grouped queries, a capacity that is no multiple of anything; the planted candidate merges two documents."""
    kind = attention.Kind(3, 1, head_dim, head_dim**-0.5, None, None, False)
    case = attention.attention_case(kind, 8193, (700, 1, 90), torch.float32, CPU)
    q, *_, table, longest, _ = case.inputs(8193)
    assert q.shape == (1, 3, 8193, head_dim) and int(table[-1]) == 8193 and longest == 700
    *_, few, _, _ = case.inputs(97)
    assert len(few) == 5, "several documents where it is checked, whatever the user's lengths are"

    def merged(q, k, v, table, longest, sinks):
        return attention.attend("documents", q, k, v, table[[0, *range(2, len(table))]], longest, scale=kind.scale)

    planted = Case("attention", "", [case.candidates[0], Candidate("merged", merged)], case.inputs, 97, 97)
    found = choose(planted, 9)
    assert found.chosen == "documents" and found.results[1].wrong
    whole = choose(case, 9)
    assert whole.chosen == "documents" and {r.name for r in whole.results if r.reason} >= {"varlen", "flash3", "flash4"}


@pytest.mark.parametrize(
    ("varlen", "flex", "chosen"),
    [
        (Result("varlen", reason="not measured: no time"), Result("flex"), "varlen"),
        (
            Result("varlen", 1e-3, 1e-3, reason="2.00 times"),
            Result("flex", reason="not measured: no time"),
            "documents",
        ),
        (Result("varlen", 1.0, 1.0, wrong=True, reason="is wrong"), Result("flex", reason="not measured: no"), "flex"),
        (Result("varlen", reason="its kernels are for CUDA"), Result("flex", reason="no backward"), "documents"),
    ],
)
def test_an_attention_path_without_a_measurement_is_left_to_the_rule(varlen, flex, chosen):
    found = Choice("attention", "", "bfloat16", "documents", (Result("documents", 0.0, 0.0), varlen, flex))
    assert attention.settled(found).chosen == chosen


def test_kinds_of_attention_are_found_and_the_choice_is_kept_on_the_modules():
    kinds = attention.attentions_of(small("gemma2", head_dim=8, sliding_window=6, attn_logit_softcapping=3.0))
    assert sorted(kind.name() for kind in kinds) == ["attention softcap", "attention window 6 softcap"]
    model = small()
    (modules,) = attention.attentions_of(model).values()
    assert len(modules) == 2
    attention.use_attention(modules, "flash3")
    before = gradients(model)[0]  # it cannot run here, so the rule decides
    attention.use_attention(modules, "")
    assert gradients(model)[0] == before and attention.CHOSEN not in modules[0].__dict__
    assert attention.attentions_of(small(attention_dropout=0.1)) == {}


def test_a_layer_is_taken_over_only_where_its_code_is_llamas(monkeypatch):
    def layers_of(model):
        return residual_norm.residual_layers_of(model, norm.norms_of(model))

    assert len(layers_of(small("qwen3"))) == 2 and layers_of(small("phi3", pad_token_id=0)) == []
    model = small()
    loss, _, grads = gradients(model, plain)
    monkeypatch.setattr(residual_norm, "_compiled", lambda: residual_norm._plain)  # the code that would be compiled
    residual_norm.use_residual_norm(layers := layers_of(model), "compile")
    found, _, found_grads = gradients(model, plain)
    assert found == pytest.approx(loss, rel=1e-6) and float((found_grads - grads).norm() / grads.norm()) < 1e-5
    assert all("forward" in layer.__dict__ for layer in layers)
    residual_norm.use_residual_norm(layers, "apart")
    assert all("forward" not in layer.__dict__ for layer in layers)


def test_a_rotation_with_tables_of_another_width_is_left_alone():
    """gpt-oss: its tables are half as wide, and every candidate's inputs would be wrong for it."""
    small_ones = {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2}
    assert rotary.rotary_attentions_of(small("gpt_oss", **small_ones)) == []


def test_layer_norms_have_candidates_too():
    model = small("gpt_neox")
    found = choose(layer_norm.layer_norm_case(layer_norm.layer_norms_of(model)[0], 33, torch.float32, CPU), 9)
    assert [r.name for r in found.results] == ["eager", "liger", "compile"] and found.results[0].error < 1e-5


def test_other_models_of_the_class_keep_their_code():
    first, second = small(), small()
    rotary.use_rotary(rotary.rotary_attentions_of(first), "lean")
    norm.use_norm(norm.norms_of(first), "lean")
    assert "forward" in first.model.norm.__dict__ and "forward" not in second.model.norm.__dict__
    assert type(first.model.layers[0].self_attn).forward is type(second.model.layers[0].self_attn).forward


def faulty_case(run, rows=40):
    def inputs(count):
        return (torch.linspace(-1, 1, count * 3).reshape(count, 3).requires_grad_(),)

    return Case("thing", "3", [Candidate("eager", torch.sin), Candidate("other", run)], inputs, rows, rows)


def one_row(x):
    out = torch.sin(x)
    return torch.cat([out[:-1], out[-1:] * 1.01])


@pytest.mark.parametrize(
    "run",
    [
        one_row,
        lambda x: torch.sin(x) * math.nan,
        lambda x: torch.sin(x).detach() + 0 * x,
        lambda x: torch.sin(x)[:-1],
        lambda x: 1 / 0,
    ],
    ids=["one row off by 1 %", "NaN", "no gradient", "a lost row", "a crash"],
)
def test_planted_faults_are_found_and_named(run):
    choice = choose(faulty_case(run), 9)
    assert choice.chosen == "eager" and choice.results[1].wrong
    assert "is wrong" in choice.results[1].reason or "fails: ZeroDivisionError" in choice.results[1].reason


def test_a_right_candidate_is_not_called_wrong():
    assert not choose(faulty_case(lambda x: torch.sin(x.double()).float()), 9).results[1].wrong


def test_choices_are_kept_by_shape_and_a_damaged_file_is_measured_again():
    model = small()
    first = measure_kernels(model, SETTING, budget=25)
    again = measure_kernels(model, SETTING, budget=25)
    assert not any(c.cached for c in first.choices) and all(c.cached for c in again.choices)
    assert [c.chosen for c in first.choices] == [c.chosen for c in again.choices]
    assert "earlier" in again.summary()
    other = Setting(64, 0.5, torch.float32, CPU, "cpu: test")
    assert not all(c.cached for c in measure_kernels(model, other, budget=25).choices)
    cache_path().write_text(json.dumps({"x": {"results": 3}})[:-3])
    assert cached_choice("x") is None and not any(c.cached for c in measure_kernels(model, SETTING, budget=25).choices)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"shape": "4"}, "was chosen for 4 in float32"),
        ({"dtype": "bfloat16"}, "was chosen for 3 in bfloat16"),
        ({"chosen": "of another release"}, "is not known here"),
        ({"chosen": "gone"}, "its kernels are for CUDA"),
    ],
)
def test_what_the_session_before_ran_by_is_repeated_or_said_why_not(changes, reason):
    candidates = [Candidate("eager", torch.sin), Candidate("gone", torch.sin, lambda: "its kernels are for CUDA")]
    case = Case("thing", "3", [*candidates, Candidate("slow", torch.sin)], lambda rows: (torch.ones(rows, 3),), 2, 2)
    known = Choice(**{"operation": "thing", "shape": "3", "dtype": "float32", "chosen": "slow", **changes})
    again, why_not = Before({"thing": known}).of(case)
    assert (again is known) == (not reason) and reason in why_not and bool(why_not) == bool(reason)
    assert Before().of(case) == (None, "")


def test_without_time_everything_stays_plain_and_says_so():
    measured = measure_kernels(small(), SETTING, budget=0.0)
    assert {c.chosen for c in measured.choices} == {"documents", "eager"}
    assert all(
        "time for choosing" in r.reason for c in measured.choices for r in c.results if r.name in ("lean", "chunked")
    )


def test_a_kernel_that_compiles_in_its_first_call_is_not_compiled_for_nothing(monkeypatch):
    """As Triton's do, on a device that is said to be CUDA, and on a clock that only the candidates move."""
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(measure, "time", fake)
    monkeypatch.setattr(measure, "inputs_device", lambda inputs: "cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called = []

    def candidate(name, seconds, first):
        def run(x):
            clock.now += seconds if name in called else first
            called.append(name)
            return x * 1.0

        return Candidate(name, run)

    candidates = [candidate("eager", 0.02, 0.02), candidate("triton", 0.001, 5.0)]
    case = Case("any", "", candidates, lambda rows: (torch.ones(rows, 4, requires_grad=True),), 4, 2)
    found = choose(case, 3.0)
    assert found.chosen == "triton" and found.results[1].seconds == pytest.approx(0.001), found


def test_the_time_for_choosing_is_kept_and_what_was_not_tried_is_named(monkeypatch):
    """On a clock that only the candidates move: seconds a row of each, 10 rows checked, 100 timed."""
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(measure, "time", fake)

    def candidate(name, seconds):
        def run(x):
            clock.now += seconds * len(x)
            return torch.sin(x)

        return Candidate(name, run)

    def inputs(count):
        return (torch.linspace(-1, 1, count * 3).reshape(count, 3).requires_grad_(),)

    costs = {"plain": 0.01, "fast": 0.008, "hopeless": 0.2, "late": 0.009}
    case = Case("thing", "3", [candidate(name, each) for name, each in costs.items()], inputs, 100, 10)
    choice = known_or_measured(case, "cpu", torch.float32, 5.0)
    assert clock.now <= 5.0 and choice.chosen == "fast"
    reasons = {result.name: result.reason for result in choice.results}
    assert "times slower on a small case" in reasons["hopeless"] and reasons["late"] == measure.OUT_OF_TIME
    assert "not tried for want of time or memory: late of thing" in Chosen((choice,), (), clock.now).summary()
    again = known_or_measured(case, "cpu", torch.float32, 60.0)
    assert not again.cached and "late" not in measure_untried(again), "what could not be tried is not kept as a choice"
    assert known_or_measured(case, "cpu", torch.float32, 0.0).cached
    before = clock.now
    none = choose(case, 0.0)
    assert clock.now == before and none.chosen == "plain", "without time nothing is begun"


def sine_case(rows=100, check_rows=10, **runs):
    def inputs(count):
        return (torch.linspace(-1, 1, count * 3).reshape(count, 3).requires_grad_(),)

    return Case("thing", "3", [Candidate(name, run) for name, run in runs.items()], inputs, rows, check_rows)


@pytest.fixture
def clock(monkeypatch):
    """A clock that candidates move, and a device that is called cuda."""
    found = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: found.now, perf_counter=lambda: found.now)
    monkeypatch.setattr(measure, "time", fake)
    monkeypatch.setattr(measure, "inputs_device", lambda inputs: "cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return found


def test_drawing_and_a_kernels_first_call_are_not_in_its_time(clock, monkeypatch):
    """At full size the host takes a thousand times the kernel's time to draw a gradient; Triton compiles for seconds."""
    normal = measure.Dice.normal

    def slowly(dice, *shape):
        clock.now += 0.1
        return normal(dice, *shape)

    monkeypatch.setattr(measure.Dice, "normal", slowly)
    called = set()

    def run(name, seconds, first):
        def sine(x):
            clock.now += seconds + (0.0 if (name, len(x)) in called else first)
            called.add((name, len(x)))
            return torch.sin(x)

        return sine

    found = choose(sine_case(eager=run("eager", 0.002, 0.0), triton=run("triton", 0.001, 2.0)), 15)
    assert found.chosen == "triton"
    assert [result.seconds for result in found.results] == pytest.approx([0.002, 0.001])


def test_on_a_gpu_a_small_case_says_nothing_about_the_large_one(clock):
    """Launches are all that it takes: the candidate with more of them, four times as slow there, wins at full size."""

    def run(fixed, row):
        def sine(x):
            clock.now += fixed + row * len(x)
            return torch.sin(x)

        return sine

    assert choose(sine_case(eager=run(1e-5, 1e-4), peer=run(4e-3, 1e-6)), 15).chosen == "peer"


def fails_at(rows, failure):
    def run(x, *rest):
        if rows is None or len(x) == rows:
            raise failure
        return torch.sin(x)

    return run


def test_what_fails_only_at_full_size_is_left_out_and_named(clock):
    gone = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    odd = RuntimeError("out of resource: shared memory")
    case = sine_case(eager=fails_at(100, gone), odd=fails_at(100, odd), other=torch.sin)
    found = known_or_measured(case, "cuda", torch.float32, 9.0)
    assert found.chosen == "other" and [r.wrong for r in found.results] == [False, True, False]
    assert found.results[0].reason == "fails at full size: there was no memory for it"
    assert found.results[1].reason == "fails at full size: RuntimeError: out of resource: shared memory"
    assert not known_or_measured(case, "cuda", torch.float32, 9.0).cached, "another start may have more memory"
    alone = choose(sine_case(eager=fails_at(100, gone), odd=fails_at(100, odd)), 9.0)
    assert alone.chosen == "eager" and all("full size" in result.reason for result in alone.results)
    none = choose(sine_case(eager=fails_at(10, gone), other=torch.sin), 9.0)
    assert none.chosen == "eager" and none.results[1].reason == "not measured: there was no memory for it"


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made on the CPU."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.found = max(self.found, made.numel())
        return made


def test_inputs_and_weights_of_full_size_are_made_on_their_own_device():
    meta, slots = torch.device("meta"), 1 << 16
    model, gpt = small(), small("gpt_neox")
    norms, attentions = norm.norms_of(model), rotary.rotary_attentions_of(model)
    (kind,) = attention.attentions_of(model)
    head = nn.Linear(512, 1 << 16, device="meta")
    with Largest() as largest:
        torch.zeros(7)
        assert largest.found == 7
        cases = [
            attention.attention_case(kind, slots, (), torch.float32, meta),
            norm.norm_case(norms[0], slots, torch.float32, meta),
            residual_norm.residual_case(norms[0], "eager", slots, torch.float32, torch.float32, meta),
            layer_norm.layer_norm_case(layer_norm.layer_norms_of(gpt)[0], slots, torch.float32, meta),
            glu.gate_case(glu.gated_mlps_of(model)[0], slots, torch.float32, meta),
            rotary.rotary_case(attentions[0], (4, 2), 8, slots, torch.float32, meta),
            loss_case(head, slots, torch.float32, meta, 0.0, 0.0),
            *update_cases(nn.Linear(1 << 10, 1 << 10, device="meta"), OptimConfig(lr=1e-3)),
        ]
        for case in cases:
            made = [value for value in case.inputs(case.rows) if isinstance(value, torch.Tensor)]
            assert made and all(value.device.type == "meta" for value in made)
            measure.Weights().of(made)
    assert largest.found < 5000, "less than a row for every slot"


def test_no_operation_takes_the_time_of_the_dearest(monkeypatch):
    """Each takes all that it gets: the head, which was last, had a thirtieth."""
    clock, given = SimpleNamespace(now=0.0), {}
    monkeypatch.setattr(choose_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def greedy(case, device, dtype, budget, fresh):
        given[case.operation], clock.now = budget, clock.now + budget
        return Choice(case.operation, case.shape, "float32", "eager")

    monkeypatch.setattr(choose_module, "known_or_measured", greedy)
    choices = measure_kernels(small(), SETTING, budget=12.0).choices
    assert choices[0].operation == "attention" and choices[-1].operation == "linear_loss"
    assert list(given)[:2] == ["attention", "linear_loss"]
    assert given == {name: pytest.approx(4.0 if name in ("attention", "linear_loss") else 1.0) for name in given}


def test_a_difference_on_another_rank_or_no_memory_leaves_all_plain(monkeypatch):
    model, told = small(), []
    measured = _force(measure_kernels(model, SETTING, budget=9), "lean", "chunked")
    before = gradients(model)[0]

    def agree(differs):
        told.append(differs)
        return differs or "the loss of rank 1 would be another"

    chosen = install_kernels(model, SETTING, measured, agree)
    assert told == [None] and chosen.plain == "the loss of rank 1 would be another" and loss_head(model) is None
    for failure, words in (
        (torch.OutOfMemoryError("CUDA out of memory"), "no memory to hold the whole model against itself"),
        (RuntimeError("out of resource: shared memory"), "the model fails with what was chosen: out of resource"),
    ):
        monkeypatch.setitem(choose_module.IMPLEMENTATIONS, "chunked", fails_at(None, failure))
        assert words in install_kernels(model, SETTING, measured).plain
    assert loss_head(model) is None and gradients(model)[0] == before


def test_the_whole_models_gradients_are_never_all_there(monkeypatch):
    """Of a model that is about to be sharded one rank has no room for them."""
    model = small()
    gradients(model)
    held = [parameter.grad for parameter in model.parameters()]
    beside = []

    def spy(grad, real=whole.shortened):
        beside.append(sum(parameter.grad is not None for parameter in model.parameters()))
        return real(grad, whole_on="", sums=64)  # as on a GPU

    monkeypatch.setattr(whole, "shortened", spy)
    assert whole.whole_model_differs(model, lambda: None, CPU, torch.float32) is None
    assert beside == [0] * 2 * len(held)
    assert all(one is other.grad for one, other in zip(held, model.parameters(), strict=True)), "the parameters' own"

    def skewed():
        layer = model.model.layers[0].mlp
        layer.forward = lambda x, real=layer.forward: real(x) * 1.001 + 0.05 * x

    assert "would" in str(whole.whole_model_differs(model, skewed, CPU, torch.float32))


@pytest.mark.parametrize("fault", ["noise", "one row", "a constant", "one number"])
def test_sums_with_random_signs_are_as_far_apart_as_the_gradients(fault):
    grad = torch.randn(700, 97, generator=torch.Generator().manual_seed(1))
    other = grad.clone()
    if fault == "noise":
        other += 0.1 * torch.randn(700, 97, generator=torch.Generator().manual_seed(2))
    elif fault == "one row":
        other[333] *= 1.5
    else:
        (other if fault == "a constant" else other[5, 7]).add_(0.3)
    one, two = (whole.shortened(each, whole_on="", sums=4096) for each in (grad, other))
    assert one.numel() == 4096 and float((two - one).norm()) == pytest.approx(float((other - grad).norm()), rel=0.2)
    assert torch.equal(one, whole.shortened(grad, whole_on="", sums=4096))
    assert torch.equal(whole.shortened(grad), grad.flatten())


def test_sharding_casts_what_norms_and_head_are_measured_in():
    model, gpt, narrow = small(), small("gpt_neox"), torch.bfloat16
    for each in (model, gpt):
        plain, cast = (Setting(96, 0.5, narrow, CPU, "cpu", cast=cast) for cast in (None, narrow))
        kinds = {}
        for setting in (plain, cast):
            operations = choose_module._operations(each, setting)[0]
            cases = [operation.case({"rms_norm": "eager"}) for operation in operations]
            kinds[setting.cast] = {
                case.operation: {
                    x.dtype for x in case.inputs(4) if isinstance(x, torch.Tensor) and x.is_floating_point()
                }
                for case in cases
            }
            keys = {cache_key(case, "cpu", narrow) for case in cases}
            assert len(keys) == len(cases)
        assert all(found == {narrow} for found in kinds[narrow].values())
        norms = kinds[None].get("rms_norm") or kinds[None]["layer_norm"]
        assert norms == {torch.float32} and kinds[None]["linear_loss"] == {torch.float32, narrow}


def measure_untried(choice):
    return Chosen((choice,), (), 0.0).untried()


def test_tables_and_lengths_of_any_pack_meet_few_shapes_and_change_nothing():
    """P20: one shape a pack would be one compilation a pack."""
    from dataclasses import replace

    import numpy as np

    from headway.model.forward import bucketed_table

    def pack(documents, slots=8193):
        bounds = np.linspace(0, slots, documents + 1).astype(np.int32)
        base = _batch(320)
        ids = torch.zeros(1, slots, dtype=torch.int64)
        longest = int(np.diff(bounds).max())
        return replace(base, input_ids=ids, cu_seqlens=torch.from_numpy(bounds), max_seqlen=longest)

    packs = [pack(n) for n in range(1, 501)]
    tables = [bucketed_table(each) for each in packs]
    assert len({len(table) for table, _ in tables}) <= 4 and len({longest for _, longest in tables}) <= 8
    for each, (table, longest) in zip(packs, tables, strict=True):
        lengths = table.diff()
        assert torch.equal(lengths[lengths > 0], each.cu_seqlens.diff()) and table.dtype == torch.int32
        assert each.max_seqlen <= longest <= each.slots
    plain_shapes = {(len(each.cu_seqlens), each.max_seqlen) for each in packs}
    assert len(plain_shapes) > 400, "without buckets this would not show"
