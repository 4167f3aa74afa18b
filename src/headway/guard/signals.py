"""Stopping on purpose: a signal sets a flag, all ranks agree at the same step, the loop saves and leaves.

A handler that did more than set a flag would run in the middle of a collective or a save; a rank that stopped alone
would leave the others waiting for it.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from headway.guard.integrity import check_collectives
from headway.guard.process_group import control, control_group

EXIT_PREEMPTED = 75
"""The exit code that says: stopped by a signal, state saved (BSD's EX_TEMPFAIL)."""

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Installs handlers for SIGTERM and SIGINT that only remember the signal; `close` puts the former ones back.

    A second SIGINT raises KeyboardInterrupt (someone at the terminal wants out now); a second SIGTERM changes nothing,
    because schedulers repeat it while the save that the first one asked for is under way.
    """

    def __init__(self) -> None:
        """Raises RuntimeError outside the main thread, where Python cannot install handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopRequest needs the main thread: only there can signal handlers be installed")
        self.signal: int = 0
        """The first signal received, 0 when none was."""
        self._interrupts = 0
        self._former: dict[int, Any] = {number: signal.signal(number, self._remember) for number in _WATCHED}

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    @property
    def requested(self) -> bool:
        """Did *this* rank receive a signal? Act only on what `agree_to_stop` says."""
        return self.signal != 0

    def close(self) -> None:
        """Puts the former handlers back. May be called twice."""
        for number, former in self._former.items():
            signal.signal(number, former if former is not None else signal.SIG_DFL)
        self._former = {}

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def agree_to_stop(stop: StopRequest, entered: int = 0) -> int:
    """Collective, once a step on every rank: the signal that any rank received, 0 to go on. Same answer everywhere.

    Signals reach the ranks at different moments; after this call all stop behind the same step. `entered`: how many
    collectives this rank has entered; raises CollectiveMismatch on all ranks where they differ.
    """
    group = control_group()
    if group is None:
        return stop.signal
    box = torch.tensor([stop.signal, entered, -entered], dtype=torch.int64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    signal_number, most, fewest = box.tolist()
    if most != -fewest:
        check_collectives(control().gather(entered))
    return int(signal_number)


def any_rank(flag: bool) -> bool:
    """Collective: True on every rank if `flag` is true on any."""
    return max_over_ranks(int(flag)) != 0


def max_over_ranks(value: int) -> int:
    """Collective: the largest of the ranks' values (int64). On the CPU, so the device's queue is not waited for."""
    group = control_group()
    if group is None:
        return value
    box = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    return int(box.item())
