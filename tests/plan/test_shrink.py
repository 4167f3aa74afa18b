"""The small run that stands for a large one: what it keeps, what correcting by it does, and what bad input gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from headway.account.account import Account
from headway.account.errors import UserError
from headway.account.events import Flops, SessionStart, StepLine, TraceLine
from headway.account.shape import ModelShape
from headway.account.tree import STEP
from headway.cli.main import _join_commands, _run
from headway.plan.cluster import load_cluster
from headway.plan.layout import Layout
from headway.plan.measured_run import MeasuredRun, read_measured
from headway.plan.predict import predict
from headway.plan.read_back import correct
from headway.plan.shrink import Shrunk, shrink, small_config
from headway.plan.workload import Workload, load_config
from headway.record.jsonl import JsonlWriter

LARGE = Layout(dp=64, tp=4, pp=4, vpp=10)


def shrunk(
    gpus: int = 16, model: str = "llama3-70b", layout: Layout = LARGE, seq: int = 8192, batch: int = 512
) -> Shrunk:
    config = load_config(model)[1]
    cluster = load_cluster(f"H100x{layout.gpus}")
    work = Workload(ModelShape.from_config(config), seq, batch, "bf16", model)
    return shrink(config, predict(work, layout, cluster), cluster.with_gpus(gpus))


@pytest.mark.parametrize(
    ("model", "layout", "batch"),
    [
        ("llama3-70b", LARGE, 512),
        ("llama3.1-405b", Layout(dp=32, tp=8, cp=2, pp=8, vpp=4, recompute="selective"), 1024),
        ("mixtral-8x7b", Layout(dp=128, ep=8, pp=2, vpp=8), 512),
        ("llama3-8b", Layout(dp=256, zero=3, recompute="full"), 512),
    ],
)
def test_the_small_run_shows_the_large_ones_breakdown(model: str, layout: Layout, batch: int) -> None:
    found = shrunk(32, model, layout, batch=batch)
    large, small = found.target, found.small
    assert found.distance < 0.06
    assert (small.layout.tp, small.layout.cp, small.layout.micro_batch) == (layout.tp, layout.cp, layout.micro_batch)
    assert small.workload.shape.hidden == large.workload.shape.hidden and small.layout.recompute == layout.recompute
    assert small.cluster.gpus == small.layout.gpus == 32 and small.memory.fits
    for term, one, other, why in found.lost():
        assert abs(one - other) > 0.01 and why, term
    assert sum(share for _, share, _ in found.shares()) == pytest.approx(1)


def test_tensor_parallel_time_per_layer_and_micro_batch_is_the_same() -> None:
    found = shrunk()
    per = [
        one.terms["tp"] / one.facts["layers_on_slowest_stage"] / one.facts["micro_batches"]
        for one in (found.target, found.small)
    ]
    assert per[0] == pytest.approx(per[1])


def test_a_planted_other_model_is_not_called_alike() -> None:
    found = shrunk()
    other = predict(found.small.workload, replace(found.small.layout, recompute="full"), found.small.cluster)
    assert Shrunk(found.target, other, found.config).distance > 2 * found.distance


def test_the_config_is_the_small_model() -> None:
    found = shrunk(16, "deepseek-v3", Layout(dp=32, tp=8, ep=64, pp=4, vpp=5, micro_batch=2), 4096, 2048)
    assert ModelShape.from_config(found.config) == found.small.workload.shape
    large = found.target.workload.shape
    assert found.config["n_routed_experts"] / found.small.layout.ep == 256 / 64
    assert len(found.small.workload.shape.layers) < len(large.layers)
    listed = small_config({"num_hidden_layers": 4, "layer_types": list("abcd"), "mlp_only_layers": [0, 3]}, 2, 0, 10)
    assert listed["layer_types"] == ["a", "b"] and listed["mlp_only_layers"] == [0] and listed["vocab_size"] == 10


def test_what_cannot_be_shrunk_says_why() -> None:
    with pytest.raises(UserError, match=r"tp·cp = 16 must divide it.*nearest: 16"):
        shrunk(8, "llama3.1-405b", Layout(dp=32, tp=8, cp=2, pp=8))
    with pytest.raises(UserError, match="give fewer"):
        shrunk(2048)


def as_measured(account: Account) -> MeasuredRun:
    return MeasuredRun(account, 10, account.wall_ns / 1.1e9, account.wall_ns / 0.9e9)


def test_a_small_run_that_is_as_predicted_leaves_the_large_prediction() -> None:
    found = shrunk()
    better = correct(found, as_measured(found.small.account))
    assert better.step_s == pytest.approx(found.target.step_s, rel=1e-6)
    assert better.low_s < better.step_s < better.high_s


def test_a_planted_slow_link_in_the_small_run_is_carried_to_the_large_one() -> None:
    found = shrunk()
    parts = {k: v for k, v in found.small.account.parts.items() if k != "unaccounted"}
    parts["comm.tp"] *= 3
    better = correct(found, as_measured(Account.close(STEP, sum(parts.values()), parts)))
    assert better.step_s == pytest.approx(found.target.step_s + 2 * found.target.terms["tp"], rel=1e-4)
    (line,) = [line for line in better.lines if line.path == "comm.tp"]
    assert line.ratio == pytest.approx(3, rel=1e-6)


def test_a_clock_that_cannot_see_communication_is_compared_with_the_sum() -> None:
    found = shrunk()
    compute = sum(ns for path, ns in found.small.account.parts.items() if not path.startswith(("host", "unaccounted")))
    parts = {"compute.backward": 2 * compute, "host.other": found.small.account.total("host"), "data": compute // 10}
    better = correct(found, as_measured(Account.close(STEP, sum(parts.values()), parts)))
    lines = {line.path: line for line in better.lines}
    assert lines["compute.backward"].ratio == pytest.approx(2, rel=1e-6)
    assert lines["data"].target_predicted == 0 < lines["data"].target_corrected
    assert sum(line.target_corrected for line in better.lines) == pytest.approx(better.step_s)


def step(number: int, wall: int, account: dict[str, int]) -> StepLine:
    return StepLine(
        session=1, step=number, time=0.0, epoch=0, documents=0, loss=1.0, nll=1.0, grad_norm=1.0, lr=1e-3, sequences=4,
        slots=4096, tokens=4000, trained_tokens=4000, wall_ns=wall, account=account, flops=Flops(), run_ns={}, micro_batches=2,
    )  # fmt: skip


def run_folder(path: Path, *more: object) -> Path:
    path.mkdir()
    writer = JsonlWriter(path / "metrics.jsonl")
    start = SessionStart(session=1, time=0.0, resumed_from=0, world_size=16, steps=10, device="NVIDIA H100 80GB HBM3")
    lines = [step(n, 10**9 if n else 10**11, {"compute.backward": 6 * 10**8, "data": 10**8}) for n in range(10)]
    for line in (start, *lines, *more):
        writer.append(line)  # type: ignore[arg-type]
    writer.close()
    return path


def test_a_run_folder_is_its_mean_step_without_the_first(tmp_path: Path) -> None:
    found = read_measured(run_folder(tmp_path / "run"))
    assert found.step_s == 1.0 and found.steps == 8 and found.gpus == 16 and found.slots == 4096
    assert found.account.parts == {"compute.backward": 6 * 10**8, "data": 10**8, "unaccounted": 3 * 10**8}
    trace = TraceLine(
        session=1,
        step=5,
        time=0.0,
        traced_steps=3,
        path="t",
        wall_ns=4 * 10**9,
        account={"comm.dp": 10**9, "compute": 3 * 10**9},
    )
    split = read_measured(run_folder(tmp_path / "traced", trace)).account
    assert split.wall_ns == 10**9 and split.total("comm.dp") == 25 * 10**7


def test_files_that_hold_no_account_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("{")
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "open").write_text('{"tree": "step", "wall_ns": 5, "parts": {"data": 9}}')
    (tmp_path / "run").write_text('{"tree": "run", "wall_ns": 5, "parts": {"productive": 5}}')
    for name, says in (
        ("empty", "no metrics.jsonl"),
        ("text", "not JSON"),
        ("list", "no account"),
        ("open", "does not close"),
        ("run", "account of a step"),
        ("none", "no such file"),
    ):
        with pytest.raises(UserError, match=says):
            read_measured(tmp_path / name)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _join_commands()
    base = ["plan", "shrink", "--target", "llama3-8b", "--cluster", "H100x64", "--fix", "tp=2,pp=1,micro_batch=1"]
    config = tmp_path / "small.json"
    assert _run([*base, "--json", "--write-config", str(config)], debug=False) == 0
    content = json.loads(capsys.readouterr().out)
    assert json.loads(config.read_text()) == content["small_config"]
    assert content["small_config"]["max_position_embeddings"] >= 8192  # else transformers takes the family's default
    account = tmp_path / "account.json"
    account.write_bytes(orjson.dumps(content["small"]))
    losses = tmp_path / "losses.csv"
    rows = [(n, d, 1.7 + 400 / n**0.34 + 410 / d**0.28) for n in (1e8, 2e8, 4e8) for d in (1e9, 3e9, 9e9)]
    losses.write_text("N,D,loss\n" + "\n".join(",".join(map(str, row)) for row in rows))
    more = ["--measured", str(account), "--lr", "1e-3", "--losses", str(losses), "--tokens", "1e12"]
    assert _run([*base, *more], debug=False) == 0
    out = capsys.readouterr().out
    step_s = f"step {content['target']['step_s']:.3f} s"
    assert f"target corrected: {step_s}" in out and "never preserved: failures" in out
    assert "matrices inside layers" in out and "loss: L = 1.7 + 400 / N^0.340" in out
    for wrong, says in (
        (["--losses", str(losses)], "--losses needs --tokens"),
        (["--proxy", "llama3.2-1b"], "--proxy needs --lr"),
        (["--lr", "-1"], "'--lr': -1"),
        (["--measured", str(tmp_path / "no")], "no such file"),
        (["--gpus", "3"], "must divide it"),
    ):
        assert _run([*base, *wrong], debug=False) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
