"""Rates from the lines' own wall clocks and counts, so that no interval is divided by steps it does not hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headway.account.events import StepLine

_TIME_LEFT_STEPS = 200


@dataclass(frozen=True)
class Rates:
    """What an interval of steps did per second. mfu is None where the peak is unknown; shares are 0 to 1."""

    steps: int
    seconds: float
    slots_per_s: float | None
    tokens_per_s: float | None
    trained_per_s: float | None
    mfu: float | None
    data_share: float | None


def rates(lines: list[StepLine], peak_flops: float | None) -> Rates:
    """Rates over exactly these steps. An empty interval has none (None, not 0)."""
    wall_ns = sum(line.wall_ns for line in lines)
    seconds = wall_ns / 1e9
    if not seconds:
        return Rates(len(lines), 0.0, None, None, None, None, None)
    useful = sum(line.flops.useful for line in lines)
    return Rates(
        steps=len(lines),
        seconds=seconds,
        slots_per_s=sum(line.slots for line in lines) / seconds,
        tokens_per_s=sum(line.tokens for line in lines) / seconds,
        trained_per_s=sum(line.trained_tokens for line in lines if line.skipped is None) / seconds,
        mfu=useful / (seconds * peak_flops) if peak_flops else None,
        data_share=sum(line.account.get("data", 0) for line in lines) / wall_ns,
    )


class Window:
    """The most recent steps of one session that together span at least `span_s` seconds (and always the last one)."""

    def __init__(self, span_s: float) -> None:
        self._span_ns = span_s * 1e9
        self._lines: deque[StepLine] = deque()
        self._wall_ns = 0

    def add(self, line: StepLine) -> None:
        self._lines.append(line)
        self._wall_ns += line.wall_ns
        while self._wall_ns - self._lines[0].wall_ns >= self._span_ns and len(self._lines) > 1:
            self._wall_ns -= self._lines.popleft().wall_ns

    def clear(self) -> None:
        self._lines.clear()
        self._wall_ns = 0

    def rates(self, peak_flops: float | None) -> Rates:
        return rates(list(self._lines), peak_flops)


class TimeLeft:
    """Seconds until the last step: recent steps' mean, with the share that evaluation has added so far.

    A session's first step (compilation, warm-up) is left out as soon as there is a second one; `settled` says so.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[int] = deque(maxlen=_TIME_LEFT_STEPS)
        self._seen = 0

    def add(self, line: StepLine) -> None:
        self._seen += 1
        if self._seen == 2:
            self._recent.clear()
        self._recent.append(line.wall_ns)

    @property
    def settled(self) -> bool:
        return self._seen > 1

    def seconds(self, line: StepLine) -> float | None:
        if not self._recent:
            return None
        stepping = line.run_ns.get("productive", 0) + line.run_ns.get("checkpoint_stall", 0)
        evaluation = line.run_ns.get("evaluation", 0) / stepping if stepping else 0.0
        mean = sum(self._recent) / len(self._recent) / 1e9
        return max(0, self._steps - line.step) * mean * (1 + evaluation)
