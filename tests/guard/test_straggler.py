"""Stragglers, scored on generated streams with the noise of real steps; and the list of hosts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.account.events import RankLine
from headway.guard.alone import devices_of
from headway.guard.contention import CpuWait
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.rank_lines import RankLines
from headway.guard.straggler import WAITED, StepJoin, StragglerWatch
from headway.guard.watching import SLOW, SlowRanks
from headway.record.incidents import read_incidents
from headway.record.jsonl import JsonlWriter

USUAL = {"compute.forward": 60e6, "compute.backward": 130e6, "compute.loss": 8e6, "compute.optimizer": 25e6,
         "data": 0.5e6, "host.launch": 6e6, "host.sync": 9e6, "comm.dp": 3e6}  # fmt: skip


def steps(dice: random.Random, ranks: int, count: int, slow: tuple[int, int, float, str] | None = None):
    """Accounts of `count` steps: every step has its own length (lengths of documents), every rank 4 % of noise of its
    own, one step of a rank in fifty takes up to three times as long, and one in a hundred of all ranks twice as long.
    slow: (rank, from step, how much slower, phase prefix)."""
    for step in range(1, count + 1):
        common = dice.lognormvariate(0, 0.15) * (2 if dice.random() < 0.01 else 1)
        accounts = {}
        for rank in range(ranks):
            own = dice.lognormvariate(0, 0.04) * (dice.uniform(1.2, 3) if dice.random() < 0.02 else 1)
            parts = {path: ns * common * own * dice.lognormvariate(0, 0.03) for path, ns in USUAL.items()}
            if slow is not None and rank == slow[0] and step >= slow[1]:
                work = sum(ns for path, ns in parts.items() if path not in ("compute.backward", "host.sync", "comm.dp"))
                if slow[3]:
                    parts[slow[3]] = parts.get(slow[3], 0.0) + slow[2] * work
                else:
                    parts = {path: ns * (1 + slow[2]) for path, ns in parts.items()}
            accounts[rank] = {path: round(ns) for path, ns in parts.items()}
        yield step, accounts


@pytest.mark.parametrize("phase", ["compute.forward", "data", "checkpoint", ""])
@pytest.mark.parametrize("ranks", [2, 8])
def test_fifteen_percent_are_named_within_20_steps(ranks: int, phase: str) -> None:
    latest, wrong, seeds = [], 0, 25 if ranks == 2 else 12
    for seed in range(seeds):
        dice = random.Random(seed)
        watch, victim, onset = StragglerWatch(0.15), dice.randrange(ranks), 40
        for step, accounts in steps(dice, ranks, onset + 20, (victim, onset, 0.15, phase)):
            for slow in watch.observe(step, accounts):
                if slow.rank != victim or step < onset:
                    wrong += 1
                elif not slow.again:
                    latest.append(step - onset)
                    assert not phase or slow.phase == phase, (seed, slow)
    assert wrong == 0 and len(latest) >= seeds - 1, f"{len(latest)} of {seeds} found, {wrong} wrong"


def noisy(dice: random.Random, ranks: int, count: int, block: int):
    """A machine with fewer cores than it needs: for up to `block` steps a rank loses 10 to 60 % of its time to other
    processes, then another one does; every step has heavy noise of its own besides."""
    left, victim, much = 0, 0, 0.0
    for step, accounts in steps(dice, ranks, count):
        if not left:
            left, victim, much = dice.randint(1, block), dice.randrange(ranks), dice.uniform(0.1, 0.6)
        left -= 1
        for rank, parts in accounts.items():
            factor = dice.lognormvariate(0, 0.15) * (1 + much if rank == victim else 1)
            accounts[rank] = {path: round(ns * factor) for path, ns in parts.items()}
        yield step, accounts, victim, much


@pytest.mark.parametrize(("ranks", "block"), [(2, 3), (2, 8), (4, 3), (4, 8)])
def test_ranks_that_change_places_are_noise(ranks: int, block: int) -> None:
    for seed in range(5):
        watch = StragglerWatch(0.15)
        stream = noisy(random.Random(seed), ranks, 300, block)
        found = [slow for step, accounts, *_ in stream for slow in watch.observe(step, accounts)]
        assert found == [], (seed, found)


def test_what_a_rank_lost_to_other_processes_is_the_machines_and_told_once() -> None:
    """Blocks of up to 60 steps: by their times alone, each is a slow rank."""
    named, told = 0, []
    for seed in range(6):
        watch, blind = StragglerWatch(0.15), StragglerWatch(0.15)
        for step, accounts, victim, much in noisy(random.Random(seed), 2, 300, 60):
            named += sum(not slow.again for slow in blind.observe(step, accounts))
            busy = sum(ns for path, ns in accounts[victim].items() if path not in ("host.sync", "comm.dp"))
            accounts[victim][WAITED] = round(busy * much / (1 + much))
            told += watch.observe(step, accounts)
    assert named >= 6 and all(slow.busy for slow in told)
    assert 0 < sum(not slow.again for slow in told) <= 24  # two episodes of each of two ranks, in six streams
    assert "other processes had its CPU" in told[0].evidence()


@pytest.mark.parametrize(("much", "at_most"), [(0.07, 2), (0.10, 10)])
def test_less_than_what_is_asked_for_is_seldom_named_and_never_counted(much: float, at_most: int) -> None:
    found, counted = 0, 0
    for seed in range(10):
        watch = StragglerWatch(0.15)
        for step, accounts in steps(random.Random(seed), 4, 100, (1, 40, much, "")):
            told = watch.observe(step, accounts)
            found, counted = found + len(told), counted + sum(slow.counts for slow in told)
    assert found <= at_most and counted == 0, (found, counted)


def test_a_place_is_blamed_for_the_slowness_that_was_asked_for_once_an_episode() -> None:
    watch, told = StragglerWatch(0.15), []
    for step in range(1, 300):
        factor = 1.3 if step >= 50 else 1.0
        told += watch.observe(step, {0: {"data": 100}, 1: {"data": round(100 * factor)}})
    assert not told[0].again and sum(slow.counts for slow in told) == 1


def test_two_that_are_slow_at_once_are_both_named() -> None:
    watch, told = StragglerWatch(0.15), []
    for step in range(1, 120):
        slow = {1: step >= 40, 2: step >= 40, 3: step >= 80}
        told += watch.observe(step, {rank: {"data": 120 if slow.get(rank) else 100} for rank in range(8)})
    assert [one.rank for one in told if not one.again] == [1, 2, 3]


@pytest.mark.parametrize("sharded", [False, True])
def test_an_even_fleet_has_no_straggler(sharded: bool) -> None:
    watch = StragglerWatch(0.15, sharded)
    found = [slow for step, accounts in steps(random.Random(1), 4, 3000) for slow in watch.observe(step, accounts)]
    assert len(found) <= sharded, found  # under FSDP only loss, data and host are a rank's own: less to average over


def test_a_planted_watch_without_a_window_would_cry_wolf() -> None:
    watch = StragglerWatch(0.15, window=1)
    found = [slow for step, accounts in steps(random.Random(1), 4, 300) for slow in watch.observe(step, accounts)]
    assert len(found) > 10


def test_it_is_told_once_and_again_after_a_recovery() -> None:
    watch = StragglerWatch(0.15)
    told = []
    for step in range(1, 401):
        factor = 1.5 if step < 50 or 100 < step < 150 or step > 350 else 1.0
        told += watch.observe(step, {0: {"data": 100}, 1: {"data": round(100 * factor)}})
    assert [(slow.rank, slow.again) for slow in told] == [(1, False), (1, True), (1, False)] and told[1].step > 100
    assert [slow.counts for slow in told] == [True, False, True]  # a relapse soon after is the same episode


def test_an_episode_is_one_incident_that_is_amended(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.jsonl" for rank in (0, 1)]
    ledger, blamed = Ledger(tmp_path / "incidents.jsonl"), []
    watch = SlowRanks(files, StragglerWatch(0.15), ledger, ["a", "b"], lambda place, why: bool(blamed.append(place)))
    for step in range(1, 161):
        factor = 1.5 if step < 50 or step > 100 else 1.0
        watch._judge(step, {0: {"data": 100}, 1: {"data": round(100 * factor)}})
    (incident,) = read_incidents(ledger.path).items
    assert (incident.fault, incident.host, incident.rank) == (SLOW, "b", 1) and blamed == ["b"]
    assert "2 times" in incident.evidence and f"first in step {incident.step}" in incident.evidence


def test_lines_of_growing_files_are_joined_by_step(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.jsonl" for rank in (0, 1)]
    writers = [JsonlWriter(path) for path in paths]

    def write(rank: int, step: int) -> None:
        line = RankLine(session=0, step=step, rank=rank, wall_ns=9, account={"data": step})
        writers[rank].append(line)

    write(0, 1)  # of an earlier session: not read
    readers, join = [RankLines(path) for path in paths], StepJoin(2)
    for step in (2, 3):
        write(0, step)
    write(1, 2)
    with paths[1].open("ab") as file:
        file.write(b"damaged\n{half")
    found = [
        each
        for rank, reader in enumerate(readers)
        for line in reader.new()
        for each in join.add(line.step, rank, line.account)
    ]
    assert found == [(2, {0: {"data": 2}, 1: {"data": 2}})]
    assert list(readers[0].new()) == [] and list(RankLines(tmp_path / "none").new()) == []


def test_a_host_is_excluded_after_its_own_incidents_and_readmitted(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    hosts = HostList(path, limit=2)
    assert not hosts.blame("a", "hang", may_exclude=True)
    assert not hosts.blame("b", "hang", may_exclude=True)
    assert hosts.blame("a", "killed", may_exclude=True)
    again = HostList(path, limit=2)
    assert again.excluded() == {"a"} and again.hosts["a"].why == ["hang", "killed"]
    assert not again.blame("b", "killed", may_exclude=False), "the run cannot go on without it"
    assert json.loads(path.read_text())["b"]["excluded"] is False
    again.readmit("a")
    assert HostList(path).excluded() == set()
    with pytest.raises(UserError, match="not in"):
        again.readmit("c")
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        HostList(path)


def test_places_with_a_device_become_visible_devices() -> None:
    assert devices_of(["n/cuda:0", "n/cuda:3"]) == {"CUDA_VISIBLE_DEVICES": "0,3"} and devices_of(["n", "n"]) == {}


def test_waiting_for_a_cpu_is_counted_where_the_system_tells(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("9000 1000 4\n")
    wait = CpuWait(str(file))
    file.write_text("9900 1700 5\n")
    assert (wait.since_last(), wait.since_last()) == (700, 0)
    assert CpuWait(str(tmp_path / "none")).since_last() == 0
