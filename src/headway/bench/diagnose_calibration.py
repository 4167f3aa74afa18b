"""Does what diagnose predicts come true? Plants each cause, predicts from a profile, removes the cause, measures."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway.account.errors import UserError
from headway.bench.planted_causes import CAUSES, Cause, Planted
from headway.diagnose.diagnosis import diagnose_job
from headway.diagnose.efficiency import with_efficiency
from headway.diagnose.job import read_job
from headway.diagnose.quiet import quiet_profiler
from headway.diagnose.said import Said

# Of the predicted ranges, how many must contain what was measured.
ENOUGH = 0.8
Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibrated:
    """One cause: predicted gain (low, high) and measured gains of each round, shares of the time, 0 to 1."""

    finding: str
    what: str
    predicted: tuple[float, float] | None
    measured: tuple[float, ...]
    step_ms: float

    @property
    def gain(self) -> float:
        """The median round."""
        return float(np.median(self.measured))

    @property
    def holds(self) -> bool:
        """Whether the predicted range contains the measured gain."""
        return self.predicted is not None and self.predicted[0] <= self.gain <= self.predicted[1]

    def record(self) -> dict[str, Any]:
        low, high = self.predicted or (None, None)
        return {
            "finding": self.finding, "what": self.what, "predicted_low": low, "predicted_high": high,
            "measured": list(self.measured), "median": self.gain, "holds": self.holds, "step_ms": self.step_ms,
        }  # fmt: skip


def chosen(names: str) -> tuple[Cause, ...]:
    """The causes of these findings (comma separated), all where none is named.

    Raises:
        UserError: a name that no planted cause has.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = set(wanted) - {cause.finding for cause in CAUSES}
    if unknown:
        raise UserError(
            f"--causes {', '.join(sorted(unknown))}: choose of {', '.join(cause.finding for cause in CAUSES)}"
        )
    return tuple(cause for cause in CAUSES if not wanted or cause.finding in wanted)


def calibrate(causes: Sequence[Cause] = CAUSES, rounds: int = 7, say: Say = print) -> list[Calibrated]:
    """Every cause in turn. A round is a profile of the loop that has it, and blocks of its steps and of steps without
    it in turn, so that the noise of a shared machine meets all of them. One thread computes."""
    torch.set_num_threads(1)
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        pass  # a process's first recording takes longer than any step
    found = []
    for cause in causes:
        found.append(one := calibrate_one(cause, rounds))
        say(line(one))
    return found


def calibrate_one(cause: Cause, rounds: int) -> Calibrated:
    bad, good = cause.make(True), cause.make(False)
    try:
        for loop in (bad, good):
            _block(loop, cause)  # caches, allocations, workers
        profiles: list[_Predicted] = []
        gains, times = [], []
        for number in range(rounds):
            profiles.append(_quietest(cause, bad))
            turns = (bad, good, good, bad) if number % 2 else (good, bad, bad, good)
            order = turns * 2 if cause.steady else turns  # where a step's noise is all there is
            blocks = [(loop, _block(loop, cause)) for loop in order]
            slow = _mean([taken for loop, taken in blocks if loop is bad])
            fast = _mean([taken for loop, taken in blocks if loop is good])
            times.append(slow)
            gains.append(1 - (fast / good.tokens) / (slow / bad.tokens))
        return Calibrated(cause.finding, cause.what, _middle(profiles), tuple(gains), float(np.median(times)) * 1e3)
    finally:
        bad.close()
        good.close()
        gc.collect()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class _Predicted:
    """What one profile predicts (None: the cause was not found), and the share of its time in which another process had
    the core."""

    gain: tuple[float, float] | None
    robbed: float


_QUIET, _TRIES = 0.05, 3


def _quietest(cause: Cause, loop: Planted) -> _Predicted:
    """Of a few profiles the one that was disturbed least; the first that was hardly disturbed is enough."""
    best = _profiled(cause, loop)
    for _ in range(_TRIES - 1):
        if best.robbed <= _QUIET:
            break
        best = min(best, _profiled(cause, loop), key=lambda one: one.robbed)
    return best


