"""What a save a minute takes from a training, whole: the same steps with and without, in turn, to their end."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from headway.bench.checkpoint import Trained, scratch
from headway.guard.tiers import Tiers
from headway.guard.upkeep import Keep

TARGETS = {"memory": 0.03, "disk": 0.06}


@dataclass(frozen=True)
class Window:
    """The same number of steps. cpu: core-seconds of the trainer and its saver."""

    wall_s: float
    cpu_s: float


@dataclass
class MinuteReport:
    """lost: shares of the time by the clock; cpu: core-seconds that the save added, over what `threads` cores have in
    that time. steps: of a window, which lasts about `seconds`."""

    gigabytes: float
    seconds: float
    steps: int
    threads: int
    load: list[float] = field(default_factory=list)
    lost: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        lines = [
            f"state {self.gigabytes:.2f} GB, {self.threads} threads, {self.steps} steps a window of about "
            f"{self.seconds:.0f} s, load {min(self.load):.1f} to {max(self.load):.1f}"
        ]
        for tier, lost in self.lost.items():
            lines.append(
                f"{tier}: one save a window loses {_percent(lost)} of the time (least–median–most of {len(lost)}, "
                f"target {TARGETS[tier]:.0%} at a save a minute); by core-seconds {_percent(self.cpu[tier])}"
            )
        return lines


def bench_minute(
    gigabytes: float, rounds: int, threads: int, seconds: float = 60.0, folder: Path | None = None
) -> MinuteReport:
    """Windows in turn: without, memory, without, disk, without …; each with a save against the two beside it.

    A window with a save begins with it and ends when its steps are made and the save is published, whichever is later.
    Raises RuntimeError when a save fails.
    """
    torch.set_num_threads(threads)
    with scratch(folder) as root:
        trained = Trained(gigabytes, root)
        try:
            return _measure(trained, rounds, threads, seconds)
        finally:
            trained.tiers.close(over=True)


def _measure(trained: Trained, rounds: int, threads: int, seconds: float) -> MinuteReport:
    begun = time.perf_counter()
    for _ in range(3):
        trained.step()
    steps = max(3, round(seconds / ((time.perf_counter() - begun) / 3)))
    report = MinuteReport(trained.gigabytes, seconds, steps, threads)
    number = 10
    before = _window(trained, steps, None, number)
    for _ in range(rounds):
        for tier in TARGETS:
            number += 1
            with_save = _window(trained, steps, tier, number)
            after = _window(trained, steps, None, number)
            plain = Window((before.wall_s + after.wall_s) / 2, (before.cpu_s + after.cpu_s) / 2)
            report.lost.setdefault(tier, []).append(with_save.wall_s / plain.wall_s - 1)
            added = (with_save.cpu_s - plain.cpu_s) / (threads * seconds)
            report.cpu.setdefault(tier, []).append(added)
            report.load.append(os.getloadavg()[0])
            before = after
    return report


def _window(trained: Trained, steps: int, tier: str | None, number: int) -> Window:
    tiers = trained.tiers
    started, cpu = time.perf_counter(), _cpu_s(tiers)
    if tier is not None:
        trained.save(number, disk=tier == "disk", keep=Keep(last=1))
    for _ in range(steps):
        trained.step()
    tiers.settle()
    found = Window(time.perf_counter() - started, _cpu_s(tiers) - cpu)
    if any(not event.ok for event in tiers.poll()):
        raise RuntimeError(f"the save to {tier} failed")
    return found


def _cpu_s(tiers: Tiers) -> float:
    assert tiers.saver.pid is not None
    return time.process_time() + sum(psutil.Process(tiers.saver.pid).cpu_times()[:2])


def _percent(shares: list[float]) -> str:
    return f"{min(shares):.1%}–{statistics.median(shares):.1%}–{max(shares):.1%}"
