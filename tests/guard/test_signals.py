"""Stopping on purpose: a flag on each rank, one decision for all."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guard_helpers import on_ranks

from headway.guard.signals import StopRequest, agree_to_stop, any_rank, max_over_ranks


def test_signals_set_a_flag_and_the_former_handlers_come_back() -> None:
    former = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    with StopRequest() as stop:
        assert not stop.requested and agree_to_stop(stop) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeats it: nothing more happens
        assert stop.requested and agree_to_stop(stop) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGTERM  # the first one names the reason
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former
    stop.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == former


def test_the_second_interrupt_gets_out() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_only_the_main_thread_can_listen() -> None:
    said = []

    def work() -> None:
        try:
            StopRequest()
        except RuntimeError as problem:
            said.append(str(problem))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said and "main thread" in said[0]


def steps_until_stop(rank: int, signalled: int, agree: bool, folder: Path) -> tuple[int, int, bool, bool]:
    with StopRequest() as stop:
        for step in range(1, 20):
            dist.all_reduce(torch.ones(1))  # the step's own collective
            if rank == signalled and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            decision = agree_to_stop(stop) if agree else stop.signal
            if decision:
                break
        return step, decision, any_rank(rank == 1), any_rank(False)


@pytest.mark.parametrize("signalled", [0, 2])
def test_all_ranks_stop_at_the_same_step_whoever_got_the_signal(signalled: int, tmp_path: Path) -> None:
    found = on_ranks(3, steps_until_stop, signalled, True, tmp_path)
    assert found == [(5, signal.SIGTERM, True, False)] * 3


def alone(rank: int) -> list[int]:
    """The plant: what each rank would decide by itself."""
    with StopRequest() as stop:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return [stop.signal, max_over_ranks(stop.signal)]


def test_without_agreement_the_ranks_would_differ() -> None:
    assert on_ranks(2, alone) == [[0, 15], [15, 15]]


def test_alone_nothing_is_asked() -> None:
    assert any_rank(True) and not any_rank(False) and max_over_ranks(7) == 7
