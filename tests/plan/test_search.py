"""The search and its commands: plans run and fit, reasons are said, bad input is one line."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.cli.main import main
from headway.plan.answer import Question, answer
from headway.plan.cluster import Cluster, cluster_from, devices, find_device, load_cluster
from headway.plan.cluster_keys import KEYS, NUMBERS
from headway.plan.explain import loses
from headway.plan.layout import Layout, problems
from headway.plan.predict import predict
from headway.plan.search import HEADROOM, NothingFits, search
from headway.plan.workload import Workload, load_model


def job(model: str = "llama3-8b", batch: int = 64, seq: int = 4096) -> Workload:
    return Workload(load_model(model)[1], seq, batch, "bf16", model)


def test_found_plans_run_fit_and_are_in_order() -> None:
    cluster = load_cluster("H100x16")
    found = search(job(), cluster)
    assert found.plans and found.priced > 20
    steps = [one.step_s for one in found.plans]
    assert steps == sorted(steps)
    for one in found.plans:
        assert not problems(one.layout, one.workload.shape, cluster, 4096, 64)
        assert one.memory.needed <= HEADROOM * one.memory.capacity


def slowest_way(work: Workload, cluster: Cluster, ways: dict[str, tuple[object, ...]]) -> float:
    """The step of the best plan by pricing all of them; every number of chunks that `problems` lets pass."""
    best = float("inf")
    layers, batch = len(work.shape.layers), work.global_batch
    for values in itertools.product(*ways.values(), range(1, layers + 1)):
        layout = Layout(**dict(zip([*ways, "vpp"], values, strict=True)))
        if cluster.gpus % (layout.tp * layout.pp * layout.cp):
            continue
        layout = replace(layout, dp=cluster.gpus // (layout.tp * layout.pp * layout.cp), overlap_tp=layout.tp > 1)
        if problems(layout, work.shape, cluster, work.seq, batch):
            continue
        if (layout.vpp > 1 and layout.micro_batches(batch) % layout.pp) or (
            layout.zero == 3 and (layout.pp > 1 or layout.replicas == 1)
        ):
            continue
        one = predict(work, layout, cluster)
        if one.memory.needed <= HEADROOM * one.memory.capacity:
            best = min(best, one.step_s)
    return best


def test_the_best_plan_is_that_of_a_slow_exhaustive_loop() -> None:
    cluster, work = load_cluster("H100x8"), job()
    ways = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "micro_batch": (1, 2, 3, 4, 6, 8, 12, 16), "zero": (1, 3)}
    ways |= {"recompute": ("none", "selective", "full"), "cp": (1, 2)}
    assert search(work, cluster).plans[0].step_s == pytest.approx(slowest_way(work, cluster, ways))


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "seq", "fixed", "chunks"),
    [
        ("llama3.1-405b", "H100x16384", 2048, 8192, {"tp": 8, "cp": 1, "micro_batch": 1}, 8),
        ("llama3-70b", "H100x960", 1920, 8192, {"tp": 4, "cp": 1, "pp": 12, "micro_batch": 1}, 6),  # 80 layers
        ("llama3-70b", "H100x448", 896, 4096, {"tp": 4, "cp": 1, "pp": 14, "micro_batch": 2}, 5),
    ],
)
def test_interleave_is_searched_where_layers_do_not_divide_evenly(
    model: str, cluster: str, batch: int, seq: int, fixed: dict, chunks: int
) -> None:
    work, machines = job(model, batch, seq), load_cluster(cluster)
    found = search(work, machines, fixed).plans[0]
    assert found.layout.vpp == chunks and len(work.shape.layers) % (found.layout.pp * chunks)
    ways = {key: (value,) for key, value in fixed.items()} | {"recompute": ("none", "selective", "full")}
    ways |= {} if "pp" in fixed else {"pp": (4, 8, 16, 32)}
    assert found.step_s == pytest.approx(slowest_way(work, machines, ways))


@pytest.mark.parametrize("unbound", [False, True], ids=["plan", "sweep"])
def test_chunks_grow_until_they_fit(unbound: bool) -> None:
    """Two chunks a stage hold most: where the best number does not fit, the next ones are tried."""
    work, machines = job("llama3-70b", 256, 8192), load_cluster("H100x64")
    fixed = {"tp": 4, "pp": 8, "cp": 1, "micro_batch": 1, "recompute": "none"}
    needed = {
        v: predict(work, Layout(dp=2, overlap_tp=True, **fixed, vpp=v), machines).memory.needed for v in (2, 5, 10)
    }
    assert needed[2] > needed[5] > needed[10]
    capacity = (needed[5] + needed[10]) / 2 / HEADROOM / 0.99
    tight = replace(machines, device=replace(machines.device, memory=capacity))
    found = search(work, tight, fixed, unbound=unbound)
    ways = {key: (value,) for key, value in fixed.items()}
    best = found.plans[0]
    assert best.step_s == pytest.approx(slowest_way(work, tight, ways)) and best.layout.vpp != 2
    if unbound:
        roomy = replace(machines, device=replace(machines.device, memory=1e15))
        assert found.unbound_s == pytest.approx(search(work, roomy, fixed).plans[0].step_s)


def test_tensor_parallel_stays_in_the_fast_domain_and_says_so() -> None:
    found = search(job("llama3-70b", 128), load_cluster("H100x64"))
    assert all(one.layout.tp <= 8 for one in found.plans)
    assert any("TP 16 leaves the fast domain of 8" in reason for reason in found.removed)
    wide = search(job("llama3-70b", 144), load_cluster("GB200x72"))
    assert not any("TP 16 leaves" in reason for reason in wide.removed)


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"tp": 3}, "tp=3 does not divide 32 heads; nearest: 1, 2, 4"),
        ({"ep": 4}, "ep=4 needs a mixture of experts"),
        ({"pp": 64}, "pp=64 is more than the model's 32 layers"),
        ({"tp": 8, "pp": 4}, "the given degrees take 32 GPUs"),
    ],
)
def test_given_degrees_that_cannot_be_name_the_key(fixed: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        search(job(), load_cluster("H100x16"), fixed)


def test_impossible_memory_is_told() -> None:
    with pytest.raises(NothingFits, match=r"no plan fits: the smallest .* GiB short"):
        search(job("llama3.1-405b"), load_cluster("H100x8"))


@pytest.mark.parametrize(
    ("model", "cluster", "fixed", "says"),
    [
        ("llama3-8b", "H100x8", {"tp": 1, "pp": 1, "cp": 1, "zero": 3, "micro_batch": 8, "recompute": "none"}, "micro_batch=2 instead of 8"),
        ("llama3-70b", "H100x64", {"tp": 1, "pp": 1, "cp": 1, "zero": 1}, "zero=3 instead of 1"),
        ("llama3-8b", "H100x1", {}, "offload=host"),
        ("llama3-70b", "H100x8", {"offload": "none", "optimizer_bits": 32}, "16 GPUs"),
    ],
)  # fmt: skip
def test_the_smallest_change_makes_a_plan_fit(model: str, cluster: str, fixed: dict, says: str) -> None:
    """What is named is tried: with it a plan is found, and the named step time is that plan's."""
    work, machines = job(model, 64), load_cluster(cluster)
    with pytest.raises(UserError, match="smallest change: ") as refused:
        answer(Question(work, [(machines, 1.0)], fixed=fixed))
    said = str(refused.value).split("smallest change: ")[1]
    assert said.startswith(says), said
    key = says.split("=")[0]
    if says.endswith("GPUs"):
        plan = search(work, machines.with_gpus(16), {}, top=1).plans[0]
    else:
        rest = {name: value for name, value in fixed.items() if name != key}
        plan = search(work, machines, rest | ({key: "host"} if key == "offload" else {}), top=1).plans[0]
    assert f"{plan.step_s:.3g} s a step" in said


