"""Every precision trains, follows float32, and keeps what is sensitive wide."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from guard.guard_helpers import on_ranks
from headway.account.errors import UserError
from headway.config.load import load_run
from headway.config.train import USUAL_SENSITIVE
from headway.model.kernels.case import Choice
from headway.model.kernels.choose import Chosen, Setting, copied_layer, fused_layers
from headway.model.kernels.measure import compare
from headway.model.kernels.whole import _batch
from headway.model.load import load_model
from headway.model.precision import keep_wide, sensitive_modules, unmatched, use_float8
from headway.parallel.device import Device, choose_device
from headway.parallel.mesh import Layout, build_mesh
from headway.parallel.wrap import wrap
from headway.train import assemble, decisions, float8
from headway.train.compiling import inputs_of
from headway.train.loss_scale import LossScale
from headway.train.optim import gradient_norms, scale_gradients
from headway.train.place import Place
from tiny import config, run_file
from train.running import history, losses, run

pytestmark = pytest.mark.timeout(600)
MOE = config(
    model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_file(tmp_path_factory.mktemp("precision"), train={"steps": 4}, checkpoint={"every": 2})


@pytest.fixture(scope="module")
def wide(path: Path) -> list[float]:
    # On a CPU float8_auto refuses, which leaves float32.
    run(path, "name=wide", "train.precision=float8_auto")
    refused = json.loads((path.parent / "runs" / "wide" / "environment.json").read_text())["float8"]
    assert not refused["on"] and "multiplies nothing in 8 bits" in refused["why"]
    return [line.nll or 0.0 for line in history(path, "wide").kept]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float8"])
def test_it_follows_float32_and_resumes_bitwise(path: Path, wide: list[float], precision: str) -> None:
    run(path, f"name={precision}", f"train.precision={precision}")
    kept = history(path, precision).kept
    assert [line.nll for line in kept] == pytest.approx(wide, rel=0.02)
    assert all((line.loss_scale is not None) == (precision == "float16") for line in kept)
    whole = losses(path, precision)
    for folder in (path.parent / "runs" / precision / "checkpoints").glob("step-00000004*"):
        folder.rename(folder.with_name(f"moved-{folder.name}"))
    run(path, f"name={precision}", f"train.precision={precision}")
    assert history(path, precision).sessions[-1].start.resumed_from == 2 and losses(path, precision) == whole


def router_under_fsdp(rank: int) -> tuple[float, list[torch.dtype]]:
    model = load_model(config=MOE, seed=0, attention="sdpa")
    assert all("gate" in name for name in keep_wide(model, ["*norm*", "*.gate"]))
    seen: list[torch.dtype] = []
    gate = model.model.layers[0].mlp.gate
    inner = gate.forward
    gate.forward = lambda *args: (seen.extend(p.dtype for p in gate.parameters()), inner(*args))[1]
    layout = Layout(1, 2)
    replicas = wrap(model, build_mesh(layout, "cpu"), layout, torch.bfloat16)
    out = replicas.call(input_ids=torch.arange(8)[None], use_cache=False).logits.float().square().sum()
    out.backward()
    assert gate.weight.grad is not None
    return float(out.detach()), seen


def test_a_router_under_fsdp_computes_in_float32_from_gathered_weights() -> None:
    found = on_ranks(2, router_under_fsdp)
    model = load_model(config=MOE, seed=0, attention="sdpa")
    expected = float(model(input_ids=torch.arange(8)[None], use_cache=False).logits.square().sum())
    assert all(value == pytest.approx(expected, rel=0.03) and seen == [torch.bfloat16] for value, seen in found)


def test_the_loss_scale_halves_on_overflow_doubles_when_quiet_and_is_saved_exactly() -> None:
    scale = LossScale("cpu")
    scale.update(torch.tensor(False))
    assert scale.state() == {"scale": 2.0**15, "good_steps": 0}
    for _ in range(1999):
        scale.update(torch.tensor(True))
    again = LossScale("cpu")
    again.load(scale.state())
    again.update(torch.tensor(True))
    assert again.state() == {"scale": 2.0**16, "good_steps": 0}


def test_gradients_are_unscaled_before_the_norm_is_told_and_clipped() -> None:
    layers = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    layers[0].weight.grad = torch.full((3, 3), 2.0)
    layers[1].weight.grad = torch.full((3, 3), 2.0 * 1024)
    plain = scale_gradients(gradient_norms(layers[0]), 1.0, None)
    scaled = scale_gradients(gradient_norms(layers[1]), 1.0, torch.tensor(1024.0))
    assert plain == scaled and bool(torch.isfinite(scaled))
    assert torch.allclose(layers[0].weight.grad, layers[1].weight.grad)
    layers[1].weight.grad.fill_(float("inf"))
    assert not torch.isfinite(scale_gradients(gradient_norms(layers[1]), 1.0, torch.tensor(1024.0)))


def test_sensitive_names_the_router_and_the_norms_but_not_the_head() -> None:
    names = set(sensitive_modules(load_model(config=MOE), ["*norm*", "*.gate", "lm_head"]))
    assert "model.norm" in names and "model.layers.0.mlp.gate" in names and "model.layers.1.input_layernorm" in names
    assert not any("lm_head" in name or "expert" in name or "q_proj" in name for name in names)
    with pytest.raises(UserError, match="q_porj names no module"):
        sensitive_modules(load_model(config=config()), ["q_porj"])


def test_a_pattern_that_protects_nothing_is_said(path: Path) -> None:
    """A typing error behind a star would take the protection away without a word; the default's own may match nothing."""
    model = load_model(config=config())
    assert unmatched(model, [*USUAL_SENSITIVE, "nrom*", "*norm*"]) == ["*router*", "*.gate", "nrom*"]
    half = load_run(path, ["train.precision=bfloat16", "train.sensitive=['nrom*', '*norm*']"]).config
    place = Place(choose_device("cpu"), Layout(), 0, torch.bfloat16)
    lines = assemble._precision(half, model, place, None, False)
    assert lines[-1] == "train.sensitive: nrom* names no module: it protects nothing"


