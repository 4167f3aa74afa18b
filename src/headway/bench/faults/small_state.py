"""A training of a few numbers under the real tiers, for faults that need many deaths: a fraction of a second each."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.bench.faults.case import Case
from headway.guard.checkpoint import CheckpointStore
from headway.guard.memory import SHARED_MEMORY
from headway.guard.rng import rng_state, set_rng_state
from headway.guard.tiers import Event, Tiers
from headway.guard.training_state import Capture, restore
from headway.guard.upkeep import Keep


class SmallState:
    """Model, optimizer and tiers in `folder`; resumed from the newest checkpoint. `losses`: hex, by step. `ballast`:
    numbers that are saved and never trained, for shards of several blocks."""

    def __init__(self, folder: Path, ballast: int = 0, **options: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.1), nn.Linear(24, 3))
        if ballast:
            self.model.register_buffer("ballast", torch.randn(ballast))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.capture = Capture(self.model, [self.optimizer])
        store = CheckpointStore(folder / "checkpoints", "small")
        store.sweep()
        self.tiers = Tiers(store, folder, **options)
        self.events: list[Event] = []
        self.losses: dict[int, str] = {}
        self.step = 0
        self.found = self.tiers.newest()
        if self.found is not None:
            loaded = restore(self.found.store, self.found.ref, self.model, [self.optimizer])
            assert loaded.rank_state is not None
            set_rng_state(loaded.rank_state)
            self.step = loaded.meta["step"]

    def train(self, until: int) -> None:
        while self.step < until:
            self.step += 1
            batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.tiers.fence()
            self.optimizer.step()
            self.losses[self.step] = float(loss.detach()).hex()
            self.events += self.tiers.poll()

    def save(self, *, disk: bool = True, wait: bool = True) -> bool:
        keep = Keep(last=2)
        begun = self.tiers.save(self.step, self.capture.tree(), {"step": self.step}, rng_state(), disk=disk, keep=keep)
        if wait:
            self.settle()
        return begun

    def settle(self) -> None:
        self.tiers.settle(120)
        self.events += self.tiers.poll()

    def told(self, tier: str) -> list[tuple[int, bool]]:
        return [(event.step, event.ok) for event in self.events if event.tier == tier]


def whole_losses(folder: Path, steps: int) -> dict[int, str]:
    """The twin: never disturbed, never saved."""
    state = SmallState(folder)
    state.train(steps)
    state.tiers.close(over=True)
    return state.losses


def own_memory(case: Case) -> None:
    """Shared memory of the case's own, that goes with it."""
    base = Path(os.environ.get(SHARED_MEMORY, "/dev/shm"), f"headway-case-{case.row}-{case.seed}-{os.getpid()}")
    base.mkdir(exist_ok=True)
    os.environ[SHARED_MEMORY] = str(base)


def forget_memory() -> None:
    import shutil

    shutil.rmtree(os.environ[SHARED_MEMORY], ignore_errors=True)


def in_process(work: Callable[[], None], watchdog_s: float = 120.0) -> int | None:
    """Runs `work` in a forked process; its exit code (negative: the signal), None when it had to be ended."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(work,))
    process.start()
    process.join(watchdog_s)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def end_quietly(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