def test_hybrid_sharding_is_searched_and_wins_where_the_network_is_slow() -> None:
    cluster, fixed = replace(load_cluster("H100x64"), inter_node=2e9), {"pp": 1, "tp": 1, "cp": 1, "zero": 3}
    found = search(job(batch=64), cluster, fixed).plans[0]
    assert found.layout.shard == 8  # parameters are gathered inside a node, only gradients leave it
    assert found.step_s < search(job(batch=64), cluster, {**fixed, "shard": 0}).plans[0].step_s


def test_given_parts_are_kept() -> None:
    found = search(job(), load_cluster("H100x16"), {"tp": 4, "recompute": "full"})
    assert all(one.layout.tp == 4 and one.layout.recompute == "full" for one in found.plans)


def test_objective_memory_prefers_the_smallest() -> None:
    fast, small = (search(job(), load_cluster("H100x16"), objective=o).plans[0] for o in ("time", "memory"))
    assert small.memory.needed < fast.memory.needed and small.step_s > fast.step_s


def test_losses_add_up() -> None:
    found = search(job(), load_cluster("H100x16"))
    gaps = loses(found.plans[0], found.plans[-1])
    assert sum(gap for _, gap in gaps) == pytest.approx(found.plans[-1].step_s - found.plans[0].step_s, abs=1e-4)


