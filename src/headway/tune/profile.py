"""Ten steps of a configuration: where the time went, and how fast."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.account.account import Account
from headway.account.errors import UserError
from headway.account.events import Flops, StepLine
from headway.config.run import RunConfig
from headway.prove.trainee import build_apart
from headway.train.step_lines import StepLines, account_of
from headway.tune.running import Running, running


@dataclass(frozen=True)
class Profile:
    """The measured steps together. tokens are real ones; mfu 0 to 1, None where the peak is unknown.

    steps: tokens and seconds of each. running: what ran.
    """

    account: Account
    flops: Flops
    slots: int
    tokens: int
    documents: int
    seconds: float
    mfu: float | None
    steps: tuple[tuple[int, float], ...] = ()
    running: Running | None = None

    @property
    def speed(self) -> float:
        """Effective tokens/s."""
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1 - self.tokens / self.slots


LEAST = 2
"""Steps that any profile counts."""
MOST = 2
"""Times the steps asked for that are made at the most, where something is compiled in some."""
CLEAR = 0.15
"""A trial this far from the speed it is held against is decided early, once it has lasted `LEAST_SECONDS`."""
LEAST_SECONDS = 2.0
"""That the steps of a profile should last together: a machine's load changes in seconds, not in steps of 20 ms."""
MANY = 10
"""Times the steps asked for that are made at the most to last that long."""


class Unchanged(UserError):
    """What would be profiled is what ran in the rival's profile."""

    def __init__(self, now: Running) -> None:
        super().__init__("what runs is the same")
        self.now = now


def decided(told: Sequence[StepLine], rival: float | None, most_seconds: float) -> bool:
    """Whether a profile has counted enough: its time is spent, or its speed lies clearly beside the rival's.

    told: the counted steps that the device has finished. One that is only launched has tokens, and no time yet.
    """
    seconds = sum(line.wall_ns for line in told) / 1e9
    if len(told) < LEAST or seconds <= 0:
        return False
    speed = sum(line.tokens for line in told) / seconds
    clear = rival is not None and abs(speed / rival - 1) > CLEAR and seconds > LEAST_SECONDS
    return seconds > most_seconds or clear


def profile(
    config: RunConfig,
    scratch: Path,
    *,
    steps: int,
    warm_up: int = 1,
    rival: Profile | None = None,
    least_seconds: float = 0.0,
    most_seconds: float = float("inf"),
) -> Profile:
    """Runs `warm_up` steps that do not count and up to `steps` that do, in the words of the training loop.

    A step in which something was compiled does not count either: a layer is compiled once for the first bucket of the
    document table and once for any other, at whatever step that comes, and a run pays it once. Where compiling does
    not end, it is what the training costs, and every step counts.

    rival: to be held against, whose speed ends a clear case early. least_seconds, most_seconds: of the counted steps,
    of which there may be `MANY` times as many to last the least.

    Raises:
        Unchanged: it would run as the rival did, step for step: `auto` decided so.
        UserError: the configuration cannot be built, or does not fit into memory.
    """
    lines = StepLines()
    run = build_apart(config, scratch, lambda: [lines])
    try:
        now = running(config, run)
        if rival is not None and now == rival.running:
            raise Unchanged(now)
        run.start()
        made = 0
        while True:
            run.clock.begin_step()
            run.tell_finished_steps()
            told = lines.steps[warm_up:]
            found = counted(told)
            many = MANY * steps if sum(line.wall_ns for line in found) < least_seconds * 1e9 else steps
            if decided(found, rival.speed if rival else None, most_seconds) or made >= warm_up + min(
                many + len(told) - len(found), MOST * many
            ):
                run.clock.abandon()
                break
            run.learn(run.next_batch())
            run.collect_garbage()
            made += 1
        run.reporter.tell_finished()
        peak, now = run.session_start.peak_flops, running(config, run)  # less may have fitted than was thought
    finally:
        run.close("failed")
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    told = lines.steps[warm_up:]
    found = counted(told)
    return replace(summed(found if len(found) >= min(LEAST, steps) else told, peak), running=now)


def counted(told: Sequence[StepLine]) -> list[StepLine]:
    """The steps in which nothing was compiled. Neither counts the one behind: on a device a step's line is written when
    the next has been launched, and that may be the one that waited."""
    return [
        line for number, line in enumerate(told) if not line.recompiles and not (number and told[number - 1].recompiles)
    ]


def summed(lines: list[StepLine], peak_flops: float | None) -> Profile:
    """Several steps as one profile."""
    account = account_of(lines)
    flops = sum((line.flops for line in lines), Flops())
    seconds = account.wall_ns / 1e9
    return Profile(
        account=account,
        flops=flops,
        slots=sum(line.slots for line in lines),
        tokens=sum(line.tokens for line in lines),
        documents=sum(line.sequences for line in lines),
        seconds=seconds,
        mfu=flops.useful / seconds / peak_flops if peak_flops else None,
        steps=tuple((line.tokens, line.wall_ns / 1e9) for line in lines),
    )


def spread(before: Profile, after: Profile) -> float:
    """What the gain in speed from one to the other differs by from step to step: half of what its middle half spans.

    Where both made their steps of the same documents, step by step, so that only the machine is in it; else the spread
    of each side's speeds, together.
    """
    pairs = list(zip(before.steps, after.steps, strict=False))
    if len(pairs) >= LEAST and all(left[0] == right[0] for left, right in pairs):
        return _half_range([left[1] / right[1] for left, right in pairs])
    sides = ([tokens / seconds for tokens, seconds in side.steps] for side in (before, after))
    relative = sum(_half_range(side) / statistics.median(side) for side in sides if side)
    return after.speed / before.speed * relative


def _half_range(values: Sequence[float]) -> float:
    """Of fewer than four values half of what all span."""
    if len(values) < 4:
        return (max(values) - min(values)) / 2
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / 2