def _middle(profiles: Sequence[_Predicted]) -> tuple[float, float] | None:
    """Medians of both bounds over the quieter half of the profiles; None where most of those found nothing."""
    quiet = sorted(profiles, key=lambda one: one.robbed)[: (len(profiles) + 1) // 2]
    gains = [one.gain for one in quiet if one.gain is not None]
    if len(gains) <= len(quiet) // 2:
        return None
    low, high = np.median(np.array(gains), axis=0).tolist()
    return low, high


class Clock:
    """What this thread took since it was made, without the time in which another process had its core: on a shared
    machine both loops are longer by that, and by another amount each time.

    sleeps: waiting (for a disk, a queue, a timer) counts too, not only computing.
    """

    def __init__(self, sleeps: bool) -> None:
        self._sleeps = sleeps
        self._wall, self._computed, self._robbed = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Wall clock, CPU time of this thread, its time in the run queue; seconds."""
        try:
            robbed = int(_SCHEDULED.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            robbed = 0.0  # no Linux: plain wall clock
        return time.perf_counter(), time.thread_time(), robbed

    @property
    def seconds(self) -> float:
        wall, computed, robbed = self._now()
        return wall - self._wall - (robbed - self._robbed) if self._sleeps else computed - self._computed

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._wall


_SCHEDULED = Path("/proc/thread-self/schedstat")


def _block(loop: Planted, cause: Cause) -> float:
    """Seconds a step: the mean of a block; where every step is alike, the median, which one disturbed step does not
    move. Not the quickest: a profile is of all steps, and what waits for memory varies more than what computes."""
    taken = []
    for _ in range(cause.window):
        clock = Clock(cause.sleeps)
        loop.step()
        taken.append(clock.seconds)
    return float(np.median(taken)) if cause.steady else _mean(taken)


def _profiled(cause: Cause, loop: Planted) -> _Predicted:
    """The predicted gain by the cause's finding in a profile of one block.

    Other processes make what computes longer and what sleeps not: a sleep's share is taken of the undisturbed time.
    """
    with tempfile.TemporaryDirectory(prefix="headway-calibration-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            clock = Clock(sleeps=True)
            for number in range(cause.window):
                with record_function(f"ProfilerStep#{number}"):
                    loop.step()
            robbed = clock.wall - clock.seconds
        recorded.export_chrome_trace(str(path))
        job = read_job([path])
        if cause.told:
            job = with_efficiency(job, Said(tokens=loop.tokens * cause.window))
        diagnosis = diagnose_job(job, memory_free=cause.memory_free)
    share = 1e9 * robbed / max(1, diagnosis.wall_ns)
    found = next((item for item in diagnosis.findings if item.name == cause.finding), None)
    if found is None:
        return _Predicted(None, share)
    scale = diagnosis.wall_ns / max(1.0, diagnosis.wall_ns - 1e9 * robbed) if cause.sleeps else 1.0
    return _Predicted((found.gain[0] * scale, found.gain[1] * scale), share)


def line(one: Calibrated) -> str:
    """One row for people."""
    predicted = "not found" if one.predicted is None else f"{one.predicted[0]:.1%} to {one.predicted[1]:.1%}"
    spread = "–".join(f"{value:.1%}" for value in (min(one.measured), one.gain, max(one.measured)))
    verdict = "holds" if one.holds else "does not hold"
    return f"{one.finding:<28}{predicted:<18}{spread:<24}{verdict:<15}{one.step_ms:7.1f} ms a step  {one.what}"


def lines(found: Sequence[Calibrated]) -> list[str]:
    """The table's end: how many predictions hold."""
    held = sum(one.holds for one in found)
    return [f"{held} of {len(found)} predicted ranges contain the measured gain (torch {torch.__version__})"]
