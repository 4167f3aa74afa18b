"""`model.fuse: auto` in whole runs: the same losses as `none`, written down, counted honestly, on one rank and two."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from headway.config.optim import OptimConfig
from headway.config.parallel import ParallelConfig
from headway.model.kernels.case import Candidate, Case, Choice, Result
from headway.model.kernels.measure import choose, dtype_of
from headway.record.folder import RunFolder
from headway.train.decisions import KEY, known_decisions
from headway.train.fusing import _sharded
from headway.train.optim import build_optimizers, gradient_norms, scale_gradients
from headway.train.update_case import settled, update_cases
from tiny import run_file
from train.running import history, losses, run


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("parallel", "sharded"),
    [
        ({}, False),
        ({"fsdp": 2}, True),
        ({"ranks": 2}, True),
        ({"replicate": 2}, False),
        ({"ranks": 2, "replicate": 2}, False),
    ],
)
def test_a_run_of_many_ranks_is_measured_as_fsdp_will_cast_it(parallel, sharded):
    assert _sharded(ParallelConfig(**parallel)) is sharded


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


def names_of(environment):
    return {
        choice["operation"]: choice["chosen"] for choice in json.loads(environment.read_text())["kernels"]["choices"]
    }


def other_choices(names):
    """In place of measuring and of what was measured earlier: of every operation another right candidate, if any."""

    def planted(case, *_):
        able = [each.name for each in case.candidates if not each.compiles and each.cannot() is None]
        chosen = next((name for name in able if name != names[case.operation]), names[case.operation])
        results = tuple(Result(each.name, error=0.0, gradient_error=0.0) for each in case.candidates)
        return Choice(case.operation, case.shape, dtype_of(case), chosen, results)

    return planted


def test_a_resume_runs_the_kernels_of_its_checkpoint_whatever_is_measured_or_torn(tmp_path, monkeypatch):
    path = run_file(tmp_path, checkpoint={"every": 3}, model={"fuse": "auto"}, train={"compile": "auto"})
    run(path, "name=whole")
    whole = RunFolder(tmp_path / "runs" / "whole")
    names = names_of(whole.environment)
    monkeypatch.setattr("headway.model.kernels.choose.known_or_measured", other_choices(names))

    def resumed(name):
        folder = RunFolder(whole.root.with_name(name))
        shutil.copytree(whole.root, folder.root, symlinks=True)
        shutil.rmtree(next(folder.checkpoints.glob("step-00000006.*")))
        folder.environment.write_bytes(whole.environment.read_bytes()[:100])
        done = run(path, f"name={name}", "log.quiet=false")
        assert history(path, name).sessions[-1].start.resumed_from == 3
        return done.out + done.err, names_of(folder.environment), losses(path, name)

    said, found, curve = resumed("torn")
    assert "as in the session before" in said and "compile: off, as in this run's first session" in said
    assert found == names and curve == losses(path, "whole")
    monkeypatch.setattr("headway.train.build.known_decisions", lambda *_: {})
    said, found, curve = resumed("forgetful")
    assert "as in the session before" not in said and all(
        found[name] != names[name] for name in ("optimizer", "clipping")
    )
    assert curve[:3] == losses(path, "whole")[:3] and curve[3:] != losses(path, "whole")[3:]


def test_decisions_come_from_the_checkpoint_else_from_the_run_folder(tmp_path):
    def found(meta):
        return SimpleNamespace(store=SimpleNamespace(read_meta=lambda ref: meta), ref=SimpleNamespace(name="step-3"))

    environment, said = tmp_path / "environment.json", []
    mine, older = {"kernels": {"device": "here"}}, {"step": 3}
    assert known_decisions(environment, None, said.append) == {}, "a new run has none, and that is no news"
    assert known_decisions(environment, found({KEY: mine}), said.append) == mine and not said
    environment.write_text(json.dumps({"kernels": {"device": "there"}}))
    assert known_decisions(environment, found({KEY: mine}), said.append) == mine
    assert known_decisions(environment, found({KEY: {}}), said.append) == {}, "the session before fused nothing"
    assert known_decisions(environment, found(older), said.append)["kernels"]["device"] == "there" and not said
    environment.write_text("[1")
    assert known_decisions(environment, found(older), said.append) == {}
    assert "cannot be read" in said[0] and "step-3" in said[0]
