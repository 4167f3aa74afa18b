"""The process group: joined with checks, closed without hanging."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guard_helpers import Outcome, on_ranks, run_ranks

from headway.account.errors import UserError
from headway.guard.control import Control
from headway.guard.process_group import (
    barrier,
    close_process_group,
    control_group,
    init_process_group,
    is_main,
)
from headway.guard.ranks import RankEnv

CPU = torch.device("cpu")


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago: these tests play ranks that were started by hand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_hand(ranks: list[int], world: int, port: int, work: Callable[[int], Any]) -> list[Outcome]:
    """One process for each of `ranks`, joined through `init_process_group`; none leaves before all have tried."""
    all_tried = multiprocessing.get_context("fork").Barrier(len(ranks))

    def main(index: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()  # the helper's own
        rank = ranks[index]
        env = RankEnv(rank, rank, world, world, "127.0.0.1", port, "environment")
        try:
            init_process_group(env, CPU, timeout_s=20)
        finally:
            all_tried.wait(60)
        return work(rank)

    return run_ranks(len(ranks), main)


def test_two_ranks_meet_and_leave(port: int) -> None:
    def work(rank: int) -> tuple[bool, float, bool]:
        barrier()
        box = torch.ones(1)
        dist.all_reduce(box)
        assert control_group() is not dist.group.WORLD
        return is_main(), float(box), close_process_group()

    outcomes = by_hand([0, 1], 2, port, work)
    assert [outcome.value for outcome in outcomes] == [(True, 2.0, True), (False, 2.0, True)], outcomes


def test_a_rank_given_to_two_processes_is_refused(port: int) -> None:
    outcomes = by_hand([0, 1, 1], 2, port, lambda rank: close_process_group())
    refused = [outcome for outcome in outcomes[1:] if "UserError: RANK=1 was given to two processes" in outcome.error]
    assert len(refused) == 1 and [outcome.value for outcome in outcomes if outcome not in refused] == [True, True], (
        outcomes
    )


def test_two_processes_with_rank_0_and_a_taken_port_are_refused(port: int) -> None:
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        outcomes = by_hand([0], 2, port, lambda rank: None)
    assert f"UserError: MASTER_PORT={port} is taken" in outcomes[0].error, outcomes


def test_a_missing_rank_is_waited_for_only_so_long(port: int) -> None:
    def main(index: int) -> None:
        init_process_group(RankEnv(0, 0, 2, 2, "127.0.0.1", port, "environment"), CPU, timeout_s=1)

    outcome = run_ranks(1, main)[0]
    assert "UserError: not all 2 ranks met" in outcome.error, outcome


def test_one_process_needs_no_group() -> None:
    init_process_group(None, CPU)
    assert not dist.is_initialized() and is_main() and control_group() is None and close_process_group()
    barrier()


def test_one_rank_needs_no_address() -> None:
    init_process_group(RankEnv(0, 0, 1, 1, None, None, "environment"), CPU)
    assert dist.get_world_size() == 1 and is_main()
    barrier()
    assert close_process_group() and not dist.is_initialized()


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="LOCAL_RANK=3 needs device cuda:3, but 2 are visible"):
        init_process_group(RankEnv(3, 3, 4, 4, "127.0.0.1", 1, "environment"), torch.device("cuda"))


def closing_beside_a_stopped_rank(rank: int, folder: Path) -> bool:
    if rank == 1:
        (folder / "pid.part").write_text(str(os.getpid()))
        os.replace(folder / "pid.part", folder / "pid")
        os.kill(os.getpid(), signal.SIGSTOP)
    while not (folder / "pid").exists():
        time.sleep(0.01)
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    closed = close_process_group(timeout_s=2.0)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    del work  # it kept the collective alive until here
    return closed


def test_closing_returns_while_a_peer_is_stopped(tmp_path: Path) -> None:
    stuck, stopped = run_ranks(2, closing_beside_a_stopped_rank, tmp_path)
    # Killed by the one that had closed its group, while its collective was still waiting for the stopped one.
    assert stuck.code == 0 and stopped.code == -signal.SIGKILL, (stuck, stopped)


def agreements(rank: int) -> list[Any]:
    control = Control(control_group())
    found: list[Any] = [control.gather(rank * 2), control.broadcast({"from": rank})]

    def only_rank_1_fails() -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    for expected in ((OSError,), (KeyError,)):
        try:
            control.on_all(only_rank_1_fails, UserError, expected)
        except Exception as problem:
            found.append(f"{type(problem).__name__}: {problem}")
    try:
        control.on_main(lambda: 1 // 0, UserError, (ZeroDivisionError,))
    except UserError as problem:
        found.append(str(problem))
    return [*found, control.on_main(lambda: "done", UserError, ())]


def test_what_fails_on_one_rank_fails_on_all() -> None:
    first, second = on_ranks(2, agreements)
    text = "[Errno 28] No space left on device"
    assert first[:2] == [[0, 2], {"from": 0}]
    assert first[2:4] == [f"UserError: rank 1: {text}", f"RuntimeError: rank 1: OSError: {text}"]
    assert first[4:] == ["rank 0: integer division or modulo by zero", "done"]
    assert second[3] == f"OSError: {text}" and second[:3] + second[4:] == first[:3] + first[4:]
