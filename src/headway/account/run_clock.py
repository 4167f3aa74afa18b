"""The run's wall clock, by category, in one session. No torch, no files: the loop tells it what it is doing."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from headway.account.account import Account
from headway.account.tree import RUN

# The launcher passes the moment the user pressed return, so that its own start-up is not lost to the account.
LAUNCHED_AT = "HEADWAY_LAUNCHED_AT"
# The supervisor passes what a death cost: when the dead session's account ended and when the death was noticed.
LOST = "HEADWAY_LOST"
_WARM_UP_SAMPLE = 64


class PhaseWatch(Protocol):
    """Hears of the phases of a clock: where the process is."""

    def enter(self, phase: str) -> None: ...

    def leave(self) -> None: ...


def process_age_ns() -> int:
    """How long this process (or the launcher that started it) has lived, in nanoseconds."""
    launched = os.environ.get(LAUNCHED_AT)
    if launched is not None:
        return max(0, int((time.time() - float(launched)) * 1e9))
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            # After the name, which may hold anything: the 22nd field of proc(5), in ticks since the machine's start.
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0, int((time.clock_gettime(time.CLOCK_BOOTTIME) - started) * 1e9))
    except (OSError, ValueError, IndexError, AttributeError):  # no Linux
        import psutil

        # By the wall clock: psutil knows the machine's start to a second, and that clock may have been set since.
        return max(0, int((time.time() - psutil.Process().create_time()) * 1e9))


def start_run_clock() -> RunClock:
    """The clock of this process's session. After a death it goes on where the dead session's account ended, so that
    no second of the run belongs to nobody; its start is then downtime."""
    lost = os.environ.get(LOST)
    if lost is None:
        return RunClock(process_age_ns())
    # The monotonic clock is one for all processes of a machine, and no jump of the wall clock reaches it.
    known, now = json.loads(lost), time.monotonic_ns()
    told, detected = int(known["told_ns"]), int(known["detected_ns"])
    return RunClock(now - told, {"downtime.detect": detected - told, "downtime.restart": now - detected})


class RunClock:
    """Sums one session's wall clock into the RUN tree.

    `age_ns` is the time the process had already lived when the clock was made; it counts as startup.launch.
    Phases may nest: the inner one interrupts the outer one. `before` says what that time was after a death; starting
    up then counts as downtime.restart.
    """

    def __init__(self, age_ns: int = 0, before: Mapping[str, int] | None = None) -> None:
        self._parts: dict[str, int] = {"startup.launch": age_ns} if before is None else dict(before)
        self._restarted = before is not None
        self.watch: PhaseWatch | None = None
        """Told of every phase, e.g. the rank's beacon."""
        self._age_ns = age_ns
        self._open: list[str] = []
        self._start = self._mark = time.monotonic_ns()
        self._first_step_ns = 0
        self._step_sample: list[int] = []

    @contextmanager
    def phase(self, path: str) -> Iterator[None]:
        if path not in RUN:
            raise KeyError(f"{path!r} is not a category of the run account")
        if self._restarted and path.startswith("startup."):
            path = "downtime.restart"
        self._lap()
        self._open.append(path)
        if self.watch is not None:
            self.watch.enter(path)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()
            if self.watch is not None:
                self.watch.leave()

    def _lap(self) -> None:
        now = time.monotonic_ns()
        if self._open:
            self._parts[self._open[-1]] = self._parts.get(self._open[-1], 0) + now - self._mark
        self._mark = now

    def step(self, wall_ns: int, checkpoint_ns: int, *, wasted: bool = False) -> None:
        """Adds one step of the loop; the checkpoint's share of it is a stall, not productive.

        `wasted`: it updated no weight, so its time is rework.
        """
        self._parts["checkpoint_stall"] = self._parts.get("checkpoint_stall", 0) + checkpoint_ns
        productive = wall_ns - checkpoint_ns
        if wasted:
            self._parts["rework"] = self._parts.get("rework", 0) + productive
            return
        self._parts["productive"] = self._parts.get("productive", 0) + productive
        if not self._first_step_ns:
            self._first_step_ns = productive
        elif len(self._step_sample) < _WARM_UP_SAMPLE:
            self._step_sample.append(productive)

    def lose(self, wall_ns: int) -> None:
        """Steps of this much time were rolled back: rework, where they counted as productive."""
        self._parts["productive"] = self._parts.get("productive", 0) - wall_ns
        self._parts["rework"] = self._parts.get("rework", 0) + wall_ns

    def parts(self) -> dict[str, int]:
        """The session so far, `unaccounted` left out; warm-up is what the first step took over the median step."""
        parts = dict(self._parts)
        if self._step_sample:
            warm_up = max(0, self._first_step_ns - int(statistics.median(self._step_sample)))
            warm_up = min(warm_up, parts["productive"])  # the first step itself may have been rolled back
            parts["compile"] = parts.get("compile", 0) + warm_up
            parts["productive"] -= warm_up
        return parts

    def account(self) -> Account:
        """The session's closed account up to now."""
        self._lap()
        return Account.close(RUN, self._age_ns + self._mark - self._start, self.parts())
