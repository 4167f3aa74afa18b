"""Where a step's time goes, measured on the timeline that matters: the host's on CPU, the device's on CUDA.

Each phase claims the time until the next mark; phases nest, the inner one interrupting the outer one. What lies
between phases stays `unaccounted`. On CUDA the marks are events in the stream, read one step late: nothing waits
for the device, and host work that the device hides costs nothing in the account, as in truth.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headway.account.account import Account
from headway.account.run_clock import PhaseWatch
from headway.account.tree import STEP


@dataclass(frozen=True)
class ClosedStep:
    """A step's account and its length on the host's clock (the two differ on CUDA, where the host runs ahead)."""

    account: Account
    host_wall_ns: int


class _Timeline(Protocol):
    def mark(self) -> Any: ...

    def between(self, earlier: Any, later: Any) -> int: ...


class HostTimeline:
    """Marks are monotonic nanoseconds."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def between(self, earlier: int, later: int) -> int:
        return later - earlier


class CudaTimeline:
    """Marks are CUDA events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> int:
        later.synchronize()
        return max(0, round(earlier.elapsed_time(later) * 1e6))


class StepClock:
    """begin_step() closes the step before and opens the next; end_step() closes without opening."""

    def __init__(self, device_type: str) -> None:
        self._timeline: _Timeline = CudaTimeline() if device_type == "cuda" else HostTimeline()
        self._segments: list[tuple[Any, str | None]] = []
        self._stack: list[str] = []
        self._host_start = 0
        self._open = False
        self._closed: deque[tuple[list[tuple[Any, str | None]], int]] = deque()
        self.marks = 0
        self.watch: PhaseWatch | None = None
        """Told of every phase, e.g. the rank's beacon."""
        self.annotate = False
        """Whether phases also stand as ranges in a profiler's trace; on only while one records."""

    def begin_step(self) -> None:
        self.end_step()
        self._segments = [(self._timeline.mark(), None)]
        self._host_start = time.monotonic_ns()
        self._open = True

    def end_step(self) -> None:
        if self._open:
            self._mark(None)
            self._closed.append((self._segments, time.monotonic_ns() - self._host_start))
            self._open = False

    def abandon(self) -> None:
        """Drops the open step: what it began will not be a step."""
        self._open = False

    @contextmanager
    def phase(self, path: str) -> Iterator[None]:
        """Claims the time inside for `path`; must lie inside a step. Between steps it measures nothing."""
        if not self._open:
            yield
            return
        if path not in STEP:
            raise KeyError(f"{path!r} is not a category of the step account")
        self._mark(self._stack[-1] if self._stack else None)
        self._stack.append(path)
        if self.watch is not None:
            self.watch.enter(path)
        try:
            with torch.profiler.record_function(f"headway.{path}") if self.annotate else nullcontext():
                yield
        finally:
            self._mark(self._stack.pop())
            if self.watch is not None:
                self.watch.leave()

    def _mark(self, path: str | None) -> None:
        self._segments.append((self._timeline.mark(), path))
        self.marks += 1

    def take(self) -> ClosedStep:
        """The oldest closed step that nobody took; waits for the device to pass its marks.

        Raises:
            IndexError: no step is closed.
        """
        segments, host_wall_ns = self._closed.popleft()
        parts: dict[str, int] = {}
        wall = 0
        for (earlier, _), (later, path) in itertools.pairwise(segments):
            ns = self._timeline.between(earlier, later)
            wall += ns
            if path is not None:
                parts[path] = parts.get(path, 0) + ns
        on_host = isinstance(self._timeline, HostTimeline)
        return ClosedStep(Account.close(STEP, wall, parts), wall if on_host else host_wall_ns)

    def mark_cost_ns(self, samples: int = 2000) -> float:
        """What one mark costs the host, measured."""
        start = time.perf_counter_ns()
        for _ in range(samples):
            self._timeline.mark()
        return (time.perf_counter_ns() - start) / samples
