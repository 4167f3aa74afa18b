"""Feeding: a slow disk and a failed reader show in the account and the ledger; the collector runs at shared steps."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from data.memory_store import random_store
from headway.account.errors import UserError
from headway.account.events import Incident
from headway.data import build_process
from headway.data.batch import positions_of
from headway.data.build_process import BuildProcess
from headway.data.feed import Feeder
from headway.data.global_batch import Position
from headway.data.store import ShardFolder
from headway.data.stream import Stream, StreamOptions
from headway.data.view import View, ViewOptions, Weighted
from headway.record.jsonl import read_jsonl
from headway.train import run as run_module
from headway.train import supply as supply_module
from headway.train.supply import Supply
from tiny import run_file
from train.running import history, losses, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return run_file(tmp_path, train={"steps": 6})


def incidents(path: Path, name: str) -> list[Incident]:
    return read_jsonl(path.parent / "runs" / name / "incidents.jsonl", Incident).items


def plant(monkeypatch: pytest.MonkeyPatch, fault: Any, after: int) -> None:
    """`fault()` runs once, in the reading thread, at the `after`-th document."""
    original, read = ShardFolder.tokens, [0]

    def tokens(self: ShardFolder, *arguments: int) -> Any:
        read[0] += 1
        if read[0] == after:
            fault()
        return original(self, *arguments)

    monkeypatch.setattr(ShardFolder, "tokens", tokens)


@pytest.mark.parametrize("loader", ["thread", "process"])
def test_a_slow_disk_is_charged_to_data_and_told_once(path: Path, monkeypatch: pytest.MonkeyPatch, loader: str) -> None:
    plant(monkeypatch, lambda: time.sleep(2.5), after=22)
    run(path, "name=slow", "data.prefetch=1", f"data.loader={loader}")
    told = [line for line in incidents(path, "slow") if line.fault == "slow data"]
    assert len(told) == 1 and "for a batch" in told[0].evidence and told[0].seconds_lost > 1
    waits = [line.account.get("data", 0) for line in history(path, "slow").kept]
    assert max(waits) > 1e9 and sum(waits) < 2 * max(waits), "in one step, once"


def test_a_reader_that_fails_is_started_again_and_the_curve_is_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply_module, "_PAUSE_S", 0.01)
    run(path, "name=clean")
    assert not incidents(path, "clean")

    def away() -> None:
        raise OSError(5, "planted: input/output error")

    plant(monkeypatch, away, after=12)
    run(path, "name=failed")
    (told,) = [line for line in incidents(path, "failed") if line.fault == "data reader failed"]
    assert "planted" in told.evidence and "started again at document" in told.action
    assert losses(path, "failed") == losses(path, "clean")


def test_a_loading_process_that_is_killed_is_started_again_and_the_curve_is_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply_module, "_PAUSE_S", 0.01)
    run(path, "name=thread")
    original, killed = BuildProcess.build, []

    def build(self: BuildProcess, *asked: Any) -> Any:
        if not killed:
            killed.append(self.pid)
            os.kill(self.pid or 0, signal.SIGKILL)
        return original(self, *asked)

    monkeypatch.setattr(BuildProcess, "build", build)
    run(path, "name=process", "data.loader=process")
    (told,) = [line for line in incidents(path, "process") if line.fault == "data reader failed"]
    assert "builds batches was ended by signal 9" in told.evidence and "started again at document" in told.action
    assert losses(path, "process") == losses(path, "thread")


def small_stream() -> Stream:
    view = View([Weighted(random_store(20))], ViewOptions(40, "drop"))
    return Stream(view, StreamOptions(slots=48, sequences_per_step=2))


def test_a_loading_process_that_stands_stopped_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped and not killed would let training wait for ever, without a word."""
    monkeypatch.setattr(supply_module, "_PAUSE_S", 0.001)
    monkeypatch.setattr(build_process, "_LOOK_S", 0.05)
    made, told = [], []

    def make(at: Position) -> Feeder:
        made.append(Feeder(small_stream(), at, process=True, depth=1))
        return made[-1]

    supply = Supply(make, Position(), lambda *words: told.append(words))
    first = supply.next(Position())
    assert made[0]._builder is not None
    os.kill(made[0]._builder.pid or 0, signal.SIGSTOP)
    position, following = first.batch.next, []
    for _ in range(5):  # some were ready
        following.append(supply.next(position))
        position = following[-1].batch.next
    supply.close()
    assert len(made) == 2 and told[0][0] == "data reader failed" and "stands stopped by a signal" in told[0][1]
    with Feeder(small_stream(), first.batch.next) as expected:
        for fed, other in zip(following, expected, strict=False):
            assert [x.input_ids.tolist() for x in fed.micro_batches] == [
                x.input_ids.tolist() for x in other.micro_batches
            ]


