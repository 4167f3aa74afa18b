"""What the account and the periodic trace cost a run, from its own records."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.account.errors import UserError
from headway.diagnose.diagnosis import diagnose_job
from headway.diagnose.job import read_job
from headway.record.folder import RunFolder
from headway.record.sessions import read_history

_WARM_UP = 2


@dataclass(frozen=True)
class Cost:
    """Seconds, of one rank. `window_s`: starting, stopping and writing one trace; `slower_s`: what the traced steps of
    a window take beyond ordinary ones; `background_s`: CPU time of compressing and diagnosing a trace, in a process of
    the lowest priority."""

    steps: int
    step_s: float
    traced_step_s: float
    windows: int
    window_s: float
    slower_s: float
    background_s: float
    account_share: float

    def share(self, every: int) -> float:
        """Of the wall clock, with a trace every so many steps, as if the background had to be waited for."""
        cost = self.window_s + self.slower_s + self.background_s
        return cost / (every * self.step_s + self.window_s + self.slower_s)

    def shortest_step(self, every: int, most: float) -> float:
        """Seconds that a step must take at least for the trace to cost no more than the share `most`."""
        return (self.window_s + self.slower_s + self.background_s) / (every * most)

    def lines(self, every: int) -> list[str]:
        return [
            f"account: {self.account_share:.4%} of the wall clock",
            f"steps of {1e3 * self.step_s:.1f} ms, traced ones of {1e3 * self.traced_step_s:.1f} ms (medians; "
            f"{self.steps:,} steps, {self.windows} traces)",
            f"a trace costs {1e3 * self.window_s:.0f} ms to start, stop and write, {1e3 * self.slower_s:.0f} ms in "
            f"slower steps, and {1e3 * self.background_s:.0f} ms CPU in the background",
            f"one every {every:,} steps: {self.share(every):.3%} of this run; under 1 % for steps of "
            f"{1e3 * self.shortest_step(every, 0.01):.0f} ms or more",
        ]

    def record(self, every: int) -> dict[str, Any]:
        return {**asdict(self), "every": every, "share": self.share(every)}


def cost_of(root: Path) -> Cost:
    """Reads a run folder that traced itself, and diagnoses its newest trace once more to time it.

    Raises:
        UserError: no run folder, or one without a periodic trace.
    """
    folder = RunFolder.open(root)
    history = read_history(folder)
    windows = [line for line in history.traces if line.traced_steps]
    if not windows:
        raise UserError(f"{root}: no periodic trace in this run; train it with log.profile_every below its steps")
    traced = {number for line in windows for number in range(line.step, line.step + line.traced_steps)}
    kept = [line for line in history.kept if line.step > _WARM_UP]
    plain = [line.wall_ns / 1e9 for line in kept if line.step not in traced]
    profiled = [line.wall_ns / 1e9 for line in kept if line.step in traced]
    if not plain or not profiled:
        raise UserError(f"{root}: both traced and ordinary steps are needed after the first {_WARM_UP}")
    step, slow = float(np.median(plain)), float(np.median(profiled))
    ends = [session.end for session in history.sessions if session.end is not None]
    wall = sum(end.wall_ns for end in ends)
    each = float(np.median([line.traced_steps for line in windows]))
    return Cost(
        steps=len(kept),
        step_s=step,
        traced_step_s=slow,
        windows=len(windows),
        window_s=float(np.median([line.cost_ns for line in windows])) / 1e9,
        slower_s=max(0.0, slow - step) * each,
        background_s=_background(sorted((folder.root / windows[-1].path).glob("rank-*.json.gz"))),
        account_share=sum(end.account_cost_ns for end in ends) / wall if wall else 0.0,
    )


def _background(paths: list[Path]) -> float:
    """CPU seconds of what the process beside the run does with a trace: compress one rank's, diagnose them all."""
    with tempfile.TemporaryDirectory(prefix="headway-cost-") as scratch:
        plain = Path(scratch) / "trace.json"
        with gzip.open(paths[0]) as source, plain.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        began = time.process_time()
        with plain.open("rb") as source, gzip.open(plain.with_suffix(".gz"), "wb", compresslevel=4) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        diagnose_job(read_job(paths))
        return time.process_time() - began
