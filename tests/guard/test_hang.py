"""Who is hung, who is slow, and when to be silent: decided on streams of beacons, no process started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from guard_helpers import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.guard import process_group
from headway.guard.beacon import Beacon, Pulse, beacon_path, collectives_entered, read_pulse
from headway.guard.hang import HangJudge
from headway.guard.oom import OomCounter

S = 1_000_000_000


def pulse(beat_s: float, **changes: object) -> Pulse:
    known = Pulse(1, 20, 100, round(beat_s * S), 0, 20, 0, 0, 0, round(beat_s * S), True, "compute.backward", (S,) * 20)
    return replace(known, **changes)  # type: ignore[arg-type]


def test_the_rank_with_fewer_collectives_holds_up_the_others() -> None:
    waiting = pulse(100.0, heard_ns=108 * S, sequence=101)
    hung = pulse(100.1, heard_ns=108 * S, phase="data")
    assert HangJudge().judge(104 * S, {0: waiting, 1: hung}) is None
    found = HangJudge().judge(106 * S, {0: waiting, 1: hung})
    assert found is not None and (found.rank, found.step, found.phase) == (1, 21, "data")
    assert "the others wait in collective 101, which it has not entered" in found.evidence


def test_a_rank_that_is_not_even_heard_comes_first() -> None:
    found = HangJudge().judge(108 * S, {0: pulse(100.0, heard_ns=108 * S, sequence=99), 1: pulse(100.0)})
    assert found is not None and found.rank == 1


def test_slow_steps_get_three_times_their_p99() -> None:
    slow = pulse(100.0, durations=(10 * S,) * 99 + (20 * S,))
    assert HangJudge().judge(155 * S, {0: slow}) is None
    assert HangJudge().judge(165 * S, {0: slow}) is not None


def test_the_start_an_evaluation_and_a_save_may_take_long_but_not_for_ever() -> None:
    for phase, steps in (
        ("compute.forward", 1),
        ("compile", 50),
        ("evaluation", 50),
        ("checkpoint_stall", 50),
        ("end", 50),
    ):
        long = pulse(100.0, phase=phase, steps=steps)
        assert HangJudge().judge(1000 * S, {0: long}) is None, phase
        assert HangJudge().judge(2000 * S, {0: long}) is not None, phase


def test_a_save_far_longer_than_those_before_it_is_a_hang() -> None:
    judge = HangJudge()
    for start in (100, 200):
        judge.judge(start * S, {0: pulse(start, phase="checkpoint_stall")})
        judge.judge((start + 20) * S, {0: pulse(start + 20)})
    assert judge.judge(399 * S, {0: pulse(300, phase="checkpoint_stall")}) is None
    assert judge.judge(401 * S, {0: pulse(300, phase="checkpoint_stall")}) is not None


def test_a_restart_that_takes_far_longer_than_the_first_start_is_a_hang() -> None:
    judge = HangJudge()
    for at, phase in ((100, "startup.data"), (104, "startup.model"), (111, "compute.forward")):
        judge.judge(at * S, {0: pulse(at, phase=phase, steps=0)})
    again = pulse(200, phase="downtime.restart", steps=0, pid=2)
    assert judge.judge(259 * S, {0: again}) is None
    found = judge.judge(261 * S, {0: again})
    assert found is not None and found.phase == "downtime.restart"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.2, 2.9), min_size=10, max_size=60), st.integers(2, 5))
def test_heavy_tails_are_no_hang(factors: list[float], ranks: int) -> None:
    """Steps of 1 s, some up to 2.9 s, seen four times a second: never an alarm."""
    judge, now = HangJudge(), 0.0
    durations: list[int] = []
    for number, factor in enumerate(factors):
        durations.append(round(factor * S))
        for tick in range(int(factor / 0.25)):
            seen = {
                rank: pulse(now, step=number, steps=number, durations=tuple(durations[-128:])) for rank in range(ranks)
            }
            assert judge.judge(round((now + 0.25 * tick) * S), seen) is None
        now += factor


def _counts_without_a_control_group(rank: int) -> tuple[int, bool]:
    process_group._control = None  # as between the two steps of joining; the beacon's thread must not join for us
    before = len(dist.distributed_c10d._world.pg_map)
    return collectives_entered(), len(dist.distributed_c10d._world.pg_map) == before


def test_counting_collectives_never_makes_a_group() -> None:
    """It did, once in ninety restarts: the beacon's thread and the main thread made the same group, and both hung."""
    assert [outcome.value for outcome in run_ranks(2, _counts_without_a_control_group)] == [(0, True)] * 2


def test_a_beacon_is_read_from_outside(tmp_path: Path) -> None:
    assert read_pulse(tmp_path, 3) is None
    count = [7]
    beacon = Beacon(tmp_path, 3, sequence=lambda: count[0])
    try:
        beacon.resumed(4)
        beacon.begin_step(documents=11)
        beacon.enter("compute.forward")
        found = read_pulse(tmp_path, 3)
        assert found is not None
        assert (found.step, found.resumed_from, found.documents, found.phase) == (4, 4, 11, "compute.forward")
        beacon.leave()
        for step in range(5, 205):
            beacon.finish_step(step)
        found = read_pulse(tmp_path, 3)
        assert found is not None and (found.step, found.steps, len(found.durations)) == (204, 200, 128)
        assert found.first_ns and found.p99_ns() >= found.median_ns() > 0 and found.sequence == 7
    finally:
        beacon.close()
    beacon_path(tmp_path, 3).write_bytes(b"short")
    assert read_pulse(tmp_path, 3) is None


def test_an_oom_kill_is_told_from_another_kill(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "job" / "step"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    events = group / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    counter = OomCounter(tmp_path / "cgroup", membership)
    assert counter.new_kills() == 0
    events.write_text("low 0\noom 4\noom_kill 3\n")
    assert counter.new_kills() == 1
    assert OomCounter(tmp_path / "nothing", tmp_path / "none").new_kills() == 0


def test_a_rank_through_with_a_step_after_fewer_collectives_left_one_out() -> None:
    waits = pulse(100.0, step=19, sequence=101, phase="comm.dp", heard_ns=103 * S)
    through = pulse(100.0, step=20, sequence=100, phase="host.agree", heard_ns=103 * S)
    assert HangJudge().judge(101 * S, {0: waits, 1: through}) is None
    found = HangJudge().judge(103 * S, {0: waits, 1: through})
    assert found is not None and found.mismatch and (found.rank, found.step) == (1, 20)
    # Stopped between two steps while the other goes on: fewer collectives too, and none left out.
    stopped, ahead = replace(through, heard_ns=100 * S), replace(waits, step=20)
    assert HangJudge().judge(103 * S, {0: ahead, 1: stopped}) is None
    found = HangJudge().judge(106 * S, {0: replace(ahead, heard_ns=106 * S), 1: stopped})
    assert found is not None and not found.mismatch and found.rank == 1
