"""Kills a training with SIGKILL at random moments and compares every step that it made with an undisturbed twin's.

python scripts/kill_at_random.py 200 --seconds 600
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch._dynamo  # optimizers import it at their first step: once here, not after every kill  # noqa: F401

from headway.bench.faults.case import Case
from headway.bench.faults.small_state import SmallState, forget_memory, own_memory, whole_losses

STEPS = 4000


def train(folder: Path, log: Path) -> None:
    state = SmallState(folder)
    while state.step < STEPS:
        state.train(state.step + 1)
        with log.open("a") as file:
            file.write(f"{state.step} {state.losses[state.step]}\n")
        if state.step % 3 == 0:
            state.save(disk=state.step % 6 == 0, wait=False)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kills", type=int)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    dice, until = random.Random(given.seed), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        own_memory(Case(1, given.seed, base, base))
        twin = whole_losses(base / "twin", STEPS)
        kills = 0
        while kills < given.kills and time.monotonic() < until:
            child = os.fork()
            if child == 0:
                train(base / "run", base / "log")
                os._exit(0)
            time.sleep(dice.uniform(0.4, 2.0))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFEXITED(status):
                break
            kills += 1
        told = [line.split() for line in (base / "log").read_text().splitlines()]
        steps = [int(step) for step, _ in told]
        odd = sum(twin[int(step)] != loss for step, loss in told)
        redone = max((a - b + 1 for a, b in itertools.pairwise(steps) if b <= a), default=0)
        print(f"{kills} kills, {len(steps)} steps up to {max(steps)}: {odd} not hex-equal, at most {redone} done twice")
        forget_memory()


if __name__ == "__main__":
    main()
