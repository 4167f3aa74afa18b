"""The scaling curve: planted serial parts and walls are found, walls that are not there are not, bad input is one line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.cli.main import _join_commands, _run
from headway.plan.cluster import load_cluster
from headway.plan.sweep import Sweep, fit_amdahl, parse_gpus, sweep
from headway.plan.textplot import log_plot
from headway.plan.workload import Workload, load_model

WORK = Workload(load_model("llama3-8b")[1], 4096, 512, "bf16", "llama3-8b")
FIXED = {"pp": 1, "micro_batch": 1, "cp": 1}  # keeps the searches short


def run(spec: str = "H100x8", gpus: str = "8,16,…,512", **options: object) -> Sweep:
    cluster = options.pop("cluster", load_cluster(spec))
    fixed = {**FIXED, **options.pop("fixed", {})}  # type: ignore[dict-item]
    return sweep(options.pop("work", WORK), cluster, parse_gpus(gpus), fixed=fixed, **options)  # type: ignore[arg-type]


def wall(found: Sweep, name: str) -> float | None:
    return next(one.gpus for one in found.walls if one.name == name)


def test_ranges_of_gpus() -> None:
    assert parse_gpus("8,16,…,16384") == [2**n for n in range(3, 15)]
    assert parse_gpus("8,16,...,100") == [8, 16, 32, 64, 100]
    assert parse_gpus("64, 8") == [8, 64]
    for bad in (
        "",
        "8,…,64",
        "16,8,…,4",
        "8,16,…",
        "eight",
        "0",
        "-8",
        "8,16,…,99999999999",
        ",".join(map(str, range(1, 99))),
    ):
        with pytest.raises(UserError, match="--gpus"):
            parse_gpus(bad)


@settings(max_examples=50, deadline=None)
@given(serial=st.floats(0, 1), parallel=st.floats(1, 1e5), counts=st.sets(st.integers(1, 20_000), min_size=2))
def test_a_planted_serial_part_is_found(serial: float, parallel: float, counts: set[int]) -> None:
    found = fit_amdahl(sorted(counts), [serial + parallel / n for n in sorted(counts)])
    assert found is not None and found.error < 1e-6
    assert found.serial_s == pytest.approx(serial, abs=1e-6 * parallel)
    at = found.binds_at(0.2)
    if serial > 1e-3 and at > 1:
        assert found.share(round(at)) == pytest.approx(0.2, abs=0.2 / at)


def test_efficiency_is_a_share_and_steps_shrink() -> None:
    found = run()
    steps = [point.found.step_s for point in found.points if point.found]
    assert steps == sorted(steps, reverse=True) and len(steps) == 7
    assert all(0 < found.efficiency(point) <= 1 for point in found.points)
    assert all(0 <= point.memory_loss < 1 and 0 <= point.communication < 1 for point in found.points)


def test_a_planted_slow_network_moves_the_communication_wall_and_a_perfect_one_removes_it() -> None:
    slow = run(cluster=replace(load_cluster("H100x8"), inter_node=2e9))
    at = wall(slow, "communication")
    assert at is not None and at <= 32 and wall(run(), "communication") != at
    machine = load_cluster("H100x8")
    perfect = replace(machine, inter_node=1e18, domain=10**6, device=replace(machine.device, link=1e18))
    assert wall(run(cluster=perfect), "communication") is None


def test_the_communication_wall_lies_between_the_counts_that_straddle_the_share() -> None:
    bind = 0.9 * run().points[-1].communication
    found = run(bind=bind)
    at = wall(found, "communication")
    assert at is not None
    below = [point for point in found.points if point.gpus < at]
    above = [point for point in found.points if point.gpus > at]
    assert above and all(point.communication > bind for point in above)
    assert not below or below[-1].communication <= bind


def test_the_memory_wall_is_where_the_model_begins_to_fit() -> None:
    work = Workload(load_model("llama3-70b")[1], 4096, 128, "bf16", "llama3-70b")
    tight = run(work=work, gpus="4,8,16,32", fixed={"recompute": "full", "tp": 4})
    assert wall(tight, "memory") == next(point.gpus for point in tight.points if point.found) > 4
    assert any("fit" in point.reason for point in tight.points if not point.found)
    roomy = load_cluster("H100x8")
    roomy = replace(roomy, device=replace(roomy.device, memory=1e15))
    free = run(cluster=roomy)
    assert wall(free, "memory") is None and all(point.memory_loss == 0 for point in free.points)


def test_memory_that_forces_a_slower_plan_is_called_so() -> None:
    machine = load_cluster("H100x8")
    small = replace(machine, device=replace(machine.device, memory=machine.device.memory / 2))
    found = run(cluster=small, gpus="8,16,32", bind=0.05)
    assert any(point.memory_loss > 0.05 for point in found.points)
    assert wall(found, "memory binds until") == max(p.gpus for p in found.points if p.memory_loss > 0.05)


def test_a_batch_that_cannot_be_cut_further_is_a_wall() -> None:
    found = run(work=replace(WORK, global_batch=16), gpus="8,16,32,64", fixed={"tp": 1})
    assert wall(found, "batch") == 32 and "global_batch 16" in found.points[-1].reason


def test_weak_scaling_grows_the_batch_and_keeps_its_efficiency() -> None:
    found = run(weak=True, gpus="8,64", work=replace(WORK, global_batch=64))
    assert [point.found.workload.global_batch for point in found.points if point.found] == [64, 512]
    assert found.amdahl is None
    strong = run(gpus="8,64", work=replace(WORK, global_batch=64))
    assert found.efficiency(found.points[-1]) >= strong.efficiency(strong.points[-1])


def test_plots_put_the_ends_into_the_corners() -> None:
    rows = log_plot({"plan": [(8, 10.0), (64, 80.0)]}, "GPUs", "tokens/s", width=20, height=5)
    assert rows[1].endswith("p") and rows[5].split("|")[1] == "p" and "64" in rows[-1]
    marked = log_plot({"plan": [(8, 10.0), (64, 80.0)]}, "GPUs", "y", 20, 5, marks={"wall": 64.0, "beyond": 99.0})
    assert marked[-2].endswith(" " * 19 + "W") and "W wall" in marked[0] and "beyond" not in marked[0]
    assert log_plot({"none": [(0, 1.0), (1, math.nan)]}, "x", "y") == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    _join_commands()
    base = [
        "plan",
        "sweep",
        "--model",
        "llama3-8b",
        "--cluster",
        "H100",
        "--gpus",
        "8,16",
        "--fix",
        "pp=1,micro_batch=1",
    ]
    assert _run([*base, "--tokens", "1e12"], debug=False) == 0
    out = capsys.readouterr().out
    assert "tokens/s (p plan, i ideal)" in out and "amdahl: " in out and "dollars" in out
    assert _run([*base, "--json"], debug=False) == 0
    assert [point["gpus"] for point in json.loads(capsys.readouterr().out)["points"]] == [8, 16]
    for more, says in (
        (["--bind", "2"], "'--bind': 2"),
        (["--gpus", "8,x"], "'x' is not a number"),
        (["--cluster", "H10O"], "nearest: "),
        (["--model", "llama3.1-405b", "--gpus", "8"], "no number of GPUs runs"),
    ):
        assert _run([*base, *more], debug=False) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
