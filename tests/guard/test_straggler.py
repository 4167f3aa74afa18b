"""Stragglers, scored on generated streams with the noise of real steps; and the list of hosts."""

from __future__ import annotations

import json
import random
import statistics
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.account.errors import UserError
from headway.account.events import RankLine
from headway.guard.cards import card_of, card_places, devices_of
from headway.guard.contention import CpuWait
from headway.guard.hosts import HostList
from headway.guard.ledger import Ledger
from headway.guard.rank_lines import AllLines, RankLines
from headway.guard.straggler import WAITED, StepJoin, StragglerWatch, medians_of_the_others
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


def test_files_that_cannot_be_read_for_a_while_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system that stalls, under the machine that leads: its signs of life must go on."""
    path, answers, real = tmp_path / "0.jsonl", threading.Event(), RankLines.new
    path.touch()
    writer = JsonlWriter(path)
    lines = AllLines([path], apart=True)
    lines.rest(60)

    def stalls(reader: RankLines) -> list[RankLine]:
        assert answers.wait(60)
        return list(real(reader))

    monkeypatch.setattr(RankLines, "new", stalls)
    writer.append(RankLine(session=0, step=1, rank=0, wall_ns=9, account={"data": 1}))
    for _ in range(5):
        assert lines.new() == []
    answers.set()
    lines.rest(60)
    assert [(rank, line.step) for rank, line in lines.new()] == [(0, 1)]
    lines.rest(60)
    assert lines.new() == []
    lines.rest(60)


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


@pytest.mark.parametrize("cards", ["4,5,7", "GPU-8932f937,GPU-0c11,GPU-77", "MIG-GPU-5/1/0,MIG-GPU-5/2/0,MIG-1f"])
def test_a_run_gets_the_cards_that_it_was_given_and_no_others(cards: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": cards}
    team = card_places("n", 3, environ)
    assert devices_of(team) == environ and len(set(team)) == 3
    assert devices_of([team[0], team[2]])["CUDA_VISIBLE_DEVICES"].split(",") == cards.split(",")[::2]
    assert devices_of(card_places("n", 2, environ))["CUDA_VISIBLE_DEVICES"] == cards.rpartition(",")[0]
    assert devices_of(card_places("n", 5, environ)) == environ, "more ranks than cards: nobody else's"


def test_a_rank_is_explained_by_its_own_card_or_by_none() -> None:
    assert [card_of(1, {}), card_of(1, {"CUDA_VISIBLE_DEVICES": "4, 5"})] == [1, 5]
    assert [card_of(1, {"CUDA_VISIBLE_DEVICES": text}) for text in ("", "4", "GPU-1,GPU-2")] == [None, None, None]


@given(st.lists(st.one_of(st.integers(0, 10**12), st.floats(0, 1e12)), min_size=2, max_size=9))
def test_medians_of_the_others_are_those_of_the_others(values: list[float]) -> None:
    found = medians_of_the_others(dict(enumerate(values)))
    for rank in range(len(values)):
        assert found[rank] == statistics.median(values[:rank] + values[rank + 1 :])


def test_waiting_for_a_cpu_is_counted_where_the_system_tells(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("9000 1000 4\n")
    wait = CpuWait(str(file))
    file.write_text("9900 1700 5\n")
    assert (wait.since_last(), wait.since_last()) == (700, 0)
    assert CpuWait(str(tmp_path / "none")).since_last() == 0
