"""A rank's progress in a few bytes of shared memory, readable when the rank is stopped, hung or dead.

The rank writes where it is (step, phase, number of collectives entered, monotonic time); the supervisor reads. Nothing
is sent, so a rank that makes no progress still tells where it made none.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from headway.guard.process_group import existing_control_group

VARIABLE = "HEADWAY_BEACONS"
"""The folder that the supervisor made for its ranks' beacons; without a supervisor nobody reads them."""
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write all its threads' stacks into `stack_path`, also while its main thread waits in C++."""

_RING = 128
_HEAD = struct.Struct("<11Q32s")
_SEQUENCE_AT, _HEARD_AT = 2 * 8, 9 * 8
LISTEN_S = 0.5
_LENGTH = _HEAD.size + 8 * _RING
OUTSIDE, STEP, AGREEING, ENDING = "start", "step", "host.agree", "end"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a beacon says. step: the last finished one; the rank works on step + 1. Times are monotonic nanoseconds.

    sequence: collectives entered over all training groups. steps: finished in this process; durations: of the last
    ones (at most 128), in ns. epoch and documents: where the batch in work starts. told_ns: when the account of the
    last step was written. resumed_from: the step this process started behind. first_ns: when its first step was done.
    begun: whether it has begun a step at all. heard_ns: when a thread of the process last ran; a stopped process is not
    heard, one that waits or sleeps is.
    """

    pid: int
    step: int
    sequence: int
    beat_ns: int
    told_ns: int
    steps: int
    resumed_from: int
    documents: int
    first_ns: int
    heard_ns: int
    begun: bool
    phase: str
    durations: tuple[int, ...]

    def p99_ns(self) -> int:
        """The 99th percentile of the known step times; 0 where none is known."""
        ordered = sorted(self.durations)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0

    def median_ns(self) -> int:
        ordered = sorted(self.durations)
        return ordered[len(ordered) // 2] if ordered else 0


def beacon_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.beacon"


def stack_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.stack"


class Beacon:
    """The writer's side. Cheap enough for every phase of every step (2 µs)."""

    def __init__(self, folder: Path, rank: int, sequence: Callable[[], int] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beacon_path(folder, rank), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, _LENGTH)
            self._map = mmap.mmap(descriptor, _LENGTH)
        finally:
            os.close(descriptor)
        self._sequence = sequence or collectives_entered
        self._step = self._told = self._steps = self._resumed = self._documents = self._first = self._begun = 0
        self._since = time.monotonic_ns()
        self._phases: list[str] = [OUTSIDE]
        # Kept open for the process's life: the handler writes to the descriptor.
        self._stacks = open(stack_path(folder, rank), "w")  # noqa: SIM115
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True)
        self._closing = threading.Event()
        self.beat()
        self._thread = threading.Thread(target=self._listen, name="headway-beacon", daemon=True)
        self._thread.start()

    def resumed(self, step: int) -> None:
        self._resumed = self._step = step
        self.beat()

    def begin_step(self, documents: int = 0) -> None:
        self._since, self._documents, self._begun = time.monotonic_ns(), documents, 1
        self._phases[0] = STEP
        self.beat()

    def finish_step(self, step: int) -> None:
        now = time.monotonic_ns()
        struct.pack_into("<Q", self._map, _HEAD.size + 8 * (self._steps % _RING), now - self._since)
        self._step, self._since = step, now
        self._steps += 1
        self._first = self._first or now
        self.beat()

    def told(self) -> None:
        """The account up to now is in the run folder: what comes after it is lost with the process."""
        self._told = time.monotonic_ns()

    def enter(self, phase: str) -> None:
        self._phases.append(phase)
        self.beat()

    def leave(self) -> None:
        self._phases.pop()
        self.beat()

    def beat(self) -> None:
        now = time.monotonic_ns()
        _HEAD.pack_into(
            self._map,
            0,
            os.getpid(),
            self._step,
            self._sequence(),
            now,
            self._told,
            self._steps,
            self._resumed,
            self._documents,
            self._first,
            now,
            self._begun,
            self._phases[-1].encode()[:32],
        )

    def _listen(self) -> None:
        """While the main thread waits in a collective, somebody must count that it has entered it."""
        while not self._closing.wait(LISTEN_S):
            struct.pack_into("<Q", self._map, _SEQUENCE_AT, self._sequence())
            struct.pack_into("<Q", self._map, _HEARD_AT, time.monotonic_ns())

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()
        self._map.close()


def light_beacon(environ: Mapping[str, str], rank: int) -> Beacon | None:
    """This rank's beacon, None without a supervisor."""
    folder = environ.get(VARIABLE)
    return Beacon(Path(folder), rank) if folder else None


def read_pulse(folder: Path, rank: int) -> Pulse | None:
    """What the beacon of `rank` says; None until the rank has lit it."""
    try:
        raw = beacon_path(folder, rank).read_bytes()
    except OSError:
        return None
    if len(raw) < _LENGTH:
        return None
    pid, step, sequence, beat, told, steps, resumed, documents, first, heard, begun, phase = _HEAD.unpack_from(raw)
    if not beat:
        return None
    known = min(steps, _RING)
    durations = struct.unpack_from(f"<{known}Q", raw, _HEAD.size)
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Pulse(pid, step, sequence, beat, told, steps, resumed, documents, first, heard, bool(begun), name, durations)


def collectives_entered() -> int:
    """Collectives that this process has entered in all groups but the control group, counted by the backends.

    Equal on all ranks at equal places of a step, DDP's reductions in C++ included; a backend that does not count
    adds 0.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0
    apart = existing_control_group()
    if apart is None:  # still being set up, and never from here: another thread would enter the same collective
        return 0
    total = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not apart:
            try:
                total += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
            except RuntimeError:
                continue
    return total


def watch_compilation(beacon: Beacon) -> None:
    """Lets torch.compile say when it compiles: minutes in the middle of a step, and no hang."""
    from torch._dynamo.callback import on_compile_end, on_compile_start  # seconds of import without compilation

    on_compile_start(lambda *_: beacon.enter("compile"))
    on_compile_end(lambda *_: beacon.leave())
