"""`model.fuse: auto` in whole runs: the same losses as `none`, written down, counted honestly, on one rank and two."""

from __future__ import annotations

import json

import pytest

from headway.record.folder import RunFolder
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
    assert {"linear_loss", "rms_norm", "gated_mlp", "rotary"} == {choice["operation"] for choice in choices}
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
