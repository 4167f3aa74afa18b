"""What a newcomer typed and got an answer to that he should not have: each ends in one line that names the key."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headway.account.account import Account
from headway.account.checkpoint_interval import exact
from headway.account.errors import UserError
from headway.account.tree import STEP
from headway.cli.main import _join_commands, _run
from headway.plan.bench_file import check_measured, cluster_keys
from headway.plan.cluster import load_cluster
from headway.plan.constants import default_constants
from headway.plan.layout import Layout
from headway.plan.measured_run import MeasuredRun
from headway.plan.predict import predict
from headway.plan.read_back import check_small
from headway.plan.reading import yaml_of
from headway.plan.rows import make_case
from headway.plan.shrink import shrink
from headway.plan.workload import Workload, load_config, load_model

_join_commands()


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = _run(["plan", *words], debug=False)
    said = capsys.readouterr()
    return code, said.out, said.err


CLAIM = ("device=H100", "gpus=8", "parameters=8e9", "global_batch=128", "seq=8192")


@pytest.mark.parametrize(
    ("words", "bad"),
    [
        ((*CLAIM, "step_s=0.1"), True),
        ((*CLAIM, "step_s=13", "account.compute=5"), True),  # 49 % of the step, 127 % of its compute
        ((*CLAIM, "step_s=13", "later_step_s=2"), True),
        ((*CLAIM, "step_s=13"), False),
    ],
)
def test_more_than_the_peak_is_a_contradiction(
    words: tuple[str, ...], bad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "check-claim", *words)
    assert code == bad and ("no device runs above its peak" in out) == bad


def bench(**changes: object) -> list[dict[str, object]]:
    return [{"op": "all_reduce", "ranks": 16, "nodes": 2, "bytes": 2**30, "seconds": 6e-3, **changes}]


def test_a_ring_over_whole_nodes_uses_all_their_ports() -> None:
    c = default_constants()
    per_gpu = 2 * 15 / 16 * 2**30 / 6e-3 / 8 / 1e9
    assert cluster_keys(bench(), c, "x")["inter_node_gbs"] * c.inter == pytest.approx(per_gpu)
    alone = cluster_keys(bench(ranks=2, seconds=25e-3), c, "x")["inter_node_gbs"]  # one rank a node: one port
    assert alone * c.inter == pytest.approx(2**30 / 25e-3 / 1e9)
    tokens = cluster_keys(bench(op="all_to_all", seconds=12e-3), c, "x")["inter_node_gbs"]
    assert tokens * c.inter == pytest.approx(2**29 / 12e-3 / 1e9)  # half of it leaves the node, each rank its own


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"device": "AMD EPYC 9354", "dtype": "bf16", "flops": 1e11}], "EPYC.* --cluster says H100-SXM-80GB"),
        ([{"device": "NVIDIA A100-SXM4-80GB", "dtype": "bf16", "flops": 2e14}], "which is A100-SXM-80GB"),
        ([{"device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", "flops": 5e15}], "measured_bf16_tflops of 5,000"),
        ([{"device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", "flops": 7e14, "bandwidth": 9e12}], "bandwidth_gbs"),
        (bench(nodes=1, ranks=8, backend="gloo"), "over gloo"),
        (bench(seconds=6e-5), "inter_node_gbs of"),
    ],
)
def test_measurements_of_another_machine_are_refused(entries: list[dict], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_measured(entries, cluster_keys(entries, default_constants(), "x"), load_cluster("H100x16"), "x")


def test_measurements_of_this_machine_are_taken() -> None:
    mine = [
        {"device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", "flops": 7e14, "bandwidth": 3.0e12},
        *bench(backend="nccl"),
    ]
    check_measured(mine, cluster_keys(mine, default_constants(), "x"), load_cluster("H100x16"), "x")


def test_outputs_that_are_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe stands for a device: a page is renamed into place, which would have put a file where /dev/null was."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    mine = tmp_path / "mine.yaml"
    mine.write_text("device: H100\ngpus: 8\n")
    base = ("--model", "llama3-8b", "--cluster", str(mine), "--global-batch", "64")
    for words, says in (
        ((*base, "--html", str(pipe)), "no regular file"),
        ((*base, "--html", "/headway-no-such-folder/page.html"), "make it first"),
        ((*base, "--html", str(mine)), "is one of the files to read"),
        (("shrink", "--target", "llama3-70b", "--cluster", "H100x64", "--write-config", str(mine)), "this file exists"),
        (("calibrate", str(mine), "--out", str(mine)), "is one of the files to read"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2 and says in err and err.count("\n") == 1
    assert mine.read_text().startswith("device") and pipe.is_fifo() and not Path("/headway-no-such-folder").exists()


@pytest.mark.parametrize("words", [("--save", "1e9"), ("--software", "1e6"), ("--lag", "1e9"), ("--rate", "0")])
def test_goodput_at_the_ends(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "goodput", *words)
    assert "inf" not in out and (code == 0 or (code == 2 and err.count("\n") == 1))
    assert exact(1e9, 1.0) == 1.0


def test_a_simulation_is_bounded_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.plan.goodput_report._EVENTS", 2_000)
    code, out, _ = run(capsys, "goodput", "--gpus", "100000", "--rate", "0.001", "--days", "3000", "--simulate")
    assert code == 0 and "2,000 events" in out and "cut off after" in out


def test_layers_without_end_are_a_typing_error() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 100,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    with pytest.raises(UserError, match="'num_hidden_layers' is 1000000000; give at most 10,000"):
        load_model({**config, "num_hidden_layers": 10**9})


BASE = ("--model", "llama3-8b", "--cluster", "H100x16", "--global-batch", "64")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "llama3-8b", "--cluster", "A100x8", "--precision", "fp8"), "A100-SXM-80GB has no fp8 units; it has bf16, fp16"),
        (("--model", "llama3-8b", "--cluster", "V100x8", "--precision", "bf16"), "has no bf16 units; it has fp16"),
        (("sweep", *BASE[:4], "--gpus", "8", "--precision", "fp4"), "has no fp4 units"),
        ((*BASE, "--fix", "dp=16,shard=3"), "shard=3 does not divide dp·cp = 16 replicas; nearest: 1, 2, 4"),
        ((*BASE, "--fix", "dp=16,shard=64"), "shard=64 does not divide"),
        ((*BASE, "--fix", "pp=1,vpp=2"), "pp=1 has none; nearest: vpp=1"),
        ((*BASE, "--fix", "pp=1,schedule=dualpipe"), "schedule=dualpipe needs a pipeline"),
        ((*BASE, "--fix", "pp=4,vpp=2,schedule=zero-bubble"), "has chunks of its own"),
        ((*BASE, "--fix", "pp=16,vpp=8"), "pp=16 × vpp=8 is more than 32 layers; nearest: vpp=2"),
        ((*BASE[:2], "--cluster", "H100x8x8"), "two numbers; give all GPUs at once"),
        ((*BASE, "--seq", "4096", "--mean-square", "8192"), "mean_square 8192 is more than seq 4096"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and says in err and err.count("\n") == 1


def test_what_means_nothing_is_said_and_the_schedule_is_in_the_label(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *BASE, "--fix", "dedup=true,pp=4,schedule=dualpipe", "--top", "1")
    assert code == 0 and "dedup=true changes nothing in this plan: it needs experts" in out and "pp 4 dualpipe" in out
    code, out, _ = run(capsys, "explain", *BASE, "--fix", "recompute=full")
    assert code == 0 and "changes nothing" not in out
    whole = ("--fix", "dp=16,shard=16,zero=3,recompute=full,micro_batch=1")
    code, out, _ = run(capsys, "explain", *BASE, *whole, "--json")
    assert json.loads(out)["without_effect"] == [
        "shard=16 changes nothing in this plan: it needs more replicas than that"
    ]


def test_suggestions_are_near_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    for fix, says in (
        ("foo=3", "no such key; e.g. tp, pp"),
        ("vp=2", "nearest: vpp"),
        ("schedule=gpipe", "known: 1f1b, zero-bubble, dualpipe"),
        ("schedule=dualpip", "nearest: dualpipe"),
    ):
        code, _, err = run(capsys, *BASE, "--fix", fix)
        assert code == 2 and says in err and err.count("\n") == 1
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "vocab_size": 9,
        "num_attention_heads": 8,
        "intermediate_size": 64,
    }
    config |= {"num_hidden_layers": 2, "num_key_value_heads": 3, "num_local_experts": 2, "num_experts_per_tok": 4}
    for changes, says in (
        ({}, "num_key_value_heads=3 groups; nearest: 1, 2, 4"),
        ({"num_key_value_heads": 4}, "=4 of num_local_experts=2"),
    ):
        with pytest.raises(UserError, match=says):
            load_model(config | changes)


def test_keys_given_twice(tmp_path: Path) -> None:
    cluster, config = tmp_path / "c.yaml", tmp_path / "config.json"
    cluster.write_text("device: H100\ngpus: 8\ngpus: 64\n")
    config.write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}')
    for read, path, says in (
        (load_cluster, cluster, "'gpus' is given twice, in lines 2 and 3"),
        (load_model, config, "'hidden_size' is given twice"),
    ):
        with pytest.raises(UserError, match=says):
            read(str(path))
    cluster.write_text("device: H100\ngpus: 8\nrail: " + "[" * 3000)
    with pytest.raises(UserError, match="not YAML"):
        load_cluster(str(cluster))
    qwen = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "vocab_size": 9,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    with pytest.raises(UserError, match="layer_types has 3 entries for 16 layers"):
        load_model({**qwen, "num_hidden_layers": 16, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize("value", ["2026-02-30", "!!timestamp today", "!!bool maybe", "!!int x", "[1", "@x"])
def test_values_that_yaml_cannot_make_are_one_line(value: str) -> None:
    with pytest.raises(UserError, match=r"^x: not YAML \(") as refused:
        yaml_of(f"gpus: {value}", "x")
    assert "\n" not in str(refused.value)


def test_aliases_are_looked_at_once_each() -> None:
    """Thirty anchors that each hold the last one twice: 2^30 nodes for whoever follows every alias."""
    lines = ["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30))]
    assert len(yaml_of("\n".join(lines), "x")) == 30


def test_rows_that_contradict_themselves_are_not_judged() -> None:
    row = {"model": "llama3-8b", "gpu": "H100", "gpus": "64", "tp": "2", "pp": "2", "dp": "16", "micro_batch": "1"}
    row |= {"seq_len": "8192", "global_batch": "64", "step_time_s": "5"}
    assert make_case(row).flag == ""
    assert make_case(row | {"dp": "8"}).flag == "dp·tp·pp·cp = 32 is not its 64 GPUs"
    assert make_case(row | {"dp": "8", "cp": "2"}).flag == "" and make_case(row | {"cp": "2"}).flag == ""  # both habits
    assert make_case(row | {"micro_batch": "8"}).flag == "dp·micro_batch = 128 is more than its global_batch of 64"


def test_dualpipe_hides_the_all_to_all_beside_the_other_direction() -> None:
    """What exceeds the computation shows whole; what is hidden costs the kernels its contention."""
    work, cluster = Workload(load_model("deepseek-v3")[1], 4096, 15360, "fp8"), load_cluster("H800x2048")
    layout = Layout(dp=128, pp=16, ep=64, recompute="selective", dedup=True)
    plain, paired = (predict(work, replace(layout, schedule=one), cluster) for one in ("1f1b", "dualpipe"))
    c = default_constants()
    sent = plain.terms["ep"] / c.ep_network
    window = plain.terms["forward"] + plain.terms["backward"]  # a little of it is the head's, on the last stage
    assert paired.terms["ep"] == pytest.approx(sent - (1 - c.contention) * min(sent, window), rel=0.02)
    fast = replace(cluster, inter_node=10 * cluster.inter_node)
    hidden = predict(work, replace(layout, schedule="dualpipe"), fast).terms["ep"]
    assert hidden == pytest.approx(c.contention * predict(work, layout, fast).terms["ep"] / c.ep_network, rel=1e-6)


def test_a_measured_run_must_be_the_small_one() -> None:
    work = Workload(load_model("llama3-70b")[1], 8192, 512)
    target = predict(work, Layout(dp=16, tp=8, pp=8, vpp=5), load_cluster("H100x1024"))
    found = shrink(load_config("llama3-70b")[1], target, load_cluster("H100x16"))
    small = found.small
    seen = MeasuredRun(
        small.account, 10, small.step_s, small.step_s, 16, "NVIDIA H100 80GB HBM3", small.workload.tokens
    )
    check_small(found, seen, small.workload.shape.parameters, "x")
    for changes, parameters, says in (
        ({"gpus": 8}, None, "8 GPUs, not 16"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, None, "A100.*not H100-SXM-80GB"),
        ({"slots": 4096.0}, None, "4,096 token slots"),
        ({}, 70_000_000_000, "70,000,000,000 parameters"),
        ({"account": Account.close(STEP, 10**12, {"compute": 10**12})}, None, "not the small run"),
    ):
        with pytest.raises(UserError, match=says):
            check_small(found, replace(seen, **changes), parameters, "x")


def test_memory_is_told_by_what_decides(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "--model", "llama3-8b", "--cluster", "H100x8", "--global-batch", "64")
    line = next(one for one in out.splitlines() if one.startswith("memory: needs"))
    needs, there, *parts = map(float, re.findall(r"\d+\.\d", line))
    assert code == 0 and needs <= there and sum(parts) == pytest.approx(needs, abs=0.3) and "(fits)" in line
    shown = float(re.search(r"report up to ([\d.]+)", out)[1])  # type: ignore[index]
    assert shown <= there and "of the BF16 peak" in out
    sharded = predict(Workload(load_model("llama3-8b")[1], 4096, 64), Layout(dp=8, zero=3), load_cluster("H100x8"))
    assert next(name for name, _ in sharded.memory.lines()) == "parameters"
    assert sum(size for _, size in sharded.memory.lines()) == pytest.approx(sharded.memory.needed)
