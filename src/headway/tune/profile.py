"""Ten steps of a configuration: where the time went, how fast, how much memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from headway.account.account import Account
from headway.account.events import Flops, StepLine
from headway.account.run_clock import RunClock
from headway.config.run import RunConfig
from headway.prove.trainee import prepared
from headway.train.build import build_run
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
    memory_bytes: int
    mfu: float | None

    @property
    def speed(self) -> float:
        """Effective tokens/s."""
        return self.tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1 - self.tokens / self.slots


def profile(config: RunConfig, scratch: Path, *, steps: int, warm_up: int = 1) -> Profile:
    """Runs `warm_up` steps that do not count and `steps` that do, in the words of the training loop.

    Raises:
        UserError: the configuration cannot be built, or does not fit into memory.
    """
    lines = StepLines()
    run = build_run(prepared(config, scratch), None, RunClock(), observers=lambda: [lines], say=lambda text: None)
    try:
        run.start()
        for _ in range(warm_up + steps):
            run.clock.begin_step()
            run.tell_finished_steps()
            run.learn(run.next_batch())
            run.collect_garbage()
        run.clock.end_step()
        run.reporter.tell_finished()
        peak = run.session_start.peak_flops
    finally:
        run.close("failed")
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return summed(lines.steps[warm_up:], peak)


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
        memory_bytes=max(line.memory_bytes for line in lines),
        mfu=flops.useful / seconds / peak_flops if peak_flops else None,
    )
