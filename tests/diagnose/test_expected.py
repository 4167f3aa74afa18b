"""Every reference value of real traces: compute, communication, copies, idle, its split, utilisation, kernels."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from diagnose.real_traces import job, rank
from headway.account.errors import UserError
from headway.diagnose.facts import RankFacts
from headway.diagnose.job import Options

SHARED = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "traces"
ROWS = list(csv.DictReader((SHARED / "EXPECTED.csv").open())) if (SHARED / "EXPECTED.csv").exists() else []
TINY = 0.0006  # µs: the reference is printed to a nanosecond
IDLE = {
    "idle_dl": "data",
    "idle_sync": "blocking",
    "idle_host": "host",
    "idle_launch_api": "launch_call",
    "idle_launch_latency": "launch_latency",
    "idle_queued": "queued",
    "idle_short": "short",
    "idle_unknown": "unknown",
}


def differences(facts: RankFacts, row: dict[str, str]) -> list[str]:
    """What of a reference row the facts of a trace do not match."""
    device = facts.devices[0]
    shares, cut = device.shares, device.fragmentation
    exact = {
        "W_us": shares.wall_ns,
        "compute": shares.compute_ns,
        "exposed_comm": shares.exposed_comm_ns,
        "exposed_mem": shares.exposed_mem_ns,
        "idle": shares.idle_ns,
        "comm_total": shares.comm_ns,
        "mem_total": shares.mem_ns,
    }
    found = [name for name, ns in exact.items() if abs(ns / 1000 - float(row[name])) > TINY]
    for name, klass in IDLE.items():
        if abs(shares.idle[klass] / 1000 - float(row[name])) > max(0.01 * float(row["W_us"]), TINY):
            found.append(name)
    overlap = None if shares.overlap is None else round(100 * shares.overlap, 2)
    if (overlap is None) != (row["overlap_pct"] == "") or abs((overlap or 0) - float(row["overlap_pct"] or 0)) > 0.011:
        found.append("overlap_pct")
    if abs(100 * shares.utilisation - float(row["smi_util_pct"])) > 0.011:
        found.append("smi_util_pct")
    figures = {
        "n_kernels": cut.kernels,
        "median_kernel_us": cut.median_ns / 1000,
        "share_kernels_lt10us": round(cut.short_by_count, 3),
        "time_share_lt10us": round(cut.short_by_time, 3),
        "unlinked": cut.unlinked,
    }
    return found + [name for name, value in figures.items() if abs(value - float(row[name])) > 0.0011]


@pytest.mark.parametrize("row", ROWS, ids=[row["file"].rsplit("/", 1)[-1][:40] for row in ROWS])
def test_every_reference_row_matches(row: dict[str, str], shared: Path) -> None:
    facts = rank(shared / "traces" / row["file"], "gpu")
    assert not differences(facts, row)
    assert len(facts.devices) == 1
    assert facts.devices[0].account.wall_ns == facts.devices[0].shares.wall_ns
    assert sum(facts.devices[0].by_kind.values()) == int(facts.devices[0].events.duration.sum())


def test_a_wrong_reference_is_caught(shared: Path) -> None:
    row = dict(next(row for row in ROWS if row["file"].startswith("hta/nccl")))
    facts = rank(shared / "traces" / row["file"], "gpu")
    for column in ("compute", "idle", "idle_host", "overlap_pct", "n_kernels"):
        planted = {**row, column: str(float(row[column]) * 1.1 + 1)}
        assert differences(facts, planted)


def test_every_real_trace_closes(shared: Path) -> None:
    """All traces of the collection are read with the default window; sums are exact by construction and checked."""
    files = sorted((shared / "traces").rglob("*.json*"))
    assert len(files) >= 40
    for path in files:
        for device in rank(path).devices:
            total = sum(device.shares.idle.values()) + device.shares.busy_ns
            assert total == device.shares.wall_ns == device.account.wall_ns, path
            if device.window.source == "steps":
                assert sum(step.shares.wall_ns for step in device.steps.rows) == device.window.wall_ns, path
                for part in ("compute_ns", "exposed_comm_ns", "exposed_mem_ns", "idle_ns"):
                    steps = sum(getattr(step.shares, part) for step in device.steps.rows)
                    assert steps == getattr(device.shares, part), (path, part)


def test_one_graph_launch_owns_hundreds_of_kernels(shared: Path) -> None:
    """Public complaint: 97 % of time collapsed into hipGraphLaunch. The kernel table names the kernels."""
    path = shared / "traces/tracelens/inference__sglang_decode__sglang_Qwen3-8B_decode.json.gz"
    device = rank(path).device()
    assert device.fragmentation.graph_kernels > 500
    assert len(device.table) > 5
    assert not any("GraphLaunch" in row.name for row in device.table)


def test_matched_communication_names_are_shown(shared: Path) -> None:
    names = job(shared / "traces/hta/df_index_resolver__df_index_resolver.json.gz").comm_names
    assert names and all("nccl" in name.lower() for name in names)


def test_a_users_own_communication_kernel(shared: Path) -> None:
    path = shared / "traces/hta/triton_example__triton_example.json.gz"
    before, after = job(path), job(path, options=Options(comm_kernels=("triton",)))
    assert before.ranks[0].devices[0].shares.comm_ns == 0
    assert after.ranks[0].devices[0].shares.comm_ns > 0
    with pytest.raises(UserError, match="not a regular expression"):
        job(path, options=Options(comm_kernels=("(",)))


def test_triton_cpu_operators_are_not_gpu_work(shared: Path) -> None:
    """They carry a stream, as kernels do; only the category tells them apart."""
    facts = rank(shared / "traces/hta/triton_example__triton_example.json.gz", "gpu")
    assert facts.devices[0].fragmentation.kernels == 1


def test_steps_window_is_the_default(shared: Path) -> None:
    device = rank(shared / "traces/hta/df_index_resolver__df_index_resolver.json.gz").device()
    assert device.window.source == "steps" and device.window.text.startswith("ProfilerStep#")
    assert len(device.steps.rows) == 5


def test_planted_straggler_is_named(shared: Path) -> None:
    folder = shared / "traces/local_torch213"
    found = job(*sorted(folder.glob("straggler_rank*.json.gz"))).comparison
    assert found is not None and not found.refused
    assert found.last_arrivals == {1: 4}
    assert next(iter(found.doing[1])) == "host code: slow_host_work"
    assert min(found.wait_ns[number] for number in (0, 2, 3)) > 60e6
    balanced = job(*sorted(folder.glob("balanced_rank*.json.gz"))).comparison
    assert balanced is not None and max(balanced.caused_ns.values()) < 0.25 * found.caused_ns[1]


def test_eight_ranks_of_one_node(shared: Path) -> None:
    facts = job(*sorted((shared / "traces/param/dlrm_kineto").glob("worker*.json")))
    assert [one.rank for one in facts.ranks] == list(range(8))
    found = facts.comparison
    assert found is not None and not found.refused
    assert len(found.matched) == 8 and found.unmatched == 0
    assert sum(found.last_arrivals.values()) == 8
    # The ends of a collective agree to the microsecond clock of these files.
    assert max(int(item.end.max() - item.end.min()) for item in found.matched) <= 40_000
