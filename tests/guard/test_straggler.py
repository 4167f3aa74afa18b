"""Stragglers, scored on generated streams with the noise of real steps; and the list of hosts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headway.account.errors import UserError
from headway.account.events import RankLine
from headway.guard.alone import devices_of
from headway.guard.hosts import HostList
from headway.guard.rank_lines import RankLines
from headway.guard.straggler import StepJoin, StragglerWatch
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
    latest, wrong, seeds = [], 0, 25
    for seed in range(seeds):
        dice = random.Random(seed)
        watch, victim, onset = StragglerWatch(0.15), dice.randrange(ranks), 40
        for step, accounts in steps(dice, ranks, onset + 20, (victim, onset, 0.15, phase)):
            for slow in watch.observe(step, accounts):
                if slow.rank != victim or step < onset:
                    wrong += 1
                else:
                    latest.append(step - onset)
                    assert not phase or slow.phase == phase, (seed, slow)
    assert wrong == 0 and len(latest) >= seeds - 1, f"{len(latest)} of {seeds} found, {wrong} wrong"


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
    for step in range(1, 161):
        factor = 1.5 if step < 50 or step > 100 else 1.0
        told += watch.observe(step, {0: {"data": 100}, 1: {"data": round(100 * factor)}})
    assert [slow.rank for slow in told] == [1, 1] and told[1].step > 100


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