def test_clusters_from_yaml_and_their_errors(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("device: H100\ngpus: 32\nprice_per_hour: 2\ninter_node_gbs: 25\n")
    cluster = load_cluster(str(path))
    assert (cluster.gpus, cluster.price, cluster.inter_node, cluster.nodes) == (32, 2.0, 25e9, 4)
    assert cluster_from({"device": "H100", "gpus": 8, "rail": 0}).rail == 0  # as docs/plan.md has it: none do
    for content, says in (
        ({"device": "H100"}, "key 'gpus' is missing"),
        ({"device": "H100", "gpus": 8, "pric_per_hour": 2}, "nearest: price_per_hour"),
        ({"device": "H100", "gpus": -8}, "key 'gpus' is -8"),
        ({"device": "H10", "gpus": 8}, "nearest: .*H100"),
    ):
        with pytest.raises(UserError, match=says):
            cluster_from(content)
    with pytest.raises(UserError, match="H100x1024"):
        load_cluster("H100")
    assert find_device("h100").name == "H100-SXM-80GB" and load_cluster("8xA100").gpus == 8


def test_every_number_of_a_clusters_file_is_documented_and_bounded() -> None:
    """Bounds hold every machine that is known; nothing without an end is taken."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in KEYS)
    for key, kind in NUMBERS.items():
        with pytest.raises(UserError, match=re.escape(f"key {key!r} is 1e+25; give {kind.says}")):
            cluster_from({"device": "H100", "gpus": 8, key: 1e25})
    for one in devices().values():
        facts = {"memory_gb": one.memory / 2**30, "bandwidth_gbs": one.bandwidth / 1e9, "link_gbs": one.link / 1e9}
        facts |= {"inter_node_gbs": one.inter_node / 1e9, "domain": one.domain}
        facts |= {f"{name}_tflops": rate / 1e12 for name, rate in one.rates.items() if name != "fp16"}
        found = cluster_from({"device": one.name, "gpus": 8, **facts})
        assert found.device.memory == pytest.approx(one.memory) and found.domain == one.domain


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


def test_the_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = ("--model", "llama3-8b", "--cluster", "H100x16", "--global-batch", "64")
    code, out, _ = run(capsys, *base, "--tokens", "1e12")
    assert code == 0 and "GPU-hours" in out and "ruled out" in out
    code, out, _ = run(capsys, *base, "--tokens", "1e12", "--deadline", "1d")
    assert code == 1 and "no plan meets the deadline" in out
    code, out, _ = run(capsys, *base, "--tokens", "1e12", "--budget", "10")
    assert code == 1 and "no plan meets the budget" in out
    code, out, _ = run(capsys, *base, "--json")
    assert code == 0 and json.loads(out)["plans"][0]["account"]["tree"] == "step"
    code, out, _ = run(capsys, "explain", *base)
    assert code == 0 and "runner-up" in out and "(ratio)" in out
    for arguments, says in (
        (("--model", "llama3-8b"), "--cluster is missing"),
        ((*base, "--fix", "tpp=2"), "nearest: tp"),
        ((*base, "--fix", "recompute=ful"), "nearest: full"),
        ((*base, "--precision", "bf61"), "nearest: bf16"),
        ((*base, "--deadline", "3d"), "need --tokens"),
        (("--model", "lama3-8b", "--cluster", "H100x8"), "nearest presets: llama3-8b"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and says in err and err.count("\n") == 1
