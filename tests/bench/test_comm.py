"""`headway bench comm`: real gloo collectives on this machine, a wrong one refused, and the way into a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from headway.account.errors import UserError
from headway.bench.comm import OPS, CommOptions, _group_sizes, bench_comm, parse_sizes
from headway.cli.main import _join_commands, _run
from headway.plan.bench_file import cluster_keys, read_bench
from headway.plan.cluster import load_cluster
from headway.plan.collectives import Network
from headway.plan.constants import default_constants

SMALL = CommOptions(sizes=(4096, 2**20), seconds=0.01, device="cpu")


def test_every_collective_and_size_is_measured_and_becomes_a_clusters_links(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _join_commands()
    out, mine = tmp_path / "comm.json", tmp_path / "mine.yaml"
    command = ["bench", "comm", "--device", "cpu", "--sizes", "4K,1M", "--seconds", "0.01", "--out", str(out)]
    assert _run(command, debug=False) == 0
    printed = capfd.readouterr()
    assert "all_to_all" in printed.out and "GB/s" in printed.out and printed.err == ""
    entries = read_bench(out)
    assert {(item["op"], item["bytes"]) for item in entries} == {(op, size) for op in OPS for size in (4096, 2**20)}
    assert all(0 < item["low_s"] <= item["seconds"] <= item["high_s"] and item["ranks"] == 2 for item in entries)
    assert {(item["backend"], item["nodes"], item["groups"]) for item in entries} == {("gloo", 1, 1)}
    arguments = ["plan", "calibrate", str(out), "--cluster", "H100x8", "--out", str(mine)]
    assert _run(arguments, debug=False) == 2 and "measured on 'cpu" in capfd.readouterr().err  # no H100 in this machine
    for entry in entries:  # as if it had been one
        entry |= {"device": "NVIDIA H100 80GB HBM3", "backend": "nccl"}
    out.write_text(json.dumps(entries))
    assert _run(arguments, debug=False) == 0
    c = default_constants()
    network = Network.of(load_cluster(str(mine)), c)
    assert network.link == pytest.approx(cluster_keys(entries, c, "x")["link_gbs"] * 1e9 * c.intra)
    plan = ["plan", "--model", "llama3-8b", "--cluster", str(mine), "--fix", "tp=8", "--json"]
    capfd.readouterr()
    assert _run(plan, debug=False) == 0
    slow = json.loads(capfd.readouterr().out)["plans"][0]["terms_s"]["tp"]
    assert _run([*plan[:4], "H100x8", *plan[5:]], debug=False) == 0
    assert slow > 10 * json.loads(capfd.readouterr().out)["plans"][0]["terms_s"]["tp"]  # loopback is no NVLink


def test_three_ranks_and_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench_comm(3, CommOptions(ops=("all_reduce", "all_to_all"), sizes=(5000,), seconds=0.01, device="cpu"))
    assert report is not None and [(one.op, one.ranks, one.bytes) for one in report.entries] == [
        ("all_reduce", 3, 4992), ("all_to_all", 3, 4992),
    ]  # fmt: skip
    real = dist.all_reduce

    def broken(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = real(tensor, *args, **kwargs)
        if tensor.dtype.itemsize == 4 and dist.get_rank() == 1:
            tensor[-1] += 1  # one element of one rank
        return work

    monkeypatch.setattr(dist, "all_reduce", broken)  # the ranks are forked, so they have it too
    with pytest.raises(UserError, match="all_reduce of 5,000 bytes over 2 ranks gave a wrong result"):
        bench_comm(2, CommOptions(ops=("all_reduce",), sizes=(5000,), seconds=0.01, device="cpu"))


def test_a_collective_that_the_backend_lacks_is_named_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ProcessGroupGloo does not support alltoall\nmore")

    monkeypatch.setattr(dist, "all_to_all_single", missing)
    report = bench_comm(2, CommOptions(sizes=(4096,), seconds=0.01, device="cpu"))
    assert report is not None and [one.op for one in report.entries] == list(OPS[:-1])
    assert report.missing == ["all_to_all over 2 ranks: ProcessGroupGloo does not support alltoall"]


@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        (1, SMALL, "at least 2 ranks"),
        (2, CommOptions(ops=("all_redoce",)), "nearest: all_reduce"),
        (2, CommOptions(seconds=0.0), "--seconds"),
        (2, CommOptions(device="tpu"), "--device 'tpu' is unknown"),
        (2, CommOptions(sizes=(0,)), "--sizes 0"),
    ],
)
def test_bad_options_are_refused_before_a_rank_starts(ranks: int, options: CommOptions, says: str) -> None:
    with pytest.raises(UserError, match=says):
        bench_comm(ranks, options)


def test_sizes_as_people_write_them() -> None:
    assert parse_sizes("4K, 1MiB,2g,512") == (4096, 2**20, 2**31, 512)
    for bad in ("x", "1.5M", "4T", "-1"):
        with pytest.raises(UserError, match="--sizes"):
            parse_sizes(bad)


def test_planted_bandwidth_and_latency_come_back() -> None:
    """Both sides of a node, from messages on the whole slope; the planner's own formulas made them."""
    c = default_constants()
    cluster = load_cluster("H100x32")
    network = Network.of(cluster, c)
    entries = []
    for ranks, nodes in ((8, 1), (32, 4)):
        group = network.group(ranks, 1)
        for size in (2**power for power in range(12, 31, 3)):
            for op, seconds in (
                ("all_reduce", network.all_reduce(size, group)), ("all_gather", network.gather(size, group)),
            ):  # fmt: skip
                entries.append({"op": op, "ranks": ranks, "nodes": nodes, "bytes": size, "seconds": seconds})
    keys = cluster_keys(entries, c, "x")
    assert keys["link_latency_us"] == pytest.approx(c.hop_inside * 1e6, rel=0.1)
    assert keys["inter_node_latency_us"] == pytest.approx(c.hop * 1e6, rel=0.1)
    assert keys["link_gbs"] == pytest.approx(450, rel=0.1)


def test_groups_inside_a_node_and_over_nodes() -> None:
    assert _group_sizes(8, 8) == [2, 4, 8] and _group_sizes(3, 3) == [3]
    assert _group_sizes(32, 8) == [2, 4, 8, 16, 32] and _group_sizes(12, 4) == [2, 4, 12]
