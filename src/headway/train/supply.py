"""The loop's batches: a reader that fails is started again where training stands, and a slow one is told of."""

from __future__ import annotations

import time
from collections.abc import Callable

from headway.account.errors import Stopped
from headway.data.feed import Fed, Feeder
from headway.data.global_batch import Position

# Below a second a wait is the account's business alone; it is a fault when it also is a large part of the step.
_SLOW_S, _SLOW_SHARE = 1.0, 0.5
# A wait of which the end is not in sight is told while it lasts: of a disk that hangs nobody would hear otherwise.
_LONG_S = 30.0
_QUIET_BATCHES = 100  # one line tells of a slow disk; a line a step would hide everything else
_RESTARTS = 3
_PAUSE_S = 1.0

Told = Callable[[str, str, str, float], None]
"""fault, evidence, action, seconds lost"""


class Supply:
    """Batches from a feeder, which is made anew after an error of the file system (a network disk that was away)."""

    def __init__(self, make: Callable[[Position], Feeder], position: Position, tell: Told) -> None:
        self._make, self._tell = make, tell
        self._feeder = make(position)
        self._given = 0.0
        self._quiet = 0

    def next(self, position: Position) -> Fed:
        """The batch that starts at `position`; waits for it. On CUDA its copy is in order with the current stream.

        Raises:
            UserError: damaged files, or a reader that failed several times in a row.
        """
        asked = time.monotonic()
        fed = self._take(position)
        fed.wait_on_device()
        self._judge(asked, time.monotonic())
        return fed

    def go_to(self, position: Position) -> None:
        """What comes next starts at `position`; the stream may be another one by now."""
        self._feeder.close()
        self._feeder = self._make(position)

    def close(self) -> None:
        self._feeder.close()

    def _take(self, position: Position) -> Fed:
        for attempt in range(_RESTARTS + 1):
            try:
                return self._patiently()
            except OSError as error:
                evidence = f"{type(error).__name__}: {error}"
            if attempt == _RESTARTS:
                break
            began = time.monotonic()
            self._feeder.close()
            time.sleep(_PAUSE_S * 2**attempt)
            self._feeder = self._make(position)
            self._tell(
                "data reader failed",
                evidence,
                f"started again at document {position.documents} of epoch {position.epoch}",
                time.monotonic() - began,
            )
        self._tell("data reader failed", evidence, f"stopped after {_RESTARTS} restarts", 0.0)
        said = f"data cannot be read: {evidence}; the run goes on from its newest checkpoint once it can"
        raise Stopped(said, told=True)

    def _patiently(self) -> Fed:
        """The feeder's next batch, however long that takes."""
        fed = self._feeder.within(_LONG_S)
        if fed is None:
            self._tell("slow data", f"no batch for {_LONG_S:.0f} s, and none in sight", "waits on", 0.0)
            self._quiet = 0  # how long it was in the end is told too
            fed = next(self._feeder)
        return fed

    def _judge(self, asked: float, got: float) -> None:
        waited, step = got - asked, asked - self._given
        first, self._given = not self._given, got
        self._quiet -= 1
        if first or self._quiet > 0 or waited < _SLOW_S or waited < _SLOW_SHARE * step:
            return
        self._quiet = _QUIET_BATCHES
        self._tell("slow data", f"waited {waited:.1f} s for a batch after {step:.1f} s of work", "went on", waited)
