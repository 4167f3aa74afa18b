"""Many kill -9 at random moments of one training: is every single resume bitwise?"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.bench.faults.case import Case
from headway.bench.faults.small_run import Strike, train_small, twin


@dataclass(frozen=True)
class Storm:
    """What came of it. equal: kept steps whose loss and gradient norm are those of the undisturbed twin, bit for bit.

    Times of recovery (from the death to the first new step) in seconds: least, median, most.
    """

    kills: int
    deaths: int
    steps: int
    equal: int
    exit_code: int
    steps_lost: int
    recover_s: tuple[float, float, float]
    seconds: float

    @property
    def right(self) -> bool:
        return self.exit_code == 0 and self.equal == self.steps and self.deaths == self.kills

    def lines(self) -> list[str]:
        low, middle, high = self.recover_s
        return [
            f"{self.kills} kills sent, {self.deaths} deaths in the ledger, exit code {self.exit_code}",
            f"{self.equal} of {self.steps} steps hex-equal to the undisturbed run; {self.steps_lost} steps done again",
            f"death to first new step: {low:.2f} / {middle:.2f} / {high:.2f} s (least, median, most)",
            f"took {self.seconds:.0f} s",
        ]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "right": self.right}


def kill_again_and_again(kills: int, seed: int, folder: Path, material: Path, ranks: int = 2) -> Storm:
    """Trains `2 * kills + 4` steps with a save every 2 and a kill in every second one, at a random moment of it.

    Call it in a process with one thread: it forks the ranks.
    """
    case = Case(0, seed, folder, material)
    steps = 2 * kills + 4
    overrides = (f"train.steps={steps}", "checkpoint.every=2", "checkpoint.keep=2")
    victims = {2 * number + 3: case.dice.randrange(ranks) for number in range(kills)}

    def fault(at: Strike) -> None:
        if victims.get(at.step) == at.rank and at.once(f"kill-{at.step}"):
            moment = random.Random(seed * 100003 + at.step).random() * 0.06
            threading.Thread(target=_kill_in, args=(moment,), daemon=True).start()

    undisturbed = twin(case, *overrides, ranks=ranks).losses()
    begun = time.monotonic()
    run = train_small(case, "storm", fault, *overrides, ranks=ranks)
    losses = run.losses()
    recovered = sorted(item.recover_s for item in run.incidents if item.recover_s is not None) or [0.0]
    return Storm(
        kills=sum(1 for path in folder.glob("struck-kill-*")),
        deaths=len(run.incidents),
        steps=len(undisturbed),
        equal=sum(one == other for one, other in zip(losses, undisturbed, strict=False)),
        exit_code=run.code,
        steps_lost=sum(item.steps_lost for item in run.incidents),
        recover_s=(recovered[0], statistics.median(recovered), recovered[-1]),
        seconds=time.monotonic() - begun,
    )


def _kill_in(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
