"""The periodic trace: every so many steps a few are recorded, written, and diagnosed in a process of their own.

Every rank records the same steps and writes traces/step-XXXXXXXX/rank-00000.json.gz; rank 0's diagnosis waits for the
others' files. The loop pays for starting and stopping the profiler and for writing plain JSON; compressing and reading
happen in a process at the lowest priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headway.account.events import Line, TraceLine
from headway.diagnose.announcement import Announcement
from headway.diagnose.quiet import quiet_profiler
from headway.record.files import read_json
from headway.record.folder import RunFolder
from headway.train.hook import HookPlace

DIAGNOSIS = "diagnosis.json"
# At the end of a run a diagnosis may still be going on; the run is not kept waiting for it longer than this.
_LAST_WAIT_S = 20.0
# The share of a run that its traces may cost, the work in the background counted as if it were waited for.
AT_MOST = 0.01
# Who asks for a trace more often than this wants to see, not to spare.
_SPARING_FROM = 100
# So many steps before a trace the first rank tells the others: time enough for a shared file system to show it.
_AHEAD = 50
_EXPECTED_NS = 1_000_000_000  # of the first trace: about what one costs on a CPU


def trace_folder(root: Path, step: int) -> Path:
    return RunFolder(root).traces / f"step-{step:08d}"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json.gz"


@dataclass
class _Job:
    """A diagnosis going on in the background."""

    step: int
    folder: Path
    process: subprocess.Popen[bytes]
    cost_ns: int


class PeriodicTrace:
    """A step hook (`train.hook.StepHook`).

    Args:
        place: the run folder, the rank, the clock whose phases become ranges of the trace.
        every: steps between traces; a trace begins with each step that it divides.
        steps: steps of a trace; fewer where an evaluation or a checkpoint comes between.

    With `every` of 100 or more, a trace that would bring their cost above AT_MOST of the time since the start is left
    out. Of several ranks the first decides, some steps ahead, and the others read what it wrote into the run folder.
    """

    def __init__(self, place: HookPlace, every: int, steps: int = 3) -> None:
        self._place = place
        self._every = every
        self._steps = min(steps, every)
        self._profile: profile | None = None
        self._range: AbstractContextManager[Any] | None = None
        self._first = 0
        self._seen = 0
        self._cost_ns = 0
        self._job: _Job | None = None
        self._announced = Announcement(RunFolder(place.folder).traces)
        self._said_skipped = False
        self._steps_seen = 0
        self._began = time.perf_counter_ns()
        self._spent_ns = 0
        self._expected_ns = _EXPECTED_NS

    def begin_step(self, step: int) -> Sequence[Line]:
        started = time.perf_counter_ns()
        self._end_range()
        lines = self._finished()  # first: a diagnosis that has ended since the last step makes room for this one's
        if self._profile is not None and self._seen >= self._steps:
            self._write()
        if self._due(step) and self._profile is None:
            if self._job is None:
                self._begin(step)
            else:
                self._say_skipped(step, self._job.step)
        if self._profile is not None:
            self._seen += 1
            self._range = record_function(f"ProfilerStep#{step}")
            self._range.__enter__()
            self._cost_ns += time.perf_counter_ns() - started
        return lines

    def pause(self) -> None:
        """An evaluation or a checkpoint is no step: a trace with a step in it ends here."""
        self._end_range()
        if self._profile is not None:
            self._write()

    def close(self) -> Sequence[Line]:
        self.pause()
        if self._job is not None:
            try:
                self._job.process.wait(_LAST_WAIT_S)
            except subprocess.TimeoutExpired:
                return []
        return self._finished()

    def _due(self, step: int) -> bool:
        self._steps_seen += 1
        if self._every < _SPARING_FROM:
            return step % self._every == 0
        if self._place.world_size == 1:
            return step % self._every == 0 and self._affordable(0)
        if self._place.rank == 0 and (step + _AHEAD) % self._every == 0:
            if self._job is not None:  # what only the others record is no trace of the job
                self._say_skipped(step + _AHEAD, self._job.step)
            self._announced.decide(step + _AHEAD, self._job is None and self._affordable(_AHEAD))
        return step % self._every == 0 and self._announced.is_for(step)

    def _affordable(self, ahead: int) -> bool:
        """Whether a trace so many steps from now keeps all of them within their share."""
        elapsed = time.perf_counter_ns() - self._began
        return self._spent_ns + self._expected_ns <= AT_MOST * elapsed * (1 + ahead / self._steps_seen)

    def _say_skipped(self, step: int, busy_with: int) -> None:
        """Once a run, on the first rank: one diagnosis at a time, so that they never pile up beside the training."""
        if not self._said_skipped and self._place.rank == 0:
            print(
                f"headway: step {step}: no trace, the one of step {busy_with} is still being diagnosed; others are "
                "skipped in the same way (a larger log.profile_every leaves time for each)",
                file=sys.stderr,
                flush=True,
            )
        self._said_skipped = True

    def _begin(self, step: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        quiet_profiler()
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.__enter__()
        self._place.clock.annotate = True
        self._first, self._seen, self._cost_ns = step, 0, 0

    def _end_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _write(self) -> None:
        """Ends the recording, writes it, and starts the process that compresses and diagnoses it."""
        started = time.perf_counter_ns()
        recorded, self._profile = self._profile, None
        self._place.clock.annotate = False
        assert recorded is not None
        recorded.__exit__(None, None, None)
        folder = trace_folder(self._place.folder, self._first)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            plain = rank_file(folder, self._place.rank).with_suffix("")
            recorded.export_chrome_trace(str(plain))
            process = _start(folder, self._place.rank, self._place.world_size)
        except (OSError, RuntimeError) as error:
            # A full disk must not end a training run; the next trace may fit.
            print(f"headway: step {self._first}: the trace was not written: {error}", file=sys.stderr, flush=True)
            return
        cost = self._cost_ns + time.perf_counter_ns() - started
        self._job = _Job(self._first, folder, process, cost)

    def _finished(self) -> list[Line]:
        """The line of a diagnosis that is done; never waits."""
        job = self._job
        if job is None or job.process.poll() is None:
            return []
        self._job = None
        if self._place.rank != 0:
            return []
        self._expected_ns = job.cost_ns + _background_ns(job.folder)
        self._spent_ns += self._expected_ns
        return [self._line(job)]

    def _line(self, job: _Job) -> TraceLine:
        head = {
            "session": self._place.session,
            "step": job.step,
            "time": time.time(),
            "traced_steps": self._seen,
            "path": str(job.folder.relative_to(self._place.folder)),
            "cost_ns": job.cost_ns,
        }
        try:
            summary = read_json(job.folder / DIAGNOSIS)["trace_line"]
            return msgspec.convert({**head, **summary}, TraceLine)
        except (OSError, orjson.JSONDecodeError, KeyError, msgspec.ValidationError) as error:
            note = f"the trace could not be diagnosed (see {head['path']}/diagnosis.log): {error}"
            return msgspec.convert({**head, "note": note}, TraceLine)


def _background_ns(folder: Path) -> int:
    """CPU time of the process that diagnosed, as it wrote it down; 0 where it could not."""
    try:
        return int(read_json(folder / DIAGNOSIS)["background_ns"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return 0


def _start(folder: Path, rank: int, world_size: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headway.diagnose.background", str(folder), str(rank), str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"diagnosis{'' if rank == 0 else f'-{rank:05d}'}.log").open("wb") as log:
        # A session of its own: a Ctrl-C meant for the training must not end it half way.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
