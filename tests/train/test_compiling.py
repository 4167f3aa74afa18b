"""`train.compile: auto`: the decision by figures, on real layers with a counting compiler, and in whole runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from headway.config.load import load_run
from headway.model.forward import embedding_rows
from headway.model.kernels import measure
from headway.model.kernels.measure import compare
from headway.model.kernels.whole import _batch
from headway.model.load import load_model
from headway.model.precision import keep_wide
from headway.train import compiling
from headway.train.compiling import Decision, Length, decide, judged
from headway.train.fitting import typical_batch
from tiny import config, run_file
from train.running import history, losses, run

MOE = config(
    model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
)  # fmt: skip
LONG = Length(steps=10**7, micro_batches=2)


@pytest.mark.parametrize(
    ("eager", "compiled", "compile_s", "errors", "times", "on", "why"),
    [
        (1.0, 0.8, 30.0, (1e-6, 1e-6), 1000, True, "200 s won"),
        (1.0, 0.8, 30.0, (1e-6, 1e-6), 250, False, "the run wins 50 s, compiling takes 30 s"),  # twice, that is
        (1.0, 0.995, 0.0, (1e-6, 1e-6), 10**6, False, "995.0 ms compiled"),
        (1.0, 0.5, 1.0, (1e-6, 2e-4), 10**6, False, "WARNING: compiled layers are wrong by 2.0e-04"),
        (1.0, 0.5, 1.0, (1e-4, 2e-4), 10**6, True, "won in the run"),  # plain rounding is as bad
        (1.0, 0.5, 1.0, (1e-6, float("inf")), 10**6, False, "wrong by inf"),
        (1.0, 0.5, 1.0, (float("inf"), 1e-6), 10**6, False, "WARNING: the layers cannot be held against"),
        (1.0, 0.5, 1.0, (float("nan"), float("nan")), 10**6, False, "WARNING: the layers cannot be held against"),
    ],
)
def test_compiling_is_held_against_the_run_and_the_reference(eager, compiled, compile_s, errors, times, on, why):
    found = judged(eager, compiled, compile_s, errors, 1e-4, times)
    assert found.on is on and why in found.why


def small(**changes):
    return load_model(config=config(**changes), dtype="float32", attention="headway", seed=3)


def decided(model, known=None, length=LONG, exact=True):
    calls: list[str] = []
    batch = _batch(embedding_rows(model))
    found = decide(
        model, batch, length, torch.float32, known or {}, "cpu",
        exact=exact, plain=lambda: calls.append("plain"), fused=lambda: calls.append("fused"),
    )  # fmt: skip
    return found, calls


@pytest.mark.parametrize("fault", [None, "a scaled output", "it does not compile"])
def test_a_layer_is_compiled_compared_and_put_back(monkeypatch, fault):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        if fault == "it does not compile":
            raise RuntimeError("planted")
        if fault == "a scaled output":
            return lambda *given: [x * 1.001 if isinstance(x, torch.Tensor) else x for x in graph.forward(*given)]
        return graph.forward

    original = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: original(self, backend=backend))
    torch._dynamo.reset()
    model = small()
    found, calls = decided(model)
    torch._dynamo.reset()
    assert graphs and calls == ["plain", "fused"]
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    if fault is None:
        assert found.compiled_error < 1e-5 and found.eager_s > 0 and found.compile_s >= 0
    else:
        assert not found.on and ("wrong by" if fault == "a scaled output" else "compiling fails") in found.why


def test_a_router_kept_wide_has_its_gradient_in_the_wide_reference_too():
    """Its forward is the instance's: kept by a copy, it would use the weights of the layer that was copied."""
    model = load_model(config=MOE, dtype="float32", attention="headway", seed=3)
    assert keep_wide(model, ["*.gate"])
    block = model.model.layers[0]
    call = compiling.inputs_of(block, model, _batch(embedding_rows(model)))
    _, found = compiling.least_seconds(block, call, 1)
    expected = compiling._wide(block, call, torch.float32)  # torch's product of experts knows no float64
    assert compare(found, expected) < 1e-4
    zeroed = [torch.zeros_like(x) if x.shape == block.mlp.gate.weight.shape else x for x in found]
    assert compare(zeroed, expected) > 0.5, "the gradient that was left out"


def test_drawing_weights_is_not_in_a_layers_seconds(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(compiling, "time", fake)
    monkeypatch.setattr(measure, "time", fake)
    normal = measure.Dice.normal

    def slowly(dice, *shape):
        clock.now += 1.0
        return normal(dice, *shape)

    monkeypatch.setattr(measure.Dice, "normal", slowly)
    model = small()
    block = model.model.layers[0]
    call = compiling.inputs_of(block, model, _batch(embedding_rows(model)))
    seconds, _ = compiling.least_seconds(block, call, 1)
    assert seconds == 0.0 and clock.now == 1.0


def test_a_short_run_dropout_and_an_earlier_session_need_no_compiler(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: pytest.fail("compiled"))
    found, _ = decided(small(), length=Length(3, 1))
    assert not found.on and "3 steps could win back 0 s at the very best" in found.why
    dropping = small(model_type="phi3", pad_token_id=0, resid_pdrop=0.1)
    assert "dropout" in decided(dropping)[0].why
    assert "dropout" in decided(small(attention_dropout=0.1))[0].why, "no module, a number that a function is given"
    found = Decision(True, "it was faster")
    for _ in range(2):
        found, _ = decided(small(), compiling.as_record(found, "cpu"))
        assert found.on and found.why == "as in this run's first session: it was faster"
    assert not decided(small(), compiling.as_record(found, "another device"), Length(3, 1))[0].on


def test_a_run_writes_the_decision_down_and_trains_as_ever(tmp_path):
    path = run_file(tmp_path)
    run(path, "name=plain")
    done = run(path, "name=auto", "train.compile=auto", "log.quiet=false")
    assert "compile: off, 6 steps could win back" in done.out + done.err
    environment = json.loads((tmp_path / "runs" / "auto" / "environment.json").read_text())
    assert environment["compile"]["on"] is False and environment["compile"]["eager_s"] > 0
    assert losses(path, "auto") == losses(path, "plain")
    assert {line.recompiles for line in history(path, "auto").kept} == {0}


def test_the_typical_micro_batch_is_full_and_has_the_given_documents(tmp_path):
    packed = load_run(run_file(tmp_path)).config
    batch = typical_batch(packed, 320, [100, 50, 70])
    assert batch.cu_seqlens.tolist() == [0, 100, 150, 160] and batch.slots == 160
    assert typical_batch(packed, 320, [10]).cu_seqlens.tolist() == [0, 10, 160]
