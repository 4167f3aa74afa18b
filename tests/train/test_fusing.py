"""`model.fuse: auto` in whole runs: the same losses as `none`, written down, counted honestly, on one rank and two."""

from __future__ import annotations

import json

import pytest
import torch

from headway.config.optim import OptimConfig
from headway.model.kernels.case import Candidate, Case
from headway.model.kernels.measure import choose
from headway.record.folder import RunFolder
from headway.train.optim import build_optimizers, gradient_norms, scale_gradients
from headway.train.update_case import settled, update_cases
from tiny import run_file
from train.running import history, run


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))


def values(path, name):
    return [(line.loss, line.grad_norm) for line in history(path, name).kept]


@pytest.mark.parametrize("changes", [(), ("train.loss.z_loss=1e-3", "train.loss.label_smoothing=0.1")])
def test_fused_and_plain_runs_have_the_same_losses_and_gradient_norms(tmp_path, changes):
    path = run_file(tmp_path, eval={"holdout": 4, "every": 3})
    run(path, "name=plain", *changes)
    done = run(path, "name=fused", "model.fuse=auto", "log.quiet=false", *changes)
    assert "kernels: " in done.out + done.err
    for (one, norm), (other, other_norm) in zip(values(path, "plain"), values(path, "fused"), strict=True):
        assert other == pytest.approx(one, rel=2e-5) and other_norm == pytest.approx(norm, rel=1e-4)
    plain, fused = history(path, "plain"), history(path, "fused")
    for one, other in zip(plain.kept, fused.kept, strict=True):
        assert other.flops.useful < one.flops.useful and other.trained_tokens < other.tokens
    environment = json.loads(RunFolder(tmp_path / "runs" / "fused").environment.read_text())
    choices = environment["kernels"]["choices"]
    operations = {
        "attention",
        "linear_loss",
        "rms_norm",
        "residual_norm",
        "gated_mlp",
        "rotary",
        "optimizer",
        "clipping",
    }
    assert operations == {choice["operation"] for choice in choices}
    assert all(
        result["reason"] or result["name"] == choice["chosen"] for choice in choices for result in choice["results"]
    )


@pytest.mark.parametrize("layout", ["parallel.fsdp=2", "parallel.replicate=2"])
def test_two_ranks_use_what_rank_0_chose(tmp_path, layout):
    path = run_file(tmp_path, train={"steps": 3})
    run(path, "name=plain")
    run(path, "name=fused", "model.fuse=auto", "parallel.ranks=2", layout)
    for (one, norm), (other, other_norm) in zip(values(path, "plain"), values(path, "fused"), strict=True):
        assert other == pytest.approx(one, rel=2e-5) and other_norm == pytest.approx(norm, rel=1e-4)


def test_fused_rectangles_and_lora_train_as_plain_ones(tmp_path):
    path = run_file(tmp_path, train={"steps": 3}, data={"pack": "none", "rows": 4}, model={"lora": {"rank": 4}})
    run(path, "name=plain", "model.attention=sdpa")
    run(path, "name=fused", "model.attention=sdpa", "model.fuse=auto")
    for (one, norm), (other, other_norm) in zip(values(path, "plain"), values(path, "fused"), strict=True):
        assert other == pytest.approx(one, rel=2e-5) and other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_is_measured_and_a_wrong_optimizer_is_found(dtype, monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 1)).to(dtype)
    cases = update_cases(module, OptimConfig(lr=1e-3))
    found = {case.operation: choose(case, 9) for case in cases}
    assert found["optimizer"].chosen in ("eager", "foreach", "fused") and found["clipping"].chosen in (
        "eager",
        "foreach",
    )
    assert not any(r.wrong for choice in found.values() for r in choice.results)
    optimizer = cases[0]

    def without_decay(*tensors):
        return update_cases(module, OptimConfig(lr=1e-3, weight_decay=0.0))[0].candidates[2].run(*tensors)

    planted = Case(
        "optimizer", "", [optimizer.candidates[0], Candidate("wrong", without_decay)], optimizer.inputs, 1, 1
    )
    assert choose(planted, 9).results[1].wrong


def test_without_time_the_update_stays_as_it_is():
    choices = [settled(choose(case, 0.0)) for case in update_cases(torch.nn.Linear(9, 9), OptimConfig(lr=1e-3))]
    assert [choice.chosen for choice in choices] == ["fused", "foreach"]


def test_any_implementation_makes_the_same_updates():
    def after(adamw, clipping):
        torch.manual_seed(0)
        module = torch.nn.Linear(20, 30)
        optimizers = build_optimizers(module, OptimConfig(lr=1e-2, weight_decay=0.5), adamw)
        for _ in range(3):
            optimizers.zero_grad()
            module(torch.ones(4, 20)).square().sum().backward()
            norms = gradient_norms(module, clipping)
            total = scale_gradients(norms, 1.0, None, clipping)
            optimizers.step(torch.isfinite(total))
        return module.weight.detach(), optimizers.skips_on_device

    weight, skips = after("fused", "foreach")
    assert skips
    for other in (after("eager", "eager"), after("foreach", "eager")):
        assert torch.allclose(other[0], weight, atol=1e-6) and not other[1]