def test_a_long_wait_is_told_while_it_lasts_and_again_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "_LONG_S", 0.2)
    monkeypatch.setattr(supply_module, "_SLOW_S", 0.1)
    stream, told = small_stream(), []
    disk = threading.Event()
    disk.set()
    store: Any = stream.view.stores[0]
    original = store.tokens

    def tokens(*where: int) -> Any:
        disk.wait()
        return original(*where)

    store.tokens = tokens

    def tell(fault: str, evidence: str, action: str, lost: float) -> None:
        told.append((fault, action, lost > 0.2))
        disk.set()  # comes back only once it has been told of

    supply = Supply(lambda at: Feeder(stream, at, depth=1), Position(), tell)
    position = supply.next(Position()).batch.next
    disk.clear()
    for _ in range(6):
        position = supply.next(position).batch.next
    supply.close()
    assert told == [("slow data", "waits on", False), ("slow data", "went on", True)]


def test_a_disk_that_stays_away_ends_the_run_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "_PAUSE_S", 0.001)
    store = random_store(20)
    stream = Stream(View([Weighted(store)], ViewOptions(40, "drop")), StreamOptions(slots=48, sequences_per_step=2))

    def away(*_: int) -> Any:
        raise OSError("planted")

    store.tokens = away  # type: ignore[method-assign]
    told: list[str] = []
    supply = Supply(lambda at: Feeder(stream, at), Position(), lambda *words: told.append(words[2]))
    with pytest.raises(UserError, match=r"cannot be read: OSError: planted"):
        supply.next(Position())
    supply.close()
    assert len(told) == 4 and told[-1] == "stopped after 3 restarts"


def test_the_collector_is_off_in_the_step_and_runs_at_shared_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_COLLECT_EVERY", 3)
    on_its_own: list[int] = []
    monkeypatch.setattr(run_module.Run, "learn", _watched(run_module.Run.learn, on_its_own))
    run(path, "name=collected")
    kept = history(path, "collected").kept
    assert [line.step for line in kept if line.account.get("host.gc", 0)] == [3, 6]
    assert on_its_own == [0] * 6 and gc.isenabled()


def _watched(learn: Any, counts: list[int]) -> Any:
    def watched(self: Any, fed: Any) -> None:
        collected = [0]
        watch = lambda phase, info: collected.__setitem__(0, collected[0] + 1)  # noqa: E731
        gc.callbacks.append(watch)
        try:
            learn(self, fed)
        finally:
            gc.callbacks.remove(watch)
        counts.append(collected[0])

    return watched


def test_positions_made_from_the_table_are_those_of_the_batch() -> None:
    stream = Stream(
        View([Weighted(random_store(30))], ViewOptions(40, "drop")), StreamOptions(slots=48, sequences_per_step=5)
    )
    for batch in stream.global_batch(Position()).micro_batches(0, 1):
        assert torch.equal(positions_of(batch.cu_seqlens, batch.slots).view(batch.input_ids.shape), batch.position_ids)
        assert batch.to("meta").position_ids.shape == batch.position_ids.shape
