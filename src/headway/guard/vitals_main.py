"""The process that asks cards, network and disk every two seconds, and writes down what it was told."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from headway.guard.processes import Forked, Process, can_fork, die_with_parent
from headway.guard.vitals import FILE, RECENT_S, Card, Vitals, disk_complaints, nic_counters, read_card

_EVERY_S = 2.0
_ORDINARY_S = 0.2
_SILENT_S = 5.0
_LEAVES_S = 2.0
_MOST_EVENTS = 100
DRIVER = Path("/dev/nvidiactl")


def has_cards() -> bool:
    """Whether there are cards to ask: a driver, and a binding to its library (`pynvml`)."""
    return DRIVER.exists() and ("pynvml" in sys.modules or find_spec("pynvml") is not None)


class Reader:
    """The process, for as long as the context is open. folder: where it writes; disk: where the run's files go."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self._folder, self._disk = folder, disk
        self._process: Process | None = None

    def __enter__(self) -> Reader:
        ask = die_with_parent()
        if can_fork():
            pid = os.fork()
            if not pid:
                _alone(self._folder, self._disk, ask)
            self._process = Forked(pid)
        else:
            command = [sys.executable, "-m", "headway.guard.vitals_main", str(self._folder), str(self._disk)]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ask, process_group=0
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        until = time.monotonic() + _LEAVES_S  # one that waits inside a driver does not die: it is left behind
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)


def _alone(folder: Path, disk: Path, ask: Any) -> None:
    try:
        os.setpgid(0, 0)
        if ask is not None:
            ask()
        gc.freeze()
        read_for_ever(folder, disk)
    finally:
        os._exit(0)


def read_for_ever(folder: Path, disk: Path, rounds: int | None = None, every_s: float = _EVERY_S) -> None:
    """Returns after `rounds`. An XID is written down at once: the rank that it kills dies a moment later."""
    cards, room = _Cards(), _Disk(disk)
    done, pause = 0, 0.0
    while rounds is None or done < rounds:
        cards.listen(pause)
        told = cards.read()
        write(folder, Vitals(at_ns=time.monotonic_ns(), cards=told, nics=nic_counters(), disk=room.complaints()))
        done, pause = done + 1, every_s


def write(folder: Path, vitals: Vitals) -> None:
    part = folder / f"{FILE}.part"
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(vitals))
        part.replace(folder / FILE)


class _Cards:
    """The cards that NVML knows; none where it is not there."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._count = 0
        self._events: Any = None
        self._xids: dict[tuple[int, int], float] = {}
        if not has_cards():
            return
        try:
            import pynvml as nvml  # type: ignore[import-untyped, import-not-found, unused-ignore]

            nvml.nvmlInit()
            self._count = int(nvml.nvmlDeviceGetCount())
        except Exception:  # no driver, another version, no right: there is nothing to tell
            return
        self._nvml, self._events = nvml, _watch_xids(nvml, self._count)

    def read(self) -> list[Card]:
        since = time.monotonic() - RECENT_S
        self._xids = {event: at for event, at in self._xids.items() if at >= since}
        cards = [read_card(self._nvml, index) for index in range(self._count)]
        return [
            msgspec.structs.replace(card, xids=[xid for index, xid in self._xids if index == card.index])
            for card in cards
        ]

    def listen(self, seconds: float) -> None:
        """Waits so long for a critical event, and takes all that have come."""
        until = time.monotonic() + seconds
        if self._event(seconds):
            for _ in range(_MOST_EVENTS):
                if not self._event(0.0):
                    return
            return
        time.sleep(max(0.0, until - time.monotonic()))

    def _event(self, seconds: float) -> bool:
        if self._events is None:
            return False
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, max(1, round(1000 * seconds)))
            index = int(self._nvml.nvmlDeviceGetIndex(event.device))
        except Exception:  # a time-out is an error, too: nothing has happened
            return False
        self._xids[index, int(event.eventData)] = time.monotonic()
        return True


def _watch_xids(nvml: Any, count: int) -> Any:
    try:
        events = nvml.nvmlEventSetCreate()
        for index in range(count):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except Exception:  # not every card tells events
        return None
    return events


class _Disk:
    """Asks a file system for its room from a thread: a shared one may not answer for minutes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._said: list[str] = []

    def complaints(self) -> list[str]:
        """Of the newest answer. An ordinary disk's is waited for."""
        if self._thread is None or not self._thread.is_alive():
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
            self._thread.join(_ORDINARY_S)
        silent = time.monotonic() - self._asked
        if self._thread.is_alive() and silent > _SILENT_S:
            return [f"the disk of {self._folder} has not answered for {silent:.0f} s"]
        return self._said

    def _ask(self) -> None:
        self._said = disk_complaints(self._folder)


if __name__ == "__main__":
    read_for_ever(Path(sys.argv[1]), Path(sys.argv[2]))