def test_a_sensitive_layer_really_computes_in_float32_under_autocast() -> None:
    seen: dict[str, torch.dtype] = {}
    for patterns in ([], ["down_proj"]):
        model = load_model(config=config(), seed=0, attention="sdpa")
        kept = keep_wide(model, patterns)
        model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda m, a, out, key=str(bool(kept)): seen.update({key: out.dtype})
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.arange(8)[None], use_cache=False).logits.float().sum().backward()
        assert model.model.layers[0].mlp.down_proj.weight.grad is not None
    assert seen == {"False": torch.bfloat16, "True": torch.float32}


def test_norms_compute_in_float32_under_autocast_by_themselves() -> None:
    model = load_model(config=config(), seed=0)
    norm = model.model.layers[0].input_layernorm
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert torch.equal(found, norm(x)) and found.dtype == torch.float32


def test_float8_converts_the_layers_and_spares_the_sensitive_and_the_head() -> None:
    model = load_model(config=config(tie_word_embeddings=False))
    chosen = use_float8(model, ["*.down_proj"], emulate=True)
    assert len(chosen) == 2 * 6 and not any("down_proj" in name or "lm_head" in name for name in chosen)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] == "Float8Linear" and kinds["model.layers.0.mlp.down_proj"] == "Linear"
    # Else a number of slots that is no multiple of 16 ends the run on a card (the emulation takes any).
    assert model.model.layers[0].mlp.up_proj.linear_mm_config.grad_weight.pad_inner_dim
    with pytest.raises(UserError, match="finds no linear layer"):
        use_float8(load_model(config=config()), ["*"], emulate=True)


@pytest.mark.parametrize(
    ("bfloat16_s", "float8_s", "error", "on", "why"),
    [
        (1.10, 1.0, 0.03, True, "1.10 times as fast"),
        (1.05, 1.0, 0.03, False, "1.05 times as fast where 1.10 are asked for; bfloat16 is kept"),
        (2.0, 1.0, 0.7, False, "WARNING: a layer is wrong by 7.0e-01"),
        (2.0, 1.0, math.nan, False, "WARNING"),
        (2.0, 1.0, 0.0, False, "WARNING: the layer that was measured did not run in float8"),
    ],
)
def test_float8_must_be_clearly_faster_and_right(
    bfloat16_s: float, float8_s: float, error: float, on: bool, why: str
) -> None:
    found = float8.judged(bfloat16_s, float8_s, error)
    assert found.on is on and why in found.line()


def test_float8_auto_measures_a_layer_changes_nothing_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(config=config(), seed=0, attention="headway")
    settings = load_run(run_file(tmp_path), ["train.precision=float8_auto"]).config
    known: dict[str, Any] = {}
    device = Device("cpu", 0, "pretended card")
    setting = Setting(96, 0.5, torch.bfloat16, torch.device("cpu"), "pretended card")
    names = {"rms_norm": "lean", "residual_norm": "apart", "gated_mlp": "lean", "rotary": "lean"}
    kernels = Chosen(tuple(Choice(name, "", "bfloat16", chosen) for name, chosen in names.items()), (), 0.0)
    fused_layers(model, setting, kernels)

    def copied(block: torch.nn.Module) -> torch.nn.Module:
        """Fused as the run's layers are; the copy's own weights are asked, not the original's."""
        return copied_layer(block, model, setting, kernels)

    real = float8.least_seconds

    def timed(block: torch.nn.Module, call: Any, turns: int) -> Any:
        narrow = any(type(m).__name__ == "Float8Linear" for m in block.modules())
        return (1.0 if narrow else 1.3), real(block, call, turns)[1]

    def decide() -> float8.Float8:
        return float8.decide_float8(settings, model, lambda: _batch(320), device, known, copied)

    assert "multiplies nothing in 8 bits" in decide().line() and not decide().on
    monkeypatch.setattr(float8, "cannot", lambda config, device: None)
    monkeypatch.setattr(float8, "least_seconds", timed)
    found = decide()
    assert found.on and "1.30 times as fast" in found.why and found.error is not None and 0 < found.error < 0.2
    assert not any(type(m).__name__ == "Float8Linear" for m in model.modules())
    block = model.model.layers[0]
    call = inputs_of(block, model, _batch(320))
    for plain in (copied_layer(block, model, setting, None), copied_layer(block, model, setting, kernels)):
        assert compare(real(plain, call, 1)[1], real(block, call, 1)[1]) < 1e-4
        with torch.no_grad():
            plain.mlp.down_proj.weight.zero_()
            plain.self_attn.o_proj.weight.zero_()
        assert torch.equal(plain(*call[0], **call[1]), call[0][0]), "nothing but the residual stream is left"
    monkeypatch.setattr(float8, "linear_to_float8", lambda *args, **kwargs: ["planted"])
    assert "did not run in float8" in decide().why
    known |= float8.as_record(found, device.name)
    monkeypatch.setattr(float8, "cannot", lambda config, device: "another machine's mood")
    assert decide().on and decide().why.startswith(decisions.FIRST), "a resume keeps what the run began with"
    known |= float8.as_record(found, "another card")
    assert not decide().on
