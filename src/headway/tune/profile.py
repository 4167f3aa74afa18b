"""Ten steps of a configuration: where the time went, and how fast."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.account.account import Account
from headway.account.events import Flops, StepLine
from headway.config.run import RunConfig
from headway.prove.trainee import build_apart
from headway.train.step_lines import StepLines, account_of


@dataclass(frozen=True)
class Profile:
    """The measured steps together. tokens are real ones; mfu 0 to 1, None where the peak is unknown."""

    account: Account
    flops: Flops
    slots: int
    tokens: int
    documents: int
    seconds: float
    mfu: float | None

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
"""A trial this far from the speed it is held against is decided after `LEAST` steps."""


def decided(told: Sequence[StepLine], rival: float | None, most_seconds: float) -> bool:
    """Whether a profile has counted enough: its time is spent, or its speed lies clearly beside the rival's.

    told: the counted steps that the device has finished. One that is only launched has tokens, and no time yet.
    """
    seconds = sum(line.wall_ns for line in told) / 1e9
    if len(told) < LEAST or seconds <= 0:
        return False
    speed = sum(line.tokens for line in told) / seconds
    return seconds > most_seconds or (rival is not None and abs(speed / rival - 1) > CLEAR)


def profile(
    config: RunConfig,
    scratch: Path,
    *,
    steps: int,
    warm_up: int = 1,
    rival: float | None = None,
    most_seconds: float = float("inf"),
) -> Profile:
    """Runs `warm_up` steps that do not count and up to `steps` that do, in the words of the training loop.

    A step in which something was compiled does not count either: a layer is compiled once for the first bucket of the
    document table and once for any other, at whatever step that comes, and a run pays it once. Where compiling does
    not end, it is what the training costs, and every step counts.

    rival: effective tokens/s to be held against, which ends a clear case early; most_seconds: of the counted steps.

    Raises:
        UserError: the configuration cannot be built, or does not fit into memory.
    """
    lines = StepLines()
    run = build_apart(config, scratch, lambda: [lines])
    try:
        run.start()
        made = 0
        while True:
            run.clock.begin_step()
            run.tell_finished_steps()
            told = lines.steps[warm_up:]
            found = counted(told)
            if decided(found, rival, most_seconds) or made >= warm_up + min(
                steps + len(told) - len(found), MOST * steps
            ):
                run.clock.abandon()
                break
            run.learn(run.next_batch())
            run.collect_garbage()
            made += 1
        run.reporter.tell_finished()
        peak = run.session_start.peak_flops
    finally:
        run.close("failed")
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    told = lines.steps[warm_up:]
    found = counted(told)
    return summed(found if len(found) >= min(LEAST, steps) else told, peak)


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
    )
